// What a block of keys says to a tile of queries, over pages of fp32 or fp16.
#pragma once

#include "attention.h"

namespace pd {

#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 8, FEW_ROWS = 4;  // as registers allow: against one page, against two
#else
constexpr int ROWS_AT_ONCE = 4, FEW_ROWS = 3;
#endif

// Rows row to row + R against P pages: out[page][row], each a sum over head_dim in order. Two pages at once keep the adders
// busy when rows are few.
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

// Attention of one tile to one KV head of a layer.
template <class Kv>
class TileAttention {
  public:
    TileAttention(const QueryTile& tile, const PdPool& pool, int layer, int kv_head, int head_dim)
        : tile_(tile), pool_(pool), layer_(layer), kv_head_(kv_head), head_dim_(head_dim) {
        for (int r = 0; r < tile.rows(); r++) q_[r] = tile.row(r, head_dim);
    }

    void block(int block, Partial out) {
        const KeyRange keys(tile_, block);
        score(keys);
        for (int r = 0; r < tile_.rows(); r++) weigh(keys, r, out);
        for (int at = keys.begin; at < keys.end; at += PAGE)
            value_page<Kv>(p_ + at - keys.begin, tile_.rows(), page_at(at).v, std::min(PAGE, keys.end - at), head_dim_,
                           out.value);
    }

  private:
    PageHead<Kv> page_at(int at) const { return {pool_, layer_, tile_.pages[at / PAGE], kv_head_, head_dim_}; }

    void score(const KeyRange& keys) {
        int next = keys.begin;
        if (tile_.rows() <= FEW_ROWS)
            for (; next + PAGE < keys.end; next += 2 * PAGE) score_at<2>(keys, next);
        for (; next < keys.end; next += PAGE) score_at<1>(keys, next);
    }

    template <int P>
    void score_at(const KeyRange& keys, int at) {
        const typename Kv::Element* k[P];
        for (int i = 0; i < P; i++) {
            const int ahead = at + (i + P) * PAGE;
            k[i] = page_at(at + i * PAGE).k;
            prefetch(page_at(at + i * PAGE).v, PAGE * head_dim_);
            if (ahead < keys.end) prefetch(page_at(ahead).k, PAGE * head_dim_);
        }
        F16x found[P][TILE_ROWS];
        score_pages<Kv, P>(q_, tile_.rows(), k, head_dim_, found);
        for (int i = 0; i < P; i++, at += PAGE)
            for (int r = 0; r < tile_.rows(); r++) {
                if (!keys.all_see(at)) found[i][r] = within(found[i][r], fill(NEVER), at, tile_.first(r), tile_.last(r));
                store(p_ + r * KEY_BLOCK + at - keys.begin, found[i][r]);
            }
    }

    // Scores become weights relative to the greatest of the block.
    void weigh(const KeyRange& keys, int r, Partial out) {
        float* row = p_ + r * KEY_BLOCK;
        F16x most = fill(NEVER);
        for (int at = 0; at < keys.end - keys.begin; at += PAGE) most = max(most, load(row + at));
        const float peak = greatest(most);
        F16x total = zero();
        for (int at = 0; at < keys.end - keys.begin; at += PAGE) {
            F16x weight = peak == NEVER ? zero() : exp2(sub(load(row + at), fill(peak)));
            if (!keys.all_see(keys.begin + at)) weight = within(weight, zero(), keys.begin + at, tile_.first(r), tile_.last(r));
            total = add(total, weight);
            store(row + at, weight);
        }
        out.peak[r] = peak;
        out.total[r] = sum(total);
        for (int d = 0; d < head_dim_; d += LANES) store(out.value + size_t(r) * head_dim_ + d, zero());
    }

    const QueryTile& tile_;
    const PdPool& pool_;
    const int layer_, kv_head_, head_dim_;
    const float* q_[TILE_ROWS];
    alignas(64) float p_[TILE_ROWS * KEY_BLOCK];
};

}  // namespace pd
