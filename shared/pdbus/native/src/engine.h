// What an engine keeps from step to step: its threads and its memory.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "attention_float.h"
#include "attention_int8.h"
#include "threads.h"

namespace pd {

// Memory that grows and is used again from step to step.
template <class T>
class Buffer {
  public:
    T* at_least(size_t count) {
        if (count > size_) {
            data_.reset(static_cast<T*>(::operator new[](count * sizeof(T) + 64, std::align_val_t(64))));
            size_ = count;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

struct Engine {
    Engine(int count, int spins, Cores cores) : threads(count, spins, cores) {}

    // Room for rows of what `linear` reads; x [rows, inputs] is kept where it reads floats.
    Activations activations(const PdLinear& linear, const float* x, int rows) {
        Activations a{linear.kind, rows, linear.inputs, x, nullptr, nullptr, nullptr};
        if (a.kind == PD_F32) return a;
        a.groups = groups.at_least(Activations::bytes(rows, linear.inputs));
        a.scales = scales.at_least(rows);
        a.lifts = lifts.at_least(rows);
        return a;
    }

    Threads threads;
    Buffer<float> stream, heads, seen, inner, angles, wanted, scales, partial, normed;
    Buffer<char> groups;
    Buffer<int32_t> lifts;
    std::vector<QueryTile> tiles;
    std::vector<int> tile_at;  // a tile's first row
    std::vector<int32_t> positions;
};

}  // namespace pd
