// The inner loops of all linear layers: up to ROWS rows times one panel of 16 output channels, over all inputs.
//
// Weights lie in panels of 16 output channels, each in the order in which it is read:
//   PD_F32  [panel][input][16] floats
//   PD_I8   [panel][input / 4][16][4] int8
//   PD_G4   [panel][input / 32] of { [4][16][4] bytes: step j in the low and j + 4 in the high half of a byte,
//           16 fp16 scales, 16 fp16 least values }; weight = scale * (0 to 15) + least
//   PD_G8   [panel][input / 32] of { [8][16][4] int8, 16 fp16 scales }
// An output channel is a lane: its sum runs over the inputs in their order, whatever the number of rows.
#pragma once

#include <utility>

#include "activations.h"
#include "dots.h"

namespace pd {

constexpr int G4_BLOCK = 320, G8_BLOCK = 544;

// All tiles: y[r * 16 …] for the R rows of the block of `a` that begins with `row`, and output channels 16 * panel …,
// without bias.
template <int R>
inline void tile_f32(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int inputs = linear.inputs;
    const float* w = (const float*)linear.weight + size_t(panel) * inputs * LANES;
    const float* x = a.floats + size_t(row) * inputs;
    F16x sum[R];
    PD_UNROLL for (int r = 0; r < R; r++) sum[r] = zero();
    for (int k = 0; k < inputs; k++) {
        F16x weights = load(w + size_t(k) * LANES);
        PD_UNROLL for (int r = 0; r < R; r++) sum[r] = fma(fill(x[size_t(r) * inputs + k]), weights, sum[r]);
    }
    PD_UNROLL for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
}

template <int R>
inline void tile_i8(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int groups = linear.inputs / GROUP;
    const int8_t* w = (const int8_t*)linear.weight + size_t(panel) * linear.inputs * LANES;
    const auto* x = (const RowsGroup<R>*)a.block(row);
    constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;  // of one row's sum, which is exact in any order
    SignedDot dot[R][CHAINS];
    PD_UNROLL for (int r = 0; r < R; r++) {
        dot[r][0].start(a.lifts[row + r]);
        PD_UNROLL for (int c = 1; c < CHAINS; c++) dot[r][c].whole = ints(0);
    }
    for (int g = 0; g < groups; g++, w += GROUP * LANES, x++)
        PD_UNROLL for (int j = 0; j < GROUP / 4; j++) {
            SignedWeights weights(w + 64 * j);
            PD_UNROLL for (int r = 0; r < R; r++) dot[r][j % CHAINS].add(x->bytes[r] + 4 * j, weights);
        }
    F16x scale = load(linear.scale + panel * LANES);
    PD_UNROLL for (int r = 0; r < R; r++) {
        I16x total = dot[r][0].whole;
        PD_UNROLL for (int c = 1; c < CHAINS; c++) total = add(total, dot[r][c].whole);
        store(y + r * LANES, mul(mul(to_float(total), scale), fill(a.scales[row + r])));
    }
}

template <int R>
inline void tile_g4(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int groups = linear.inputs / GROUP;
    const uint8_t* w = (const uint8_t*)linear.weight + size_t(panel) * groups * G4_BLOCK;
    const auto* x = (const RowsGroup<R>*)a.block(row);
    F16x sum[R];
    PD_UNROLL for (int r = 0; r < R; r++) sum[r] = zero();
    for (int g = 0; g < groups; g++, w += G4_BLOCK, x++) {
        NibbleDot dot[R];
        PD_UNROLL for (int r = 0; r < R; r++) dot[r].clear();
        PD_STEPS for (int j = 0; j < 4; j++) {
            B64 both = load64(w + 64 * j), lower = low_half(both), upper = high_half(both);
            PD_UNROLL for (int r = 0; r < R; r++) {
                dot[r].add(x->bytes[r] + 4 * j, lower);
                dot[r].add(x->bytes[r] + 16 + 4 * j, upper);
            }
        }
        F16x scale = load_half((const uint16_t*)(w + 256)), least = load_half((const uint16_t*)(w + 288));
        PD_UNROLL for (int r = 0; r < R; r++) {
            sum[r] = fma(to_float(dot[r].whole()), mul(scale, fill(x->scale[r])), sum[r]);
            sum[r] = fma(least, fill(x->shift[r]), sum[r]);
        }
    }
    PD_UNROLL for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
}

template <int R>
inline void tile_g8(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int groups = linear.inputs / GROUP;
    const uint8_t* w = (const uint8_t*)linear.weight + size_t(panel) * groups * G8_BLOCK;
    const auto* x = (const RowsGroup<R>*)a.block(row);
    F16x sum[R];
    PD_UNROLL for (int r = 0; r < R; r++) sum[r] = zero();
    for (int g = 0; g < groups; g++, w += G8_BLOCK, x++) {
        SignedDot dot[R];
        PD_UNROLL for (int r = 0; r < R; r++) dot[r].start(x->lift[r]);
        PD_STEPS for (int j = 0; j < GROUP / 4; j++) {
            SignedWeights weights(w + 64 * j);
            PD_UNROLL for (int r = 0; r < R; r++) dot[r].add(x->bytes[r] + 4 * j, weights);
        }
        F16x scale = load_half((const uint16_t*)(w + 512));
        PD_UNROLL for (int r = 0; r < R; r++) sum[r] = fma(to_float(dot[r].whole), mul(scale, fill(x->scale[r])), sum[r]);
    }
    PD_UNROLL for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
}

template <int R>
inline void tile_of(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    switch (linear.kind) {
        case PD_F32: return tile_f32<R>(linear, a, row, panel, y);
        case PD_I8: return tile_i8<R>(linear, a, row, panel, y);
        case PD_G4: return tile_g4<R>(linear, a, row, panel, y);
        default: return tile_g8<R>(linear, a, row, panel, y);
    }
}

template <int... R>
inline auto tile_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr decltype(&tile_of<1>) by_rows[] = {tile_of<R + 1>...};
    return by_rows[rows - 1];
}

// `row`: a multiple of ROWS; `rows`: of its block.
inline void tile(const PdLinear& linear, const Activations& a, int row, int rows, int panel, float* y) {
    tile_for(rows, std::make_integer_sequence<int, ROWS>())(linear, a, row, panel, y);
}

}  // namespace pd
