// What the library exports.

#include <stdexcept>

#include "step.h"

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

// One step of at least one part. logits [logit_rows, vocabulary]; greedy [logit_rows] or null; on_layer or null. 0, or
// -1: no memory.
PD_EXPORT int pd_forward(void* engine, const PdPart* parts, int part_count, const PdPool* pool, const PdBatch* batch, PdOnLayer on_layer, float* logits, int32_t* greedy) {
    try {
        Step(*static_cast<Engine*>(engine), parts, part_count, *pool, *batch).run(on_layer, logits, greedy);
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
