// What Python hands over: plain structures of pointers, mirrored field by field in pdbus/native/abi.py.
#pragma once

#include <cstdint>

extern "C" {

// How a linear layer's weights lie in memory (see linear.h).
enum PdKind : int32_t { PD_F32 = 0, PD_I8 = 1, PD_G4 = 2, PD_G8 = 3 };

// y [rows, outputs] = x [rows, inputs] * weight^T + bias
struct PdLinear {
    int32_t kind, outputs, inputs, reserved;
    const void* weight;
    const float* scale;  // PD_I8: per output channel, padded to 16
    const float* bias;   // padded to 16, or null
};

struct PdLayer {
    const float* input_norm;  // gains, or null for ones (rotated models)
    PdLinear qkv;
    const float* qk_norm;  // [heads + kv_heads, head_dim], or null
    PdLinear out;
    const float* post_norm;
    PdLinear gate_up;  // 16 rows of gate and 16 of up in turn
    PdLinear down;
    int32_t window, reserved;  // positions that a query sees, itself among them; 0: all
};

struct PdModel {
    int32_t hidden, inner, heads, kv_heads, head_dim, layer_count, vocabulary;
    int32_t hadamard;  // block of the rotation before down_proj, 0: none
    float epsilon;
    int32_t embedding_half;    // the embedding is fp16, else fp32
    const void* embedding;     // [vocabulary, hidden]
    const float* frequencies;  // [head_dim / 2], radians per position
    const float* final_norm;
    PdLinear head;
    const PdLayer* layers;
};

enum PdKvType : int32_t { PD_KV_F32 = 0, PD_KV_F16 = 1, PD_KV_I8 = 2 };

// The pages of all layers (layout: pages.h).
struct PdPool {
    int32_t type, pages;
    int64_t page_bytes;     // of one page in one layer
    void* const* layers;    // per layer: [pages, page_bytes]
    // The residual stream as it enters some layers: [pages, 16, hidden] for each of these.
    int32_t stream_count, reserved;
    const int32_t* stream_layers;
    float* const* streams;
};

struct PdSequence {
    int32_t start, length, past, page_at;  // rows of the batch; tokens before them; where its page ids begin
};

struct PdBatch {
    int32_t tokens, sequences, logit_rows;
    int32_t first_layer;  // above 0: what enters it is in the pages, and so are K and V of those below
    const int32_t* token_ids;
    const PdSequence* sequence;
    const int32_t* page_ids;
    const int32_t* logit_row;
};

// The rows of a batch, and the logits, that are of one version: those after the part before it. All versions of a step
// have the same shapes and settings.
struct PdPart {
    const PdModel* model;
    int32_t rows, logit_rows;
};

// Told when a layer's K and V are stored. Other than 0: the step is left at once.
typedef int32_t (*PdOnLayer)(int32_t layer);
}
