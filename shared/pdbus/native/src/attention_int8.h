// What a block of keys says to a tile of queries, over pages of int8: both products in whole numbers.
//
// A query becomes int8 with a scale of its own, as keys are; weights (times the scales of the values that they weigh) become
// 0 to 255, relative to the greatest of the block. The sums are exact, so that they may run in any order and shape. What
// integers cost in attention, and what turning q and k gives back: SageAttention, arXiv 2410.02367.
#pragma once

#include "activations.h"
#include "attention.h"
#include "dots.h"

namespace pd {

#ifdef __AVX512F__
constexpr int SCORED_AT_ONCE = 12, VALUED_AT_ONCE = 6, VALUES_WIDE = 4;  // rows, rows and vectors, as registers allow
#else
constexpr int SCORED_AT_ONCE = 4, VALUED_AT_ONCE = 2, VALUES_WIDE = 1;
#endif
constexpr int FEW_SCORED = 4;  // so few rows leave the adders idle against one page: two at once
constexpr int Q_STRIDE = MOST_HEAD_DIM + 64;  // so that rows do not fall on the same lines of the cache
constexpr float MOST_WEIGHT = 255.0f, LEAST_TOP = 1e-30f;  // below, values of a block count as zeros: 255 / top must be finite

template <>
class TileAttention<Int8> {
  public:
    TileAttention(const QueryTile& tile, const PdPool& pool, int layer, int kv_head, int head_dim)
        : tile_(tile), pool_(pool), layer_(layer), kv_head_(kv_head), head_dim_(head_dim), rows_(tile.rows()) {
        for (int r = 0; r < rows_; r++) {
            auto put = [&](int i, I16x some) { store_bytes(q_ + r * Q_STRIDE + i, some); };
            int32_t sum;
            quantise_row(tile.row(r, head_dim), head_dim, put, q_scale_ + r, &sum);
            q_lift_[r] = lift(sum);
        }
    }

    void block(int block, Partial out) {
        const KeyRange keys(tile_, block);
        for (int i = 0; i < keys.pages(); i++) {
            const PageHead<Int8> page(pool_, layer_, tile_.pages[keys.begin / PAGE + i], kv_head_, head_dim_);
            k_[i] = page.k, v_[i] = page.v, k_scale_[i] = page.k_scale, v_scale_[i] = page.v_scale;
        }
        score(keys);
        for (int r = 0; r < rows_; r++) weigh(keys, r, out);
        by_rows<VALUED_AT_ONCE>(rows_, [&](auto n, int r) {
            int d = 0;
            for (; d + VALUES_WIDE * LANES <= head_dim_; d += VALUES_WIDE * LANES)
                values<n(), VALUES_WIDE>(keys.pages(), r, d, out.value);
            for (; d < head_dim_; d += LANES) values<n(), 1>(keys.pages(), r, d, out.value);
        });
    }

  private:
    void score(const KeyRange& keys) {
        int page = 0;
        if (rows_ <= FEW_SCORED)
            for (; page + 1 < keys.pages(); page += 2) score_pages<FEW_SCORED, 2>(keys, page);
        for (; page < keys.pages(); page++) score_pages<SCORED_AT_ONCE, 1>(keys, page);
    }

    template <int R, int P>
    void score_pages(const KeyRange& keys, int page) {
        for (int p = page; p < page + P; p++) {
            prefetch(v_[p], PAGE * head_dim_);
            if (p + P < keys.pages()) prefetch(k_[p + P], PAGE * head_dim_);
        }
        by_rows<R>(rows_, [&](auto n, int row) { score_rows<n(), P>(keys, page, row); });
    }

    // Rows row to row + R against P pages. The query's scale comes later.
    template <int R, int P>
    void score_rows(const KeyRange& keys, int page, int row) {
        SignedDot dot[P][R];
        PD_UNROLL for (int p = 0; p < P; p++)
            PD_UNROLL for (int r = 0; r < R; r++) dot[p][r].start(q_lift_[row + r]);
        const int8_t* q = q_ + row * Q_STRIDE;
        PD_KEEP_LOOP
        for (int d = 0; d < head_dim_; d += 4)
            PD_UNROLL for (int p = 0; p < P; p++) {
                const SignedWeights some(k_[page + p] + d * PAGE);
                PD_UNROLL for (int r = 0; r < R; r++) dot[p][r].add(q + r * Q_STRIDE + d, some);
            }
        PD_UNROLL for (int p = 0; p < P; p++) {
            const int at = keys.begin + (page + p) * PAGE;
            F16x scale = load(k_scale_[page + p]);
            PD_UNROLL for (int r = 0; r < R; r++) {
                F16x score = mul(to_float(dot[p][r].whole), scale);
                if (!keys.all_see(at)) score = within(score, fill(NEVER), at, tile_.first(row + r), tile_.last(row + r));
                store(score_ + (row + r) * KEY_BLOCK + at - keys.begin, score);
            }
        }
    }

