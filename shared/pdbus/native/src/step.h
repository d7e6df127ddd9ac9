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
#include "step_attention.h"
#include "step_rows.h"

namespace pd {

class Step : StepRows {
  public:
    Step(Engine& engine, const PdPart* parts, int part_count, const PdPool& pool, const PdBatch& batch)
        : StepRows(engine, parts, part_count, pool, batch), attention_(engine, model_, pool, batch) {}

    void run(PdOnLayer on_layer, float* logits, int32_t* greedy) {
        Threads::Busy busy(threads_);
        begin();
        heads_ = engine_.heads.at_least(size_t(rows_) * qkv_width());
        seen_ = engine_.seen.at_least(size_t(rows_) * q_width());
        const int first_layer = batch_.first_layer, last_layer = model_.layer_count - 1;
        for (int index = first_layer; index <= last_layer; index++) {
            threads_.follow();
            if (index > first_layer) keep_stream(index);
            find_runs(index);
            for (const Run& run : runs_) {
                qkv(run);
                store_kv(index, run);
            }
            if (on_layer && on_layer(index)) return;
            if (index == last_layer) {
                keep_wanted_rows();
                find_runs(index);
            }
            if (rows_ == 0) return;
            if (index == first_layer && index < last_layer) attention_.cut();
            attention_.run(index, model_.layers[index].window, heads_, seen_);
            for (const Run& run : runs_) {
                linear(run.layer->out, run.of(seen_, q_width()), q_width(), run.rows, Then::ADD, run.of(x_, model_.hidden), model_.hidden);
                mlp(run);
            }
        }
        finish(logits, greedy);
    }

  private:
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

    StepAttention attention_;
    float *heads_ = nullptr, *seen_ = nullptr;
};

}  // namespace pd
