// Exact sums of products of bytes, in sixteen lanes of four: the heart of linear layers and of attention over int8 pages.
#pragma once

#include <cstring>

#include "simd.h"

namespace pd {

// Arrays live in registers only if the loops over them are unrolled. A loop over steps of sums is not, where GCC is free
// to gather all products before it adds any, and spills them.
#define PD_UNROLL _Pragma("GCC unroll 32")
#define PD_KEEP_LOOP _Pragma("GCC unroll 1")
#ifdef __AVX512F__
#define PD_STEPS PD_UNROLL
#else
#define PD_STEPS PD_KEEP_LOOP
#endif

typedef int32_t FourBytes __attribute__((may_alias, aligned(1)));

inline int32_t four_bytes(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

#ifdef __AVX512F__

inline B64 load64(const void* p) { return {_mm512_loadu_si512(p)}; }
// sum += the four products of each lane, unsigned w times signed a (the same four in every lane). As assembly, since GCC 12
// spends two more instructions on each: it copies the sum, and does not broadcast within the instruction.
inline void dot_unsigned_weights(I16x& sum, const void* a, B64 w) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(w.v), "m"(*(const FourBytes*)a));
}

// Exact sums of int8 times int8 by an instruction that wants one side unsigned: w + 128, less 128 times the sum of a,
// which a sum starts with: its `lift`.
inline int32_t lift(int32_t sum_of_a) { return -128 * sum_of_a; }
struct SignedWeights {
    B64 raised;
    explicit SignedWeights(const void* w) : raised{_mm512_xor_si512(load64(w).v, _mm512_set1_epi8(-128))} {}
};
struct SignedDot {
    I16x whole;
    void start(const int32_t& lift) { whole = ints(lift); }
    void add(const void* a, const SignedWeights& w) { dot_unsigned_weights(whole, a, w.raised); }
};

// Sums of 0 to 15 times int8, over 32 inputs.
struct NibbleDot {
    I16x sum;
    void clear() { sum = ints(0); }
    void add(const void* a, B64 w) { dot_unsigned_weights(sum, a, w); }
    I16x whole() const { return sum; }
};

// Sums over tokens of weights (0 to 255) times int8 values, for sixteen dimensions.
using Weight = uint8_t;
inline void store_weights(Weight* to, I16x w) { store_bytes(to, w); }
struct FourWeights {  // of four tokens
    __m512i v;
    explicit FourWeights(const Weight* p) : v(_mm512_set1_epi32(four_bytes(p))) {}
};
struct FourValues {
    B64 v;
    FourValues() = default;
    explicit FourValues(const int8_t* p) : v(load64(p)) {}
};
struct WeightedSum {
    I16x total;
    void clear() { total = ints(0); }
    void add(const FourWeights& p, const FourValues& values) {
        asm("vpdpbusd %2, %1, %0" : "+v"(total.v) : "v"(p.v), "v"(values.v.v));
    }
    I16x whole() const { return total; }
};

inline B64 low_half(B64 w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
inline B64 high_half(B64 w) { return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))}; }

#else

inline B64 load64(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)((const char*)p + 32))};
}

// The same sums by |w| times a with w's sign: pairs of at most 2 * 127 * 127 don't saturate 16 bits.
inline int32_t lift(int32_t) { return 0; }
struct SignedWeights {
    B64 signs, sizes;
    explicit SignedWeights(const void* w) : signs(load64(w)), sizes{_mm256_abs_epi8(signs.a), _mm256_abs_epi8(signs.b)} {}
};
struct SignedDot {
    I16x whole;
    void start(const int32_t&) { whole = ints(0); }
    void add(const void* a, const SignedWeights& w) {
        __m256i four = _mm256_set1_epi32(four_bytes(a)), ones = _mm256_set1_epi16(1);
        __m256i p = _mm256_maddubs_epi16(w.sizes.a, _mm256_sign_epi8(four, w.signs.a));
        __m256i q = _mm256_maddubs_epi16(w.sizes.b, _mm256_sign_epi8(four, w.signs.b));
        whole.a = _mm256_add_epi32(whole.a, _mm256_madd_epi16(p, ones));
        whole.b = _mm256_add_epi32(whole.b, _mm256_madd_epi16(q, ones));
    }
};

// 8 sums of two products of at most 15 * 127 fit 16 bits: one widening at the end.
struct NibbleDot {
    __m256i p, q;
    void clear() { p = q = _mm256_setzero_si256(); }
    void add(const void* a, B64 w) {
        __m256i four = _mm256_set1_epi32(four_bytes(a));
        p = _mm256_add_epi16(p, _mm256_maddubs_epi16(w.a, four));
        q = _mm256_add_epi16(q, _mm256_maddubs_epi16(w.b, four));
    }
    I16x whole() const {
        __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(p, ones), _mm256_madd_epi16(q, ones)};
    }
};

// The sums over tokens in 16 bits, since pairs of 255 * 127 would saturate: each lane has two of the four tokens.
using Weight = int16_t;
inline void store_weights(Weight* to, I16x w) {
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packs_epi32(w.a, w.b), 0xD8));
}
struct FourWeights {
    __m256i v;
    explicit FourWeights(const Weight* p) : v(_mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)p))) {}
};
struct FourValues {
    __m256i part[4];  // of four dimensions each
    FourValues() = default;
    explicit FourValues(const int8_t* p) {
        for (int i = 0; i < 4; i++) part[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
    }
};
struct WeightedSum {
    __m256i part[4];
    void clear() {
        for (__m256i& one : part) one = _mm256_setzero_si256();
    }
    void add(const FourWeights& p, const FourValues& values) {
        for (int i = 0; i < 4; i++) part[i] = _mm256_add_epi32(part[i], _mm256_madd_epi16(values.part[i], p.v));
    }
    I16x whole() const {
        return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(part[0], part[1]), 0xD8),
                _mm256_permute4x64_epi64(_mm256_hadd_epi32(part[2], part[3]), 0xD8)};
    }
};

inline B64 low_half(B64 w) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
inline B64 high_half(B64 w) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}

#endif

}  // namespace pd
