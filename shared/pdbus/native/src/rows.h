// What happens to single rows between the linear layers: norms, rotations, the Hadamard transform, the best token.
#pragma once

#include <cmath>
#include <cstddef>

#include "simd.h"

namespace pd {

// y = x / sqrt(mean(x^2) + epsilon) * gain; gain null: ones. RMSNorm, arXiv 1910.07467. In place is fine.
inline void rms_norm(const float* x, const float* gain, int size, float epsilon, float* y) {
    F16x squares = zero();
    for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    F16x factor = fill(1.0f / std::sqrt(sum(squares) / float(size) + epsilon));
    for (int i = 0; i < size; i += LANES) {
        F16x value = mul(load(x + i), factor);
        store(y + i, gain ? mul(value, load(gain + i)) : value);
    }
}

// Sums in lanes whose number lacks the bit Half, differences in those that have it.
template <int Half>
inline F16x butterfly(F16x x) {
    alignas(64) float signs[LANES];
    for (int j = 0; j < LANES; j++) signs[j] = j & Half ? -1.0f : 1.0f;
    return fma(x, load(signs), exchanged<Half>(x));
}

// x *= H / sqrt(block) for each run of `block` (a power of two, at least 16), H the Hadamard matrix in Sylvester's order.
inline void hadamard(float* x, int size, int block) {
    const F16x factor = fill(1.0f / std::sqrt(float(block)));
    for (float* at = x; at < x + size; at += block) {
        for (int i = 0; i < block; i += LANES)
            store(at + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(at + i))))));
        for (int half = LANES; half < block; half *= 2)
            for (int i = 0; i < block; i += 2 * half)
                for (int j = i; j < i + half; j += LANES) {
                    F16x left = load(at + j), right = load(at + j + half);
                    store(at + j, add(left, right));
                    store(at + j + half, sub(left, right));
                }
        for (int i = 0; i < block; i += LANES) store(at + i, mul(load(at + i), factor));
    }
}

// Turns element i of a head together with element i + head_dim / 2 (RoFormer, arXiv 2104.09864); then times `factor`.
inline void rope(float* head, const float* cosine, const float* sine, int head_dim, float factor) {
    const int half = head_dim / 2;
    if (half % LANES) {
        for (int i = 0; i < half; i++) {
            float a = head[i], b = head[i + half];
            head[i] = (a * cosine[i] - b * sine[i]) * factor;
            head[i + half] = (b * cosine[i] + a * sine[i]) * factor;
        }
        return;
    }
    F16x scale = fill(factor);
    for (int i = 0; i < half; i += LANES) {
        F16x a = load(head + i), b = load(head + i + half), c = load(cosine + i), s = load(sine + i);
        store(head + i, mul(sub(mul(a, c), mul(b, s)), scale));
        store(head + i + half, mul(add(mul(b, c), mul(a, s)), scale));
    }
}

// The first index of the greatest value.
inline int best(const float* x, int size) {
    F16x most = fill(-INFINITY);
    int i = 0;
    for (; i + LANES <= size; i += LANES) most = max(load(x + i), most);
    float peak = greatest(most);
    for (; i < size; i++) peak = x[i] > peak ? x[i] : peak;
    for (i = 0; i < size; i++)
        if (x[i] == peak) return i;
    return 0;  // nothing but NaN
}

// The k greatest values in falling order, of equal ones the first; returns log(sum(e^x)), what log-softmax subtracts.
inline float top(const float* x, int size, int k, int32_t* ids, float* values) {
    int found = 0;
    float least = -INFINITY;  // what a value must exceed once k are found
    auto take = [&](float value, int id) {
        if (found == k && !(value > least)) return;
        int at = found < k ? found++ : k - 1;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
        if (found == k) least = values[k - 1];
    };
    int i = 0;
    for (; i + LANES <= size; i += LANES)
        if (found < k || greatest(load(x + i)) > least)
            for (int j = i; j < i + LANES; j++) take(x[j], j);
    for (; i < size; i++) take(x[i], i);
    F16x total = zero(), peak = fill(values[0]);
    for (i = 0; i + LANES <= size; i += LANES) total = add(total, exp(sub(load(x + i), peak)));
    double sum_of_all = sum(total);
    for (; i < size; i++) sum_of_all += std::exp(double(x[i]) - values[0]);
    return float(values[0] + std::log(sum_of_all));
}

}  // namespace pd
