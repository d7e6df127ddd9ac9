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

#include "activations.h"
#include "dots.h"

namespace pd {

constexpr int G4_BLOCK = 320, G8_BLOCK = 544;
#ifdef __AVX512F__
constexpr int ROWS = 8;
#else
constexpr int ROWS = 4;
#endif

// All tiles: y[r * 16 …] for rows row to row + R of `a` and output channels 16 * panel …, without bias.
template <int R>
inline void tile_f32(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int inputs = linear.inputs;
    const float* w = (const float*)linear.weight + size_t(panel) * inputs * LANES;
    const float* x = a.floats + size_t(row) * inputs;
    F16x sum[R];
    for (int r = 0; r < R; r++) sum[r] = zero();
    for (int k = 0; k < inputs; k++) {
        F16x weights = load(w + size_t(k) * LANES);
        for (int r = 0; r < R; r++) sum[r] = fma(fill(x[size_t(r) * inputs + k]), weights, sum[r]);
    }
    for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
}

template <int R>
inline void tile_i8(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int inputs = linear.inputs;
    const int8_t* w = (const int8_t*)linear.weight + size_t(panel) * inputs * LANES;
    const int8_t* x = a.bytes + size_t(row) * inputs;
    constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;  // of one row's sum, which is exact in any order
    SignedDot sum[R][CHAINS];
    for (int r = 0; r < R; r++) sum[r][0] = SignedDot(a.sums[row + r]);
    for (int k = 0; k < inputs; k += 4 * CHAINS)  // inputs are a multiple of 32
        for (int c = 0; c < CHAINS; c++) {
            SignedWeights weights(w + size_t(k + 4 * c) * LANES);
            for (int r = 0; r < R; r++) sum[r][c].add(x + size_t(r) * inputs + k + 4 * c, weights);
        }
    F16x scale = load(linear.scale + panel * LANES);
    for (int r = 0; r < R; r++) {
        I16x total = sum[r][0].whole;
        for (int c = 1; c < CHAINS; c++) total = add(total, sum[r][c].whole);
        store(y + r * LANES, mul(mul(to_float(total), scale), fill(a.scales[row + r])));
    }
}

template <int R>
inline void tile_g4(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int inputs = linear.inputs, groups = inputs / GROUP;
    const uint8_t* w = (const uint8_t*)linear.weight + size_t(panel) * groups * G4_BLOCK;
    const int8_t* x = a.bytes + size_t(row) * inputs;
    F16x sum[R];
    for (int r = 0; r < R; r++) sum[r] = zero();
    for (int g = 0; g < groups; g++, w += G4_BLOCK, x += GROUP) {
        I16x whole[R];
#ifdef __AVX512F__
        for (int r = 0; r < R; r++) whole[r] = ints(0);
        PD_KEEP_LOOP
        for (int j = 0; j < 4; j++) {
            B64 both = load64(w + 64 * j), lower = low_half(both), upper = high_half(both);
            for (int r = 0; r < R; r++) {
                dot_unsigned_weights(whole[r], x + size_t(r) * inputs + 4 * j, lower);
                dot_unsigned_weights(whole[r], x + size_t(r) * inputs + 16 + 4 * j, upper);
            }
        }
#else
        // 8 sums of two products of at most 15 * 127 fit 16 bits: one widening per group
        __m256i p[R], q[R];
        for (int r = 0; r < R; r++) p[r] = q[r] = _mm256_setzero_si256();
        PD_KEEP_LOOP
        for (int j = 0; j < 4; j++) {
            B64 both = load64(w + 64 * j), lower = low_half(both), upper = high_half(both);
            for (int r = 0; r < R; r++) {
                __m256i left = _mm256_set1_epi32(four_bytes(x + size_t(r) * inputs + 4 * j));
                p[r] = _mm256_add_epi16(p[r], _mm256_maddubs_epi16(lower.a, left));
                q[r] = _mm256_add_epi16(q[r], _mm256_maddubs_epi16(lower.b, left));
                __m256i right = _mm256_set1_epi32(four_bytes(x + size_t(r) * inputs + 16 + 4 * j));
                p[r] = _mm256_add_epi16(p[r], _mm256_maddubs_epi16(upper.a, right));
                q[r] = _mm256_add_epi16(q[r], _mm256_maddubs_epi16(upper.b, right));
            }
        }
        __m256i ones = _mm256_set1_epi16(1);
        for (int r = 0; r < R; r++) whole[r] = {_mm256_madd_epi16(p[r], ones), _mm256_madd_epi16(q[r], ones)};
#endif
        F16x scale = load_half((const uint16_t*)(w + 256)), least = load_half((const uint16_t*)(w + 288));
        for (int r = 0; r < R; r++) {
            size_t at = size_t(row + r) * groups + g;
            float step = a.scales[at];
            sum[r] = fma(to_float(whole[r]), mul(scale, fill(step)), sum[r]);
            sum[r] = fma(least, fill(step * float(a.sums[at])), sum[r]);
        }
    }
    for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
}

template <int R>
inline void tile_g8(const PdLinear& linear, const Activations& a, int row, int panel, float* y) {
    const int inputs = linear.inputs, groups = inputs / GROUP;
    const uint8_t* w = (const uint8_t*)linear.weight + size_t(panel) * groups * G8_BLOCK;
    const int8_t* x = a.bytes + size_t(row) * inputs;
    F16x sum[R];
    for (int r = 0; r < R; r++) sum[r] = zero();
    for (int g = 0; g < groups; g++, w += G8_BLOCK, x += GROUP) {
        SignedDot dot[R];
        for (int r = 0; r < R; r++) dot[r] = SignedDot(a.sums[size_t(row + r) * groups + g]);
        PD_KEEP_LOOP
        for (int j = 0; j < 8; j++) {
            SignedWeights weights(w + 64 * j);
            for (int r = 0; r < R; r++) dot[r].add(x + size_t(r) * inputs + 4 * j, weights);
        }
        F16x scale = load_half((const uint16_t*)(w + 512));
        for (int r = 0; r < R; r++)
            sum[r] = fma(to_float(dot[r].whole), mul(scale, fill(a.scales[size_t(row + r) * groups + g])), sum[r]);
    }
    for (int r = 0; r < R; r++) store(y + r * LANES, sum[r]);
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

inline void tile(const PdLinear& linear, const Activations& a, int row, int rows, int panel, float* y) {
    switch (rows) {
        case 1: return tile_of<1>(linear, a, row, panel, y);
        case 2: return tile_of<2>(linear, a, row, panel, y);
        case 3: return tile_of<3>(linear, a, row, panel, y);
        case 4: return tile_of<4>(linear, a, row, panel, y);
#ifdef __AVX512F__
        case 5: return tile_of<5>(linear, a, row, panel, y);
        case 6: return tile_of<6>(linear, a, row, panel, y);
        case 7: return tile_of<7>(linear, a, row, panel, y);
        default: return tile_of<8>(linear, a, row, panel, y);
#else
        default: __builtin_unreachable();
#endif
    }
}

}  // namespace pd
