// One step of a model of the Llama family in one call: no Python between layers.
//
// All rows of a batch go through each phase together; a phase's pieces are shared out among the threads. Every number
// depends on its own row, its own sequence's pages and the weights alone.

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "linear.h"
#include "rows.h"
#include "step_attention.h"

namespace pd {

class Step {
  public:
    Step(Engine& engine, const PdModel& model, const PdPool& pool, const PdBatch& batch)
        : engine_(engine), threads_(engine.threads), model_(model), pool_(pool), batch_(batch),
          attention_(engine, model, pool, batch), rows_(batch.tokens) {}

    void run(PdOnLayer on_layer, float* logits, int32_t* greedy) {
        Threads::Busy busy(threads_);
        begin();
        for (int index = 0; index < model_.layer_count; index++) {
            threads_.follow();
            const PdLayer& layer = model_.layers[index];
            qkv(layer);
            store_kv(index, layer);
            if (on_layer && on_layer(index)) return;
            if (index == model_.layer_count - 1) keep_wanted_rows();
            if (rows_ == 0) return;
            if (index == 0 && model_.layer_count > 1) attention_.cut();
            attention_.run(index, layer.window, heads_, seen_);
            linear(layer.out, seen_, q_width(), Then::ADD, x_, model_.hidden);
            mlp(layer);
        }
        finish(logits, greedy);
    }

  private:
    int q_width() const { return model_.heads * model_.head_dim; }
    int qkv_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }

