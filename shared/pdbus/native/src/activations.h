// Activations as a linear layer wants them: quantised row by row, so that a row never depends on its neighbours.
#pragma once

#include <algorithm>
#include <cstddef>

#include "abi.h"
#include "dots.h"

namespace pd {

constexpr int GROUP = 32;  // inputs that share a scale in PD_G4 and PD_G8

#ifdef __AVX512F__
constexpr int ROWS = 12;  // that pass over a weight together, as registers allow
#else
constexpr int ROWS = 4;
#endif

// GROUP inputs of the R rows of a block, so that a tile finds all that it needs at fixed distances.
template <int R>
struct RowsGroup {
    int8_t bytes[R][GROUP];  // -127 to 127
    float scale[R];          // PD_G4, PD_G8
    float shift[R];          // PD_G4: scale times the sum of the bytes
    int32_t lift[R];         // PD_G8: see SignedDot
};

// The same where R is not known before: one row of a block.
struct RowOfGroups {
    char* group;
    int rows, r;
    int8_t* bytes() const { return (int8_t*)group + r * GROUP; }
    float& scale() const { return ((float*)(group + rows * GROUP))[r]; }
    float& shift() const { return (&scale())[rows]; }
    int32_t& lift() const { return ((int32_t*)(group + rows * GROUP))[2 * rows + r]; }
    void next() { group += rows * sizeof(RowsGroup<1>); }
};

// [rows, inputs] of one kind; which fields are meant follows from it.
struct Activations {
    int32_t kind;
    int rows, inputs;
    const float* floats;  // PD_F32: [rows, inputs]
    char* groups;         // the others: block after block of ROWS rows, the last of what is left; each [inputs / GROUP]
    float* scales;        // PD_I8: [rows]
    int32_t* lifts;       // PD_I8: [rows]

    static size_t bytes(int rows, int inputs) { return size_t(rows) * (inputs / GROUP) * sizeof(RowsGroup<1>); }
    char* block(int row) const { return groups + bytes(row, inputs); }
    RowOfGroups row(int row) const {
        const int first = row / ROWS * ROWS;
        return {block(first), std::min(ROWS, rows - first), row - first};
    }
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

// Eight bits and one scale for the row. put(i, sixteen) takes the values from i on.
template <class Put>
inline void quantise_row(const float* x, int inputs, Put&& put, float* scale, int32_t* total) {
    F16x most = zero();
    for (int i = 0; i < inputs; i += LANES) most = max(most, abs(load(x + i)));
    float peak = greatest(most);
    F16x factor = fill(peak > 0.0f ? 127.0f / peak : 0.0f);
    I16x whole = ints(0);
    for (int i = 0; i < inputs; i += LANES) {
        I16x rounded = to_int(mul(load(x + i), factor));
        put(i, rounded);
        whole = add(whole, rounded);
    }
    *scale = peak / 127.0f;
    *total = sum_ints(whole);
}

// Eight bits and a scale for every 32 values, as weights in groups need it.
inline void quantise_row_groups(const float* x, int inputs, RowOfGroups to) {
    for (const float* end = x + inputs; x < end; x += GROUP, to.next()) {
        F16x left = load(x), right = load(x + LANES);
        float peak = greatest(max(abs(left), abs(right)));
        F16x factor = fill(peak > 0.0f ? 127.0f / peak : 0.0f);
        I16x a = to_int(mul(left, factor)), b = to_int(mul(right, factor));
        store_bytes(to.bytes(), a);
        store_bytes(to.bytes() + LANES, b);
        const int32_t sum = sum_ints(add(a, b));
        to.scale() = peak / 127.0f;
        to.shift() = peak / 127.0f * float(sum);
        to.lift() = lift(sum);
    }
}

// Fills row `row` from x [inputs]. For PD_F32, x must be that row of `floats` already.
inline void take_row(Activations& a, int row, const float* x) {
    if (a.kind == PD_F32) return;
    RowOfGroups to = a.row(row);
    if (a.kind != PD_I8) return quantise_row_groups(x, a.inputs, to);
    int32_t sum;
    auto put = [&](int i, I16x sixteen) {
        store_bytes(to.bytes() + i % GROUP, sixteen);
        if (i % GROUP) to.next();
    };
    quantise_row(x, a.inputs, put, a.scales + row, &sum);
    a.lifts[row] = lift(sum);
}

}  // namespace pd
