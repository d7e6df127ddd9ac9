// Attention over pages, in one order of reduction whatever the shape of the call (DESIGN.md G9).
//
// Keys are cut into blocks of 256 at absolute positions. Within a block, for one query: scores are sums over head_dim in
// order; the softmax is relative to the block's own maximum; values are added token by token. Blocks are joined from the
// first to the last. None of that depends on which queries are computed together, on who computes a block, or on how the
// prompt was cut. Masked keys add an exact zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "pages.h"

namespace pd {

constexpr int KEY_BLOCK = 256;
constexpr int TILE_ROWS = 64;   // at most so many query rows read a block of keys together,
constexpr int WANTED_ROWS = 24;  // and about so many where there is a choice
constexpr int MOST_HEAD_DIM = 256;
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 8, FEW_ROWS = 4;  // as registers allow: against one page, against two
#else
constexpr int ROWS_AT_ONCE = 4, FEW_ROWS = 3;
#endif
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Queries of one sequence at consecutive positions, for one KV head: row = token * group + query head in the group.
struct QueryTile {
    const float* q;  // of the first token and first head of the group, scaled by head_dim^-0.5
    int q_stride;    // floats from a token to the next
    int tokens, group, position;
    const int32_t* pages;
    int window;  // 0: all
    int rows() const { return tokens * group; }
    const float* row(int r, int head_dim) const { return q + size_t(r / group) * q_stride + (r % group) * head_dim; }
    int last(int r) const { return position + r / group; }
    int first(int r) const { return window ? std::max(0, last(r) - window + 1) : 0; }
    int first_block() const { return first(0) / KEY_BLOCK; }
    int blocks() const { return last(rows() - 1) / KEY_BLOCK + 1; }
};

// Pages lie anywhere, so that the hardware cannot guess which comes next.
template <class Element>
inline void prefetch(const Element* from, int count) {
    for (const char* line = (const char*)from; line < (const char*)(from + count); line += 64) _mm_prefetch(line, _MM_HINT_T1);
}

// What a block of keys says to each row: maximum, sum of exponentials, weighted values.
struct Partial {
    float* peak;   // [rows]
    float* total;  // [rows]
    float* value;  // [rows, head_dim]
};

// Rows row to row + R against P pages: out[page][row], each a sum over head_dim in order. Two pages at once keep the adders busy when
// rows are few.
template <class Kv, int R, int P>
inline void scores(const float* const* q, const typename Kv::Element* const* k, int head_dim, F16x (*out)[TILE_ROWS], int row) {
    F16x sum[P][R];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) sum[p][r] = zero();
    for (int d = 0; d < head_dim; d++) {
        for (int p = 0; p < P; p++) {
            F16x keys = Kv::load16(k[p] + d * PAGE);
            for (int r = 0; r < R; r++) sum[p][r] = fma(fill(q[row + r][d]), keys, sum[p][r]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) out[p][row + r] = sum[p][r];
}

// 16 * C dimensions of R rows: value += p * v, token by token
template <class Kv, int R, int C>
inline void add_values(const float* p, int p_stride, const typename Kv::Element* v, int tokens, int head_dim, float* value) {
    F16x sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = load(value + r * head_dim + c * LANES);
    for (int t = 0; t < tokens; t++) {
        F16x values[C];
        for (int c = 0; c < C; c++) values[c] = Kv::load16(v + t * head_dim + c * LANES);
        for (int r = 0; r < R; r++) {
            F16x weight = fill(p[r * p_stride + t]);
            for (int c = 0; c < C; c++) sum[r][c] = fma(weight, values[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(value + r * head_dim + c * LANES, sum[r][c]);
}

template <class Kv, int R>
inline void add_page(const float* p, const typename Kv::Element* v, int tokens, int head_dim, float* value) {
#ifdef __AVX512F__
    constexpr int WIDE = 4;
#else
    constexpr int WIDE = R <= 2 ? 2 : 1;
#endif
    int d = 0;
    for (; d + WIDE * LANES <= head_dim; d += WIDE * LANES)
        add_values<Kv, R, WIDE>(p, KEY_BLOCK, v + d, tokens, head_dim, value + d);
    for (; d < head_dim; d += LANES) add_values<Kv, R, 1>(p, KEY_BLOCK, v + d, tokens, head_dim, value + d);
}

// Calls body(number of rows, first row) for runs of up to R rows that together are all of them.
template <int R, class Body>
inline void rest_of_rows(int rest, int at, Body& body) {
    if constexpr (R > 0) {
        if (rest == R) body(std::integral_constant<int, R>(), at);
        else rest_of_rows<R - 1>(rest, at, body);
    }
}
template <int R, class Body>
inline void by_rows(int rows, Body&& body) {
    int at = 0;
    for (; at + R <= rows; at += R) body(std::integral_constant<int, R>(), at);
    rest_of_rows<R - 1>(rows - at, at, body);
}

// Scores of all rows against one page, and values of one page into all rows. Where many rows read it, a page that is not
// fp32 is widened once; that is exact, so both ways give the same.
template <class Kv, int P>
inline void score_pages(const float* const* q, int rows, const typename Kv::Element* const* k, int head_dim, F16x (*out)[TILE_ROWS]) {
    if (Kv::NARROW && rows > ROWS_AT_ONCE) {
        alignas(64) float wide[P][MOST_HEAD_DIM * PAGE];
        const float* wide_k[P];
        for (int p = 0; p < P; p++) {
            for (int i = 0; i < head_dim * PAGE; i += LANES) store(wide[p] + i, Kv::load16(k[p] + i));
            wide_k[p] = wide[p];
        }
        return score_pages<Float32, P>(q, rows, wide_k, head_dim, out);
    }
    by_rows<P == 1 ? ROWS_AT_ONCE : FEW_ROWS>(rows, [&](auto n, int row) { scores<Kv, n(), P>(q, k, head_dim, out, row); });
}

template <class Kv>
inline void value_page(const float* p, int rows, const typename Kv::Element* v, int tokens, int head_dim, float* value) {
    if (Kv::NARROW && rows > 4) {
        alignas(64) float wide[MOST_HEAD_DIM * PAGE];
        for (int i = 0; i < head_dim * tokens; i += LANES) store(wide + i, Kv::load16(v + i));
        return value_page<Float32>(p, rows, wide, tokens, head_dim, value);
    }
    by_rows<4>(rows, [&](auto n, int r) {
        add_page<Kv, n()>(p + r * KEY_BLOCK, v, tokens, head_dim, value + size_t(r) * head_dim);
    });
}

template <class Kv>
inline void attend_block(const QueryTile& tile, const PdPool& pool, int layer, int kv_head, int head_dim, int block, Partial out) {
    alignas(64) float p[TILE_ROWS * KEY_BLOCK];
    const float* q[TILE_ROWS];
    const int rows = tile.rows(), start = block * KEY_BLOCK;
    const int end = std::min(start + KEY_BLOCK, tile.last(rows - 1) + 1);  // what lies beyond may be undefined
    const int begin = std::max(start, tile.first(0) / PAGE * PAGE);        // seen by no row before that
    for (int r = 0; r < rows; r++) q[r] = tile.row(r, head_dim);

    auto page_at = [&](int at) { return PageHead<Kv>(pool, layer, tile.pages[at / PAGE], kv_head, head_dim); };
    auto score = [&](auto pages, int at) {
        const typename Kv::Element* k[pages()];
        for (int i = 0; i < pages(); i++) {
            const int ahead = at + (i + pages()) * PAGE;
            k[i] = page_at(at + i * PAGE).k;
            prefetch(page_at(at + i * PAGE).v, PAGE * head_dim);
            if (ahead < end) prefetch(page_at(ahead).k, PAGE * head_dim);
        }
        F16x found[pages()][TILE_ROWS];
        score_pages<Kv, pages()>(q, rows, k, head_dim, found);
        for (int i = 0; i < pages(); i++, at += PAGE)
            for (int r = 0; r < rows; r++) {
                if constexpr (Kv::SCALED) found[i][r] = mul(found[i][r], load(page_at(at).k_scale));
                store(p + r * KEY_BLOCK + at - start, within(found[i][r], fill(NEVER), at, tile.first(r), tile.last(r)));
            }
    };
    int next = begin;
    if (rows <= FEW_ROWS)
        for (; next + PAGE < end; next += 2 * PAGE) score(std::integral_constant<int, 2>(), next);
    for (; next < end; next += PAGE) score(std::integral_constant<int, 1>(), next);

    for (int r = 0; r < rows; r++) {
        float* row = p + r * KEY_BLOCK;
        F16x most = fill(NEVER);
        for (int at = begin; at < end; at += PAGE) most = max(most, load(row + at - start));
        const float peak = greatest(most);
        F16x total = zero();
        for (int at = begin; at < end; at += PAGE) {
            F16x weight = peak == NEVER ? zero() : exp(sub(load(row + at - start), fill(peak)));
            total = add(total, weight);
            store(row + at - start, weight);
        }
        out.peak[r] = peak;
        out.total[r] = sum(total);
        for (int d = 0; d < head_dim; d += LANES) store(out.value + size_t(r) * head_dim + d, zero());
    }

    for (int at = begin; at < end; at += PAGE) {
        const PageHead<Kv> page = page_at(at);
        float* weights = p + at - start;
        if constexpr (Kv::SCALED)
            for (int r = 0; r < rows; r++) {
                F16x scaled = mul(load(weights + r * KEY_BLOCK), load(page.v_scale));
                // an unwritten token's scale may be anything: its weight stays zero
                store(weights + r * KEY_BLOCK, within(scaled, zero(), at, 0, end - 1));
            }
        value_page<Kv>(weights, rows, page.v, std::min(PAGE, end - at), head_dim, out.value);
    }
}

// Joins block after block into what all blocks before it said; `value` starts as zeros.
struct Joined {
    float peak = NEVER, total = 0.0f;
    void join(float block_peak, float block_total, const float* block_value, float* value, int head_dim) {
        if (block_peak == NEVER) return;
        float top = std::max(peak, block_peak);
        alignas(64) float pair[LANES] = {peak - top, block_peak - top};
        store(pair, exp(load(pair)));
        F16x before = fill(pair[0]), now = fill(pair[1]);
        for (int d = 0; d < head_dim; d += LANES)
            store(value + d, fma(load(block_value + d), now, mul(load(value + d), before)));
        total = block_total * pair[1] + total * pair[0];
        peak = top;
    }
    void finish(float* value, int head_dim) const {
        for (int d = 0; d < head_dim; d += LANES) store(value + d, div(load(value + d), fill(total)));
    }
};

}  // namespace pd
