// The rows of a step: whose they are, and how they begin.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine.h"
#include "rows.h"

namespace pd {

class StepRows {
  protected:
    StepRows(Engine& engine, const PdPart* parts, int part_count, const PdPool& pool, const PdBatch& batch)
        : engine_(engine), threads_(engine.threads), parts_(parts), part_count_(part_count), model_(*parts->model),
          pool_(pool), batch_(batch), rows_(batch.tokens) {}

    // Neighbouring rows that have the same weights in a layer, and these.
    struct Run {
        const PdLayer* layer;
        int first, rows;

        float* of(float* all, int width) const { return all + size_t(first) * width; }
    };

    int q_width() const { return model_.heads * model_.head_dim; }
    int qkv_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }

    // Versions that share a layer share its memory: equal pointers are equal weights.
    void find_runs(int index) {
        runs_.clear();
        int first = 0;
        for (int p = 0; p < part_count_; p++) {
            const PdLayer* layer = &parts_[p].model->layers[index];
            const int rows = wanted_ ? parts_[p].logit_rows : parts_[p].rows;
            if (!runs_.empty() && std::memcmp(runs_.back().layer, layer, sizeof *layer) == 0) {
                runs_.back().rows += rows;
            } else if (rows) {
                runs_.push_back({layer, first, rows});
            }
            first += rows;
        }
    }

    // Row after row where there are few, shared out where there are many.
    template <class Row>
    void each_row(int first, int rows, Row&& row) {
        if (rows < 8) {
            for (int r = first; r < first + rows; r++) row(r);
            return;
        }
        constexpr int RUN = 8;
        threads_.run((rows + RUN - 1) / RUN, [&](int piece) {
            for (int r = piece * RUN; r < std::min(rows, (piece + 1) * RUN); r++) row(first + r);
        });
    }

    void begin() {
        x_ = engine_.stream.at_least(size_t(rows_) * model_.hidden);
        angles_ = engine_.angles.at_least(size_t(rows_) * model_.head_dim);
        engine_.positions.resize(rows_);
        for (int s = 0; s < batch_.sequences; s++) {
            const PdSequence& one = batch_.sequence[s];
            for (int i = 0; i < one.length; i++) engine_.positions[one.start + i] = one.past + i;
        }
        if (batch_.first_layer) take_stream();
        for (int p = 0, first = 0; p < part_count_ && !batch_.first_layer; first += parts_[p++].rows)
            embed(*parts_[p].model, first, parts_[p].rows);
        each_row(0, rows_, [&](int r) {
            const int half = model_.head_dim / 2;
            float* angles = angles_ + size_t(r) * model_.head_dim;  // cosines, then sines
            for (int i = 0; i < half; i++) {
                double angle = float(engine_.positions[r]) * model_.frequencies[i];
                angles[i] = float(std::cos(angle));
                angles[half + i] = float(std::sin(angle));
            }
        });
    }

    void embed(const PdModel& model, int first, int rows) {
        each_row(first, rows, [&](int r) {
            const size_t from = size_t(batch_.token_ids[r]) * model.hidden;
            float* to = x_ + size_t(r) * model.hidden;
            if (model.embedding_half) {
                const uint16_t* row = (const uint16_t*)model.embedding + from;
                for (int i = 0; i < model.hidden; i += LANES) store(to + i, load_half(row + i));
            } else {
                std::memcpy(to, (const float*)model.embedding + from, model.hidden * sizeof(float));
            }
        });
    }

    // What enters the step's first layer, as a step through the layers below has kept it.
    void take_stream() {
        for (int i = 0; i < pool_.stream_count; i++) {
            if (pool_.stream_layers[i] != batch_.first_layer) continue;
            each_row(0, rows_, [&](int r) { std::memcpy(x_ + size_t(r) * model_.hidden, kept(i, r), model_.hidden * sizeof(float)); });
        }
    }

    // Into the rows' pages, where what enters this layer is to be kept.
    void keep_stream(int index) {
        for (int i = 0; i < pool_.stream_count; i++) {
            if (pool_.stream_layers[i] != index) continue;
            each_row(0, rows_, [&](int r) { std::memcpy(kept(i, r), x_ + size_t(r) * model_.hidden, model_.hidden * sizeof(float)); });
        }
    }

    float* kept(int stream, int row) const {
        const int position = engine_.positions[row], page = batch_.page_ids[sequence_of(row).page_at + position / PAGE];
        return pool_.streams[stream] + (size_t(page) * PAGE + position % PAGE) * model_.hidden;
    }

    const PdSequence& sequence_of(int row) const {
        int s = 0;
        while (row >= batch_.sequence[s].start + batch_.sequence[s].length) s++;
        return batch_.sequence[s];
    }

    Engine& engine_;
    Threads& threads_;
    const PdPart* parts_;
    const int part_count_;
    const PdModel& model_;  // the first part's, whose shapes and settings are those of all
    const PdPool& pool_;
    const PdBatch& batch_;
    std::vector<Run> runs_;
    int rows_;
    bool wanted_ = false;  // only rows whose logits are wanted are left
    float *x_ = nullptr, *angles_ = nullptr;
};

}  // namespace pd
