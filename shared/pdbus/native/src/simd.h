// Sixteen lanes, whatever the machine: one AVX-512 register or two AVX2 registers.
//
// Every function does the same IEEE operations lane by lane in both forms, and horizontal sums use one fixed tree, so
// that results are bitwise equal across instruction sets (DESIGN.md G9). The compiler may not fuse or reorder floating
// point (-ffp-contract=off, no -ffast-math): what is to be fused says so.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pd {

constexpr int LANES = 16;

#ifdef __AVX512F__

struct F16x {  // 16 floats
    __m512 v;
};
struct I16x {  // 16 int32
    __m512i v;
};
struct B64 {  // 64 bytes
    __m512i v;
};

inline F16x zero() { return {_mm512_setzero_ps()}; }
inline F16x fill(float x) { return {_mm512_set1_ps(x)}; }
inline F16x load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16x a) { _mm512_storeu_ps(p, a.v); }
inline F16x load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_half(uint16_t* p, F16x a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F16x add(F16x a, F16x b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16x sub(F16x a, F16x b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16x mul(F16x a, F16x b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16x div(F16x a, F16x b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16x max(F16x a, F16x b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16x min(F16x a, F16x b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16x fma(F16x a, F16x b, F16x c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16x abs(F16x a) { return {_mm512_abs_ps(a.v)}; }
inline F16x to_float(I16x a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16x to_int(F16x a) { return {_mm512_cvtps_epi32(a.v)}; }  // rounds half to even
inline I16x ints(int x) { return {_mm512_set1_epi32(x)}; }
inline I16x add(I16x a, I16x b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16x load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(void* p, I16x a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
// a times 2 to the whole number in the last bits of n
inline F16x add_to_exponent(F16x a, F16x n) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(n.v), 23)))};
}
// a where lane index + first is in [from, to], else b
inline F16x within(F16x a, F16x b, int first, int from, int to) {
    __m512i at = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __mmask16 in = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(from)) & _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(to));
    return {_mm512_mask_blend_ps(in, b.v, a.v)};
}
// Lane j gets what lane j ^ Half had.
template <int Half>
inline F16x exchanged(F16x a) {
    if constexpr (Half == 1) return {_mm512_permute_ps(a.v, 0xB1)};
    else if constexpr (Half == 2) return {_mm512_permute_ps(a.v, 0x4E)};
    else if constexpr (Half == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xB1)};
    else return {_mm512_shuffle_f32x4(a.v, a.v, 0x4E)};
}
inline __m256 low(F16x a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high(F16x a) { return _mm512_extractf32x8_ps(a.v, 1); }

#else

struct F16x {
    __m256 a, b;
};
struct I16x {
    __m256i a, b;
};
struct B64 {
    __m256i a, b;
};

inline F16x zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16x fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16x load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16x x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16x load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store_half(uint16_t* p, F16x x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F16x add(F16x x, F16x y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16x sub(F16x x, F16x y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16x mul(F16x x, F16x y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16x div(F16x x, F16x y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16x max(F16x x, F16x y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16x min(F16x x, F16x y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16x fma(F16x x, F16x y, F16x z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16x abs(F16x x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F16x to_float(I16x x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16x to_int(F16x x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline I16x ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16x add(I16x x, I16x y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16x load_ints(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline void store_bytes(void* p, I16x x) {  // values must fit int8 or uint8 (see the two packs)
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    __m256i low_bytes = _mm256_and_si256(words, _mm256_set1_epi16(255));
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low_bytes, low_bytes), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(bytes));
}
inline __m256 add_to_exponent8(__m256 a, __m256 n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline F16x add_to_exponent(F16x x, F16x n) { return {add_to_exponent8(x.a, n.a), add_to_exponent8(x.b, n.b)}; }
inline __m256 within8(__m256 x, __m256 other, __m256i at, int from, int to) {
    __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), at), _mm256_cmpgt_epi32(at, _mm256_set1_epi32(to)));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(out));
}
inline F16x within(F16x x, F16x other, int first, int from, int to) {
    __m256i at = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return {within8(x.a, other.a, at, from, to), within8(x.b, other.b, _mm256_add_epi32(at, _mm256_set1_epi32(8)), from, to)};
}
template <int Half>
inline F16x exchanged(F16x x) {
    if constexpr (Half == 1) return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)};
    else if constexpr (Half == 2) return {_mm256_permute_ps(x.a, 0x4E), _mm256_permute_ps(x.b, 0x4E)};
    else if constexpr (Half == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    else return {x.b, x.a};
}
inline __m256 low(F16x x) { return x.a; }
inline __m256 high(F16x x) { return x.b; }

#endif

// The one tree of horizontal sums: lanes 0-7 with 8-15, then 4 apart, 2 apart, neighbours.
inline float sum(F16x x) {
    __m256 eight = _mm256_add_ps(low(x), high(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float greatest(F16x x) {
    __m256 eight = _mm256_max_ps(low(x), high(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// 2^x for x in [-126, 127], relative error below 2e-7; smaller x count as -126. A polynomial for what is left of x after its
// nearest whole number, which goes to the exponent as it stands in the last bits of `shifted`.
inline F16x exp2(F16x x) {
    const F16x shift = fill(12582912.0f);  // 1.5 * 2^23: a sum with it has no fraction
    x = max(x, fill(-126.0f));
    F16x shifted = add(x, shift), rest = sub(x, sub(shifted, shift));
    F16x y = fill(0x1.5bb978p-10f);
    y = fma(y, rest, fill(0x1.3cea46p-7f));
    y = fma(y, rest, fill(0x1.c6b752p-5f));
    y = fma(y, rest, fill(0x1.ebf9bcp-3f));
    y = fma(y, rest, fill(0x1.62e42ap-1f));
    return add_to_exponent(fma(y, rest, fill(1.0f)), shifted);
}

constexpr float LOG2_E = 1.44269504088896341f;

// e^x up to x = 88; relative error below 2e-7 near 0, 1e-7 |x| far from it; 1.2e-38 for all x < -87.3.
inline F16x exp(F16x x) { return exp2(min(mul(x, fill(LOG2_E)), fill(127.0f))); }

// x * sigmoid(x)
inline F16x silu(F16x x) { return div(x, add(fill(1.0f), exp(sub(zero(), x)))); }

}  // namespace pd
