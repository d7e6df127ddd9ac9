// The cores of a machine, divided among those of its engines that compute just now.
//
// All engines of a machine map one small memory (native/cores.py makes it, and gives each engine a cell in it). An
// engine stamps its cell while it computes, and counts the cells that are stamped. Nothing here waits for anybody: two
// engines that begin at once see each other at their next layer, and an engine that died is not counted for long.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

namespace pd {

struct alignas(64) CoresHeader {
    char magic[8];
    int32_t cores;              // to be divided
    std::atomic<int32_t> used;  // cells from the first on that somebody ever had
};

// CLOCK_MONOTONIC in ns, of when its engine was last at work; the lowest bit is set in the midst of a step. 0: never.
struct alignas(64) CoresCell {
    std::atomic<int64_t> stamp;
};

static_assert(sizeof(CoresHeader) == 64 && sizeof(CoresCell) == 64, "as native/cores.py lays them out");

// One engine's side.
class Cores {
  public:
    // Without a ledger every share is `alone`.
    Cores(void* ledger, int own, int alone)
        : header_(static_cast<CoresHeader*>(ledger)),
          cells_(ledger ? reinterpret_cast<CoresCell*>(header_ + 1) : nullptr), own_(own), alone_(alone) {}

    // Called in the midst of a step, as often as one likes: says that this engine computes, and how many threads it may
    // use. What does not divide evenly goes to the first ones.
    int share() {
        if (!cells_) return alone_;
        now_ = coarse_now();
        cells_[own_].stamp.store(now_ | COMPUTING, std::memory_order_seq_cst);
        int engines = 1, before = 0;
        for (int i = 0, used = header_->used.load(std::memory_order_relaxed); i < used; i++) {
            if (i == own_ || !computes(cells_[i].stamp.load(std::memory_order_seq_cst))) continue;
            engines++;
            before += i < own_;
        }
        const int cores = header_->cores;
        return std::min(alone_, std::max(1, cores / engines + (before < cores % engines)));
    }

    // The clock has moved on since `share`: it is worth asking again.
    bool due() const { return cells_ && coarse_now() != now_; }

    // The step is over.
    void rest() {
        if (cells_) cells_[own_].stamp.store(coarse_now() & ~COMPUTING, std::memory_order_release);
    }

  private:
    static constexpr int64_t COMPUTING = 1;
    // In the midst of a step a stamp is renewed by each piece of work: whose is older has died, or waits for something.
    static constexpr int64_t LOST_NS = 250'000'000;
    // Between two steps an engine goes on counting, as long as those of one answer may lie apart on a busy machine.
    static constexpr int64_t LINGER_NS = 20'000'000;

    bool computes(int64_t stamp) const {
        return stamp && now_ - stamp < (stamp & COMPUTING ? LOST_NS : LINGER_NS);
    }

    // Costs a few ns; moves on every 1 to 10 ms.
    static int64_t coarse_now() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
        return (int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec) & ~COMPUTING;
    }

    CoresHeader* header_;
    CoresCell* cells_;
    int own_, alone_;
    int64_t now_ = 0;
};

}  // namespace pd
