// One step of a model of the Llama family in one call: no Python between layers.
//
// All rows of a batch go through each phase together; a phase's pieces are shared out among the threads. Every number
// depends on its own row, its own sequence's pages and the weights alone.
//
// The rows may be of several versions of one model. Where neighbours have the same weights, they go through them together.

#pragma once

#include <cmath>
#include <cstring>

#include "linear.h"
#include "rows.h"
#include "step_attention.h"

namespace pd {

class Step {
  public:
    Step(Engine& engine, const PdPart* parts, int part_count, const PdPool& pool, const PdBatch& batch)
        : engine_(engine), threads_(engine.threads), parts_(parts), part_count_(part_count), model_(*parts->model),
          pool_(pool), batch_(batch), attention_(engine, model_, pool, batch), rows_(batch.tokens) {}

    void run(PdOnLayer on_layer, float* logits, int32_t* greedy) {
        Threads::Busy busy(threads_);
        begin();
        for (int index = 0; index < model_.layer_count; index++) {
            threads_.follow();
            find_runs(index);
            for (const Run& run : runs_) {
                qkv(run);
                store_kv(index, run);
            }
            if (on_layer && on_layer(index)) return;
            if (index == model_.layer_count - 1) {
                keep_wanted_rows();
                find_runs(index);
            }
            if (rows_ == 0) return;
            if (index == 0 && model_.layer_count > 1) attention_.cut();
            attention_.run(index, model_.layers[index].window, heads_, seen_);
            for (const Run& run : runs_) {
                linear(run.layer->out, run.of(seen_, q_width()), q_width(), run.rows, Then::ADD, run.of(x_, model_.hidden), model_.hidden);
                mlp(run);
            }
        }
        finish(logits, greedy);
    }

  private:
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
        heads_ = engine_.heads.at_least(size_t(rows_) * qkv_width());
        seen_ = engine_.seen.at_least(size_t(rows_) * q_width());
        angles_ = engine_.angles.at_least(size_t(rows_) * model_.head_dim);
        engine_.positions.resize(rows_);
        for (int s = 0; s < batch_.sequences; s++) {
            const PdSequence& one = batch_.sequence[s];
            for (int i = 0; i < one.length; i++) engine_.positions[one.start + i] = one.past + i;
        }
        int first = 0;
        for (int p = 0; p < part_count_; p++) {
            embed(*parts_[p].model, first, parts_[p].rows);
            first += parts_[p].rows;
        }
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

    // From x [rows, width] as it is.
    void linear(const PdLinear& linear, const float* x, int width, int rows, Then then, float* y, int y_width) {
        Activations a = engine_.activations(linear, x, rows);
        if (a.kind != PD_F32) each_row(0, rows, [&](int r) { take_row(a, r, x + size_t(r) * width); });
        run_linear(threads_, linear, a, rows, then, y, y_width);
    }

    // From rows of the residual stream, normed with gain(row).
    template <class Gain>
    void normed_linear(int first, int rows, Gain&& gain, const PdLinear& linear, Then then, float* y, int y_width) {
        float* normed = engine_.normed.at_least(size_t(rows) * model_.hidden);
        Activations a = engine_.activations(linear, normed, rows);
        each_row(0, rows, [&](int r) {
            float* row = normed + size_t(r) * model_.hidden;
            rms_norm(x_ + size_t(first + r) * model_.hidden, gain(first + r), model_.hidden, model_.epsilon, row);
            take_row(a, r, row);
        });
        run_linear(threads_, linear, a, rows, then, y, y_width);
    }

    void qkv(const Run& run) {
        auto gain = [&](int) { return run.layer->input_norm; };
        normed_linear(run.first, run.rows, gain, run.layer->qkv, Then::SET, run.of(heads_, qkv_width()), qkv_width());
    }

    void store_kv(int index, const Run& run) {
        switch (pool_.type) {
            case PD_KV_F32: return store_kv_as<Float32>(index, run);
            case PD_KV_F16: return store_kv_as<Float16>(index, run);
            default: return store_kv_as<Int8>(index, run);
        }
    }

