// Linear layers over many rows, shared out among threads, and what happens to a result on its way to memory.
#pragma once

#include <algorithm>

#include "threads.h"
#include "tiles.h"

namespace pd {

enum class Then {
    SET,   // y = x W^T + b
    ADD,   // y += x W^T + b: the residual stream
    SILU,  // panels of gate and up in turn: y = silu(gate) * up, half as wide
};

inline F16x biased(const PdLinear& linear, int panel, const float* y) {
    F16x value = load(y);
    return linear.bias ? add(value, load(linear.bias + panel * LANES)) : value;
}

// One tile and its end. `width`: floats from one row of y to the next.
inline void finish_tile(const PdLinear& linear, const Activations& a, int row, int rows, int unit, Then then, float* y, int width) {
    alignas(64) float first[ROWS * LANES], second[ROWS * LANES];
    if (then == Then::SILU) {
        tile(linear, a, row, rows, 2 * unit, first);
        tile(linear, a, row, rows, 2 * unit + 1, second);
        for (int r = 0; r < rows; r++) {
            F16x gate = biased(linear, 2 * unit, first + r * LANES), up = biased(linear, 2 * unit + 1, second + r * LANES);
            store(y + size_t(row + r) * width + unit * LANES, mul(silu(gate), up));
        }
        return;
    }
    tile(linear, a, row, rows, unit, first);
    const int valid = std::min(LANES, linear.outputs - unit * LANES);
    for (int r = 0; r < rows; r++) {
        float* to = y + size_t(row + r) * width + unit * LANES;
        F16x value = biased(linear, unit, first + r * LANES);
        if (valid == LANES) store(to, then == Then::ADD ? add(load(to), value) : value);
        else {
            store(first, value);
            for (int i = 0; i < valid; i++) to[i] = then == Then::ADD ? to[i] + first[i] : first[i];
        }
    }
}

constexpr int ROW_BLOCK = 120;  // rows, a multiple of ROWS, that pass over a panel while it is in the first-level cache

// y [rows, width]. Panels outside, rows inside: a panel is read from memory once per block of rows. Blocks are of one size,
// and pieces many, so that no thread waits long for the last one.
inline void run_linear(Threads& threads, const PdLinear& linear, const Activations& a, int rows, Then then, float* y, int width) {
    const int panels = (linear.outputs + LANES - 1) / LANES, units = then == Then::SILU ? panels / 2 : panels;
    const int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, tiles = (rows + ROWS - 1) / ROWS;
    const int block = (tiles + blocks - 1) / blocks * ROWS;
    const int wanted = std::max(1, (blocks == 1 ? 8 : 16) * threads.count() / blocks);
    const int chunk = std::max(1, (units + wanted - 1) / wanted), chunks = (units + chunk - 1) / chunk;
    threads.run(blocks * chunks, [&](int piece) {
        const int first_row = piece / chunks * block, last_row = std::min(rows, first_row + block);
        const int first = piece % chunks * chunk, last = std::min(units, first + chunk);
        for (int unit = first; unit < last; unit++)
            for (int row = first_row; row < last_row; row += ROWS)
                finish_tile(linear, a, row, std::min(ROWS, last_row - row), unit, then, y, width);
    });
}

}  // namespace pd
