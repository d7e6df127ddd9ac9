// A few threads that share out the pieces of one job after another, each job a fraction of a millisecond long.
//
// Pieces are taken from one counter, so that a thread which the system has put aside delays nothing but the piece that
// it holds. How many of the threads take part follows the engine's share of the machine's cores (cores.h); the others
// sleep. Within a step those that take part spin for a moment between jobs, then sleep. Which thread computes a piece
// never changes what is computed.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "cores.h"

namespace pd {

class Threads {
  public:
    Threads(int count, int spins, Cores cores) : cores_(cores), spins_(spins), active_(std::max(1, count)) {
        for (int i = 1; i < active_; i++) helpers_.emplace_back([this, i] { help(i); });
    }
    ~Threads() {
        {
            std::lock_guard<std::mutex> hold(sleep_);
            stop_ = true;
        }
        wake_.notify_all();
        bench_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }
    Threads(const Threads&) = delete;

    // Those that take part, the caller among them. It may change with each job.
    int count() const { return active_.load(std::memory_order_relaxed); }

    // While one lasts, job follows job: the engine counts as computing, and helpers spin for the next one.
    class Busy {
      public:
        explicit Busy(Threads& threads) : threads_(threads) {
            threads_.busy_.store(true, std::memory_order_relaxed);
            threads_.follow();
        }
        ~Busy() {
            threads_.busy_.store(false, std::memory_order_relaxed);
            threads_.cores_.rest();
        }
        Busy(const Busy&) = delete;

      private:
        Threads& threads_;
    };

    // Takes as many threads as the engine's share of the cores is now.
    void follow() {
        const int count = cores_.share(), before = this->count();
        if (count == before) return;
        {
            std::lock_guard<std::mutex> hold(sleep_);
            active_.store(count, std::memory_order_relaxed);
        }
        if (count > before) bench_.notify_all();
    }

    // Calls piece(0) … piece(pieces - 1), each once, and returns when all are done. Not from several threads at once.
    template <class Piece>
    void run(int pieces, Piece&& piece) {
        if (pieces <= 1 || count() == 1) {
            for (int i = 0; i < pieces; i++) {
                piece(i);
                if (cores_.due()) follow();
            }
            return;
        }
        using Body = std::remove_reference_t<Piece>;
        call_ = [](void* context, int index) { (*static_cast<Body*>(context))(index); };
        context_ = (void*)&piece;
        done_.store(0, std::memory_order_relaxed);
        generation_++;
        // generation (24 bits), number of pieces (20), next piece (20)
        ticket_.store((generation_ << 40) | (uint64_t(pieces) << 20), std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> hold(sleep_); }
            wake_.notify_all();
        }
        while (take_one())
            if (cores_.due()) follow();
        // Whoever still has a piece may be waiting for the very core that this thread spins on.
        for (int spin = 0; done_.load(std::memory_order_acquire) < pieces; spin++) {
            if (spin < PATIENCE) _mm_pause();
            else std::this_thread::yield();
        }
    }

  private:
    static constexpr int PATIENCE = 2000;  // some 50 µs

    static uint64_t next(uint64_t ticket) { return ticket & 0xFFFFF; }
    static uint64_t total(uint64_t ticket) { return (ticket >> 20) & 0xFFFFF; }

    // A piece counts as taken only by the exchange that also proves that its job is still the current one; until that
    // piece is done, the job's fields stay as they are.
    bool take_one() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        do {
            if (next(ticket) >= total(ticket)) return false;
        } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
        call_(context_, int(next(ticket)));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool anything() const {
        uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
        return next(ticket) < total(ticket);
    }

    bool takes_part(int index) const { return index < count(); }

    void help(int index) {
        for (;;) {
            for (int spin = 0; takes_part(index);) {
                if (take_one()) spin = 0;
                else if (spin++ == spins_ || !busy_.load(std::memory_order_relaxed)) break;
                else _mm_pause();
            }
            std::unique_lock<std::mutex> hold(sleep_);
            bench_.wait(hold, [&] { return stop_ || takes_part(index); });
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(hold, [&] { return stop_ || anything() || !takes_part(index); });
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            if (stop_) return;
        }
    }

    Cores cores_;
    int spins_;
    std::vector<std::thread> helpers_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> active_;  // changed by the caller of `run`, under `sleep_`
    std::atomic<bool> busy_{false};
    uint64_t generation_ = 0;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::mutex sleep_;
    std::condition_variable wake_, bench_;  // of those that take part, and of the others
    bool stop_ = false;
};

}  // namespace pd
