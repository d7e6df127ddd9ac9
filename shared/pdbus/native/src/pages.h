// A page: K and V of 16 tokens in one layer, laid out so that attention reads both in the order in which they lie.
//
// Per KV head, fp32 and fp16: K [head_dim][16 tokens], V [16 tokens][head_dim]. With int8 runs of four that are summed up
// by one instruction lie together: K [head_dim / 4][16 tokens][4], V [4][head_dim][4 tokens]; then the scales of K and
// of V, fp32 [16] each (one per token and head). K is kept after RoPE; with int8 also turned by a Hadamard matrix, whose
// size is the greatest power of two that divides head_dim, as the queries are (QuaRot, arXiv 2404.00456).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>

#include "abi.h"
#include "simd.h"

namespace pd {

constexpr int PAGE = LANES;

// Element types of K and V: whether scales follow and, where there are none, how sixteen of them become floats.
struct Float32 {
    static constexpr bool NARROW = false;
    using Element = float;
    static constexpr bool SCALED = false;
    static F16x load16(const float* p) { return load(p); }
};
struct Float16 {
    static constexpr bool NARROW = true;
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static F16x load16(const uint16_t* p) { return load_half(p); }
};
struct Int8 {
    using Element = int8_t;
    static constexpr bool SCALED = true;
};

// One KV head of one page.
template <class Kv>
struct PageHead {
    using Element = typename Kv::Element;
    Element* k;
    Element* v;
    float* k_scale;
    float* v_scale;

    static size_t bytes(int head_dim) { return 2 * PAGE * head_dim * sizeof(Element) + (Kv::SCALED ? 2 * PAGE * 4 : 0); }

    PageHead(const PdPool& pool, int layer, int32_t page, int head, int head_dim) {
        char* base = (char*)pool.layers[layer] + page * pool.page_bytes + head * bytes(head_dim);
        k = (Element*)base;
        v = k + PAGE * head_dim;
        k_scale = (float*)(v + PAGE * head_dim);
        v_scale = k_scale + PAGE;
    }

    // Rounds one token's k and v [head_dim] to the element type, into its slot.
    void write(int slot, const float* key, const float* value, int head_dim) const;
};

template <>
inline void PageHead<Float32>::write(int slot, const float* key, const float* value, int head_dim) const {
    for (int d = 0; d < head_dim; d++) k[d * PAGE + slot] = key[d];
    for (int d = 0; d < head_dim; d += LANES) store(v + slot * head_dim + d, load(value + d));
}

template <>
inline void PageHead<Float16>::write(int slot, const float* key, const float* value, int head_dim) const {
    uint16_t half[LANES];
    for (int d = 0; d < head_dim; d += LANES) {
        store_half(half, load(key + d));
        for (int i = 0; i < LANES; i++) k[(d + i) * PAGE + slot] = half[i];
        store_half(v + slot * head_dim + d, load(value + d));
    }
}

inline float int8_scale(const float* x, int head_dim) {
    F16x most = zero();
    for (int d = 0; d < head_dim; d += LANES) most = max(most, abs(load(x + d)));
    return greatest(most) / 127.0f;
}

template <>
inline void PageHead<Int8>::write(int slot, const float* key, const float* value, int head_dim) const {
    alignas(16) int8_t bytes[LANES];
    float k_step = int8_scale(key, head_dim), v_step = int8_scale(value, head_dim);
    F16x k_factor = fill(k_step > 0.0f ? 1.0f / k_step : 0.0f), v_factor = fill(v_step > 0.0f ? 1.0f / v_step : 0.0f);
    F16x most = fill(127.0f), least = fill(-127.0f);
    for (int d = 0; d < head_dim; d += LANES) {
        store_bytes(bytes, to_int(min(max(mul(load(key + d), k_factor), least), most)));
        for (int i = 0; i < LANES; i += 4) std::memcpy(k + (d + i) * PAGE + slot * 4, bytes + i, 4);
        store_bytes(bytes, to_int(min(max(mul(load(value + d), v_factor), least), most)));
        int8_t* to = v + (slot / 4 * head_dim + d) * 4 + slot % 4;  // a byte each: another thread may write the neighbour
        for (int i = 0; i < LANES; i++) to[i * 4] = bytes[i];
    }
    k_scale[slot] = k_step;
    v_scale[slot] = v_step;
}

}  // namespace pd