    // Row after row where there are few, shared out where there are many.
    template <class Row>
    void each_row(Row&& row) {
        if (rows_ < 8) {
            for (int r = 0; r < rows_; r++) row(r);
            return;
        }
        constexpr int RUN = 8;
        threads_.run((rows_ + RUN - 1) / RUN, [&](int piece) {
            for (int r = piece * RUN; r < std::min(rows_, (piece + 1) * RUN); r++) row(r);
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
        each_row([&](int r) {
            const size_t from = size_t(batch_.token_ids[r]) * model_.hidden;
            float* to = x_ + size_t(r) * model_.hidden;
            if (model_.embedding_half) {
                const uint16_t* row = (const uint16_t*)model_.embedding + from;
                for (int i = 0; i < model_.hidden; i += LANES) store(to + i, load_half(row + i));
            } else {
                std::memcpy(to, (const float*)model_.embedding + from, model_.hidden * sizeof(float));
            }
            const int half = model_.head_dim / 2;
            float* angles = angles_ + size_t(r) * model_.head_dim;  // cosines, then sines
            for (int i = 0; i < half; i++) {
                double angle = float(engine_.positions[r]) * model_.frequencies[i];
                angles[i] = float(std::cos(angle));
                angles[half + i] = float(std::sin(angle));
            }
        });
    }

    // From x [rows, width] as it is.
    void linear(const PdLinear& linear, const float* x, int width, Then then, float* y, int y_width) {
        Activations a = engine_.activations(linear, x, rows_);
        if (a.kind != PD_F32) each_row([&](int r) { take_row(a, r, x + size_t(r) * width); });
        run_linear(threads_, linear, a, rows_, then, y, y_width);
    }

    // From the residual stream, normed.
    void normed_linear(const float* gain, const PdLinear& linear, Then then, float* y, int y_width) {
        float* normed = engine_.normed.at_least(size_t(rows_) * model_.hidden);
        Activations a = engine_.activations(linear, normed, rows_);
        each_row([&](int r) {
            float* row = normed + size_t(r) * model_.hidden;
            rms_norm(x_ + size_t(r) * model_.hidden, gain, model_.hidden, model_.epsilon, row);
            take_row(a, r, row);
        });
        run_linear(threads_, linear, a, rows_, then, y, y_width);
    }

    void qkv(const PdLayer& layer) { normed_linear(layer.input_norm, layer.qkv, Then::SET, heads_, qkv_width()); }

    void store_kv(int index, const PdLayer& layer) {
        switch (pool_.type) {
            case PD_KV_F32: return store_kv_as<Float32>(index, layer);
            case PD_KV_F16: return store_kv_as<Float16>(index, layer);
            default: return store_kv_as<Int8>(index, layer);
        }
    }

    template <class Kv>
    void store_kv_as(int index, const PdLayer& layer) {
        const int d = model_.head_dim, turned = model_.heads + model_.kv_heads;
        const float scale = LOG2_E / std::sqrt(float(d));  // attention takes powers of two
        each_row([&](int r) {
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
        seen_ = engine_.seen.at_least(size_t(rows_) * q_width());
    }

    void mlp(const PdLayer& layer) {
        float* inner = engine_.inner.at_least(size_t(rows_) * model_.inner);
        normed_linear(layer.post_norm, layer.gate_up, Then::SILU, inner, model_.inner);
        if (model_.hadamard)
            each_row([&](int r) { hadamard(inner + size_t(r) * model_.inner, model_.inner, model_.hadamard); });
        linear(layer.down, inner, model_.inner, Then::ADD, x_, model_.hidden);
    }

    void finish(float* logits, int32_t* greedy) {
        normed_linear(model_.final_norm, model_.head, Then::SET, logits, model_.vocabulary);
        if (greedy) each_row([&](int r) { greedy[r] = best(logits + size_t(r) * model_.vocabulary, model_.vocabulary); });
    }

    Engine& engine_;
    Threads& threads_;
    const PdModel& model_;
    const PdPool& pool_;
    const PdBatch& batch_;
    StepAttention attention_;
    int rows_;
    float *x_ = nullptr, *heads_ = nullptr, *seen_ = nullptr, *angles_ = nullptr;
};

}  // namespace pd

using namespace pd;

#define PD_EXPORT __attribute__((visibility("default")))

extern "C" {

// A set of threads and scratch memory. One call at a time per engine. `cores`: the machine's ledger (cores.h), in which
// `cell` is this engine's, or null.
PD_EXPORT void* pd_engine_create(int threads, int spins, void* cores, int cell) {
    try {
        return new Engine(threads, spins, Cores(cores, cell, threads));
    } catch (const std::exception&) {
        return nullptr;
    }
}

PD_EXPORT void pd_engine_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// One step. logits [logit_rows, vocabulary]; greedy [logit_rows] or null; on_layer or null. 0, or -1: no memory.
PD_EXPORT int pd_forward(void* engine, const PdModel* model, const PdPool* pool, const PdBatch* batch, PdOnLayer on_layer, float* logits, int32_t* greedy) {
    try {
        Step(*static_cast<Engine*>(engine), *model, *pool, *batch).run(on_layer, logits, greedy);
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

// Some rows of the head, on the `rows` rows that the last step kept for it: y [rows], `width` floats from one to the next.
PD_EXPORT int pd_head(void* engine, const PdModel* model, const PdLinear* head, int rows, float* y, int width) {
    try {
        Engine& e = *static_cast<Engine*>(engine);
        const size_t hidden = model->hidden;
        const float* kept = e.wanted.at_least(rows * hidden);
        float* normed = e.normed.at_least(rows * hidden);
        Activations a = e.activations(*head, normed, rows);
        Threads::Busy busy(e.threads);
        for (int r = 0; r < rows; r++) {
            rms_norm(kept + r * hidden, model->final_norm, model->hidden, model->epsilon, normed + r * hidden);
            take_row(a, r, normed + r * hidden);
        }
        run_linear(e.threads, *head, a, rows, Then::SET, y, width);
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

// A linear layer alone: x [rows, inputs] -> y [rows, outputs].
PD_EXPORT int pd_linear(void* engine, const PdLinear* linear, const float* x, int rows, float* y) {
    try {
        Engine& e = *static_cast<Engine*>(engine);
        Activations a = e.activations(*linear, x, rows);
        Threads::Busy busy(e.threads);
        for (int r = 0; r < rows; r++) take_row(a, r, x + size_t(r) * linear->inputs);
        run_linear(e.threads, *linear, a, rows, Then::SET, y, linear->outputs);
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

PD_EXPORT void pd_hadamard(float* x, int size, int block) { hadamard(x, size, block); }

// Of each row of x [rows, size] the k best: ids and values [rows, k]; log_sums [rows].
PD_EXPORT void pd_top(void* engine, const float* x, int rows, int size, int k, int32_t* ids, float* values, float* log_sums) {
    Threads& threads = static_cast<Engine*>(engine)->threads;
    Threads::Busy busy(threads);
    threads.run(rows, [&](int r) {
        log_sums[r] = top(x + size_t(r) * size, size, k, ids + size_t(r) * k, values + size_t(r) * k);
    });
}
}