    template <class Kv>
    void store_kv_as(int index, const Run& run) {
        const PdLayer& layer = *run.layer;
        const int d = model_.head_dim, turned = model_.heads + model_.kv_heads;
        const float scale = LOG2_E / std::sqrt(float(d));  // attention takes powers of two
        each_row(run.first, run.rows, [&](int r) {
            float* head = heads_ + size_t(r) * qkv_width();
            const float* angles = angles_ + size_t(r) * d;
            for (int h = 0; h < turned; h++) {
                if (layer.qk_norm) rms_norm(head + h * d, layer.qk_norm + h * d, d, model_.epsilon, head + h * d);
                rope(head + h * d, angles, angles + d / 2, d, h < model_.heads ? scale : 1.0f);
                // Turned alike, q and k have the same product, and no channel that stands out when they become int8.
                if constexpr (Kv::SCALED) hadamard(head + h * d, d, d & -d);
            }
            const PdSequence& one = sequence_of(r);
            const int position = engine_.positions[r], page = batch_.page_ids[one.page_at + position / PAGE];
            for (int h = 0; h < model_.kv_heads; h++)
                PageHead<Kv>(pool_, index, page, h, d)
                    .write(position % PAGE, head + (model_.heads + h) * d, head + (turned + h) * d, d);
        });
    }

    const PdSequence& sequence_of(int row) const {
        int s = 0;
        while (row >= batch_.sequence[s].start + batch_.sequence[s].length) s++;
        return batch_.sequence[s];
    }

    // The last layer computes only those rows whose logits are wanted, once all of its K and V are stored.
    void keep_wanted_rows() {
        attention_.clear();
        float* kept = engine_.wanted.at_least(size_t(batch_.logit_rows) * (model_.hidden + qkv_width()));
        float* kept_heads = kept + size_t(batch_.logit_rows) * model_.hidden;
        for (int i = 0; i < batch_.logit_rows; i++) {
            const int row = batch_.logit_row[i];
            std::memcpy(kept + size_t(i) * model_.hidden, x_ + size_t(row) * model_.hidden, model_.hidden * sizeof(float));
            std::memcpy(kept_heads + size_t(i) * qkv_width(), heads_ + size_t(row) * qkv_width(), qkv_width() * sizeof(float));
            attention_.add(i, 1, engine_.positions[row], sequence_of(row));
        }
        x_ = kept;
        heads_ = kept_heads;
        rows_ = batch_.logit_rows;
        wanted_ = true;
        seen_ = engine_.seen.at_least(size_t(rows_) * q_width());
    }

    void mlp(const Run& run) {
        const int rows = run.rows;
        float* inner = engine_.inner.at_least(size_t(rows) * model_.inner);
        auto gain = [&](int) { return run.layer->post_norm; };
        normed_linear(run.first, rows, gain, run.layer->gate_up, Then::SILU, inner, model_.inner);
        if (model_.hadamard)
            each_row(0, rows, [&](int r) { hadamard(inner + size_t(r) * model_.inner, model_.inner, model_.hadamard); });
        linear(run.layer->down, inner, model_.inner, rows, Then::ADD, run.of(x_, model_.hidden), model_.hidden);
    }

    void finish(float* logits, int32_t* greedy) {
        auto gain = [&](int row) {
            int p = 0;
            while (row >= parts_[p].logit_rows) row -= parts_[p++].logit_rows;
            return parts_[p].model->final_norm;
        };
        for (int p = 0, first = 0; p < part_count_;) {
            const PdLinear& head = parts_[p].model->head;
            int rows = 0;
            for (; p < part_count_ && std::memcmp(&parts_[p].model->head, &head, sizeof head) == 0; p++)
                rows += parts_[p].logit_rows;
            float* to = logits + size_t(first) * model_.vocabulary;
            if (rows) normed_linear(first, rows, gain, head, Then::SET, to, model_.vocabulary);
            first += rows;
        }
        if (greedy)
            each_row(0, rows_, [&](int r) { greedy[r] = best(logits + size_t(r) * model_.vocabulary, model_.vocabulary); });
    }

    Engine& engine_;
    Threads& threads_;
    const PdPart* parts_;
    const int part_count_;
    const PdModel& model_;  // the first part's, whose shapes and settings are those of all
    const PdPool& pool_;
    const PdBatch& batch_;
    StepAttention attention_;
    std::vector<Run> runs_;
    int rows_;
    bool wanted_ = false;  // only rows whose logits are wanted are left
    float *x_ = nullptr, *heads_ = nullptr, *seen_ = nullptr, *angles_ = nullptr;
};

}  // namespace pd
