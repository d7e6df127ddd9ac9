// Activations as a linear layer wants them: quantised row by row, so that a row never depends on its neighbours.
#pragma once

#include <cstddef>

#include "abi.h"
#include "simd.h"

namespace pd {

constexpr int GROUP = 32;  // inputs that share a scale in PD_G4 and PD_G8

// [rows, inputs] of one kind; which fields are meant follows from it.
struct Activations {
    int32_t kind;
    int inputs;
    const float* floats;  // PD_F32: [rows, inputs]
    int8_t* bytes;        // -127 to 127, [rows, inputs]
    float* scales;        // PD_I8: [rows]; PD_G4, PD_G8: [rows, inputs / GROUP]
    int32_t* sums;        // of the bytes under each scale
    int groups() const { return inputs / GROUP; }
};

inline int32_t sum_ints(I16x v) {  // exact in any order
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32(v.v);
#else
    alignas(32) int32_t lanes[8];
    _mm256_store_si256((__m256i*)lanes, _mm256_add_epi32(v.a, v.b));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
#endif
}

// Eight bits and one scale for the row.
inline void quantise_row(const float* x, int inputs, int8_t* bytes, float* scale, int32_t* total) {
    F16x most = zero();
    for (int i = 0; i < inputs; i += LANES) most = max(most, abs(load(x + i)));
    float peak = greatest(most);
    F16x factor = fill(peak > 0.0f ? 127.0f / peak : 0.0f);
    I16x whole = ints(0);
    for (int i = 0; i < inputs; i += LANES) {
        I16x rounded = to_int(mul(load(x + i), factor));
        store_bytes(bytes + i, rounded);
        whole = add(whole, rounded);
    }
    *scale = peak / 127.0f;
    *total = sum_ints(whole);
}

// Eight bits and a scale for every 32 values, as weights in groups need it.
inline void quantise_row_groups(const float* x, int inputs, int8_t* bytes, float* scales, int32_t* sums) {
    for (int group = 0; group < inputs / GROUP; group++) {
        F16x left = load(x + group * GROUP), right = load(x + group * GROUP + LANES);
        float peak = greatest(max(abs(left), abs(right)));
        F16x factor = fill(peak > 0.0f ? 127.0f / peak : 0.0f);
        I16x a = to_int(mul(left, factor)), b = to_int(mul(right, factor));
        store_bytes(bytes + group * GROUP, a);
        store_bytes(bytes + group * GROUP + LANES, b);
        scales[group] = peak / 127.0f;
        sums[group] = sum_ints(add(a, b));
    }
}

// Fills row `row` from x [inputs]. For PD_F32, x must be that row of `floats` already.
inline void take_row(Activations& a, int row, const float* x) {
    int8_t* bytes = a.bytes + size_t(row) * a.inputs;
    if (a.kind == PD_I8) quantise_row(x, a.inputs, bytes, a.scales + row, a.sums + row);
    else if (a.kind != PD_F32)
        quantise_row_groups(x, a.inputs, bytes, a.scales + size_t(row) * a.groups(), a.sums + size_t(row) * a.groups());
}

}  // namespace pd