    // Scores of row r become weights.
    void weigh(const KeyRange& keys, int r, Partial out) {
        float* row = score_ + r * KEY_BLOCK;
        Weight* weights = weight_ + r * KEY_BLOCK;
        F16x most = fill(NEVER);
        for (int at = 0; at < keys.end - keys.begin; at += PAGE) most = max(most, load(row + at));
        const float seen = greatest(most), peak = seen * q_scale_[r];
        out.peak[r] = seen == NEVER ? NEVER : peak;
        const F16x factor = fill(q_scale_[r]), offset = fill(-peak);
        F16x total = zero(), largest = zero();
        for (int page = 0; seen != NEVER && page < keys.pages(); page++, row += PAGE) {
            const int at = keys.begin + page * PAGE;
            F16x weight = exp2(fma(load(row), factor, offset)), scaled = mul(weight, load(v_scale_[page]));
            if (!keys.all_see(at)) {  // what an unwritten token's scale makes of it may be anything
                weight = within(weight, zero(), at, tile_.first(r), tile_.last(r));
                scaled = within(scaled, zero(), at, tile_.first(r), tile_.last(r));
            }
            total = add(total, weight);
            largest = max(largest, scaled);
            store(row, scaled);
        }
        out.total[r] = sum(total);
        const float top = greatest(largest);
        weight_scale_[r] = top / MOST_WEIGHT;
        const bool any = top > LEAST_TOP;
        const F16x steps = fill(any ? MOST_WEIGHT / top : 0.0f);
        row = score_ + r * KEY_BLOCK;
        for (int at = 0; at < keys.end - keys.begin; at += PAGE)
            store_weights(weights + at, to_int(any ? mul(load(row + at), steps) : zero()));
    }

    // 16 * C dimensions of R rows.
    template <int R, int C>
    void values(int pages, int row, int d, float* out) const {
        WeightedSum sum[R][C];
        PD_UNROLL for (int r = 0; r < R; r++)
            PD_UNROLL for (int c = 0; c < C; c++) sum[r][c].clear();
        const Weight* weights = weight_ + row * KEY_BLOCK;
        for (int page = 0; page < pages; page++)
            PD_KEEP_LOOP for (int four = 0; four < 4; four++, weights += 4) {
                const int8_t* at = v_[page] + (four * head_dim_ + d) * 4;
                FourValues some[C];
                PD_UNROLL for (int c = 0; c < C; c++) some[c] = FourValues(at + c * 64);
                PD_UNROLL for (int r = 0; r < R; r++) {
                    const FourWeights four_weights(weights + r * KEY_BLOCK);
                    PD_UNROLL for (int c = 0; c < C; c++) sum[r][c].add(four_weights, some[c]);
                }
            }
        PD_UNROLL for (int r = 0; r < R; r++)
            PD_UNROLL for (int c = 0; c < C; c++)
                store(out + size_t(row + r) * head_dim_ + d + c * LANES,
                      mul(to_float(sum[r][c].whole()), fill(weight_scale_[row + r])));
    }

    const QueryTile& tile_;
    const PdPool& pool_;
    const int layer_, kv_head_, head_dim_, rows_;
    // Of the pages of a block.
    const int8_t *k_[KEY_BLOCK / PAGE], *v_[KEY_BLOCK / PAGE];
    const float *k_scale_[KEY_BLOCK / PAGE], *v_scale_[KEY_BLOCK / PAGE];
    // Of the rows.
    alignas(64) int8_t q_[TILE_ROWS * Q_STRIDE];
    float q_scale_[TILE_ROWS], weight_scale_[TILE_ROWS];
    int32_t q_lift_[TILE_ROWS];
    alignas(64) float score_[TILE_ROWS * KEY_BLOCK];
    alignas(64) Weight weight_[TILE_ROWS * KEY_BLOCK];
};

}  // namespace pd
