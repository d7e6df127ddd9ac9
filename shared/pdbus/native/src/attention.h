// Attention over pages, in one order of reduction whatever the shape of the call (DESIGN.md G9).
//
// Keys are cut into blocks of 256 at absolute positions. Within a block, for one query: scores are sums over head_dim in
// order; the softmax is relative to the block's own maximum; values are added token by token; over int8 pages both sums are
// exact. Blocks are joined from the first to the last. None of that depends on which queries are computed together, on who
// computes a block, or on how the prompt was cut. Masked keys add an exact zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "pages.h"

namespace pd {

constexpr int KEY_BLOCK = 256;
constexpr int TILE_ROWS = 64;   // at most so many query rows read a block of keys together,
constexpr int WANTED_ROWS = 24;  // and about so many where there is a choice
constexpr int MOST_HEAD_DIM = 256;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Queries of one sequence at consecutive positions, for one KV head: row = token * group + query head in the group.
struct QueryTile {
    const float* q;  // of the first token and first head of the group, scaled by head_dim^-0.5 * log2(e)
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

// The keys of a block that some row of the tile sees: whole pages, whose last may be undefined from `end` on. All rows
// see all keys from `all_from` to `all_to`, whole pages again.
struct KeyRange {
    int begin, end, all_from, all_to;
    KeyRange(const QueryTile& tile, int block) {
        const int last = tile.rows() - 1;
        begin = std::max(block * KEY_BLOCK, tile.first(0) / PAGE * PAGE);
        end = std::min((block + 1) * KEY_BLOCK, tile.last(last) + 1);
        all_from = (tile.first(last) + PAGE - 1) / PAGE * PAGE;
        all_to = (tile.last(0) + 1) / PAGE * PAGE;
    }
    int pages() const { return (end - begin + PAGE - 1) / PAGE; }
    bool all_see(int at) const { return at >= all_from && at < all_to; }
};

// What a block of keys says to each row: maximum (of powers of two), sum of powers, weighted values.
struct Partial {
    float* peak;   // [rows]
    float* total;  // [rows]
    float* value;  // [rows, head_dim]
};

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

// Joins block after block into what all blocks before it said.
struct Joined {
    float peak = NEVER, total = 0.0f;
    void join(float block_peak, float block_total, const float* block_value, float* value, int head_dim) {
        if (block_peak == NEVER) return;
        if (peak == NEVER) {
            std::memcpy(value, block_value, head_dim * sizeof(float));
            peak = block_peak, total = block_total;
            return;
        }
        float top = std::max(peak, block_peak);
        alignas(64) float pair[LANES] = {peak - top, block_peak - top};
        store(pair, exp2(load(pair)));
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
