// Attention of one step in every layer: cut into tiles of queries, then shared out among the threads.
#pragma once

#include <algorithm>

#include "engine.h"

namespace pd {

class StepAttention {
  public:
    StepAttention(Engine& engine, const PdModel& model, const PdPool& pool, const PdBatch& batch)
        : engine_(engine), threads_(engine.threads), model_(model), pool_(pool), batch_(batch) {}

    // All rows of the batch.
    void cut() {
        clear();
        const int most = std::max(1, WANTED_ROWS / (model_.heads / model_.kv_heads));
        for (int s = 0; s < batch_.sequences; s++) {
            const PdSequence& one = batch_.sequence[s];
            for (int i = 0; i < one.length; i += most)
                add(one.start + i, std::min(most, one.length - i), one.past + i, one);
        }
    }

    void clear() {
        engine_.tiles.clear();
        engine_.tile_at.clear();
    }

    void add(int row, int tokens, int position, const PdSequence& one) {
        QueryTile tile{};
        tile.q_stride = qkv_width();
        tile.tokens = tokens;
        tile.group = model_.heads / model_.kv_heads;
        tile.position = position;
        tile.pages = batch_.page_ids + one.page_at;
        engine_.tiles.push_back(tile);
        engine_.tile_at.push_back(row);
    }

    // heads [rows, q, k and v] -> seen [rows, q], for the rows of the tiles.
    void run(int index, int window, const float* heads, float* seen) {
        heads_ = heads;
        seen_ = seen;
        switch (pool_.type) {
            case PD_KV_F32: return run_as<Float32>(index, window);
            case PD_KV_F16: return run_as<Float16>(index, window);
            default: return run_as<Int8>(index, window);
        }
    }

  private:
    int q_width() const { return model_.heads * model_.head_dim; }
    int qkv_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }

    // A piece is a tile, a KV head and, where there are few of those, a block of keys.
    template <class Kv>
    void run_as(int index, int window) {
        const int d = model_.head_dim, group = model_.heads / model_.kv_heads;
        const int tiles = int(engine_.tiles.size()), pairs = tiles * model_.kv_heads;
        for (QueryTile& tile : engine_.tiles) tile.window = window;
        if (pairs >= 8 * threads_.count()) {
            // the long ones first: they are the last of each sequence
            threads_.run(pairs, [&](int piece) {
                const int t = tiles - 1 - piece / model_.kv_heads, h = piece % model_.kv_heads;
                alignas(64) float peak[TILE_ROWS], total[TILE_ROWS], value[TILE_ROWS * MOST_HEAD_DIM];
                const QueryTile tile = at_head(t, h);
                TileAttention<Kv> attention(tile, pool_, index, h, d);
                Joined joined[TILE_ROWS];
                for (int block = tile.first_block(); block < tile.blocks(); block++) {
                    attention.block(block, {peak, total, value});
                    for (int r = 0; r < tile.rows(); r++)
                        joined[r].join(peak[r], total[r], value + size_t(r) * d, seen_row(t, h, r), d);
                }
                for (int r = 0; r < tile.rows(); r++) joined[r].finish(seen_row(t, h, r), d);
            });
            return;
        }
        int most = 0;
        for (const QueryTile& tile : engine_.tiles) most = std::max(most, tile.blocks());
        const size_t row_size = 2 + d;
        float* partial = engine_.partial.at_least(size_t(pairs) * most * TILE_ROWS * row_size);
        auto part = [&](int pair, int block) -> Partial {
            float* base = partial + (size_t(pair) * most + block) * TILE_ROWS * row_size;
            return {base, base + TILE_ROWS, base + 2 * TILE_ROWS};
        };
        threads_.run(pairs * most, [&](int piece) {
            const int pair = piece % pairs, block = piece / pairs, t = pair / model_.kv_heads, h = pair % model_.kv_heads;
            const QueryTile tile = at_head(t, h);
            if (block < tile.first_block() || block >= tile.blocks()) return;
            TileAttention<Kv>(tile, pool_, index, h, d).block(block, part(pair, block));
        });
        for (int pair = 0; pair < pairs; pair++) {
            const int t = pair / model_.kv_heads, h = pair % model_.kv_heads;
            const QueryTile tile = at_head(t, h);
            for (int r = 0; r < tile.tokens * group; r++) {
                Joined joined;
                for (int block = tile.first_block(); block < tile.blocks(); block++) {
                    Partial one = part(pair, block);
                    joined.join(one.peak[r], one.total[r], one.value + size_t(r) * d, seen_row(t, h, r), d);
                }
                joined.finish(seen_row(t, h, r), d);
            }
        }
    }

    QueryTile at_head(int t, int kv_head) const {
        QueryTile tile = engine_.tiles[t];
        tile.q = heads_ + size_t(engine_.tile_at[t]) * qkv_width() + kv_head * tile.group * model_.head_dim;
        return tile;
    }
    float* seen_row(int t, int kv_head, int r) const {
        const QueryTile& tile = engine_.tiles[t];
        return seen_ + size_t(engine_.tile_at[t] + r / tile.group) * q_width() + (kv_head * tile.group + r % tile.group) * model_.head_dim;
    }

    Engine& engine_;
    Threads& threads_;
    const PdModel& model_;
    const PdPool& pool_;
    const PdBatch& batch_;
    const float* heads_ = nullptr;
    float* seen_ = nullptr;
};

}  // namespace pd
