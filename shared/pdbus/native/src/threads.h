// A few threads that share out the pieces of one job after another, each job a fraction of a millisecond long.
//
// Pieces are taken from one counter, so that a thread which the system has put aside delays nothing but the piece that
// it holds. Between jobs the helpers spin for a moment, then sleep. Which thread computes a piece never changes what is
// computed.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pd {

class Threads {
  public:
    Threads(int count, int spins) : count_(count < 1 ? 1 : count), spins_(spins) {
        for (int i = 1; i < count_; i++) helpers_.emplace_back([this] { help(); });
    }
    ~Threads() {
        {
            std::lock_guard<std::mutex> hold(sleep_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }
    Threads(const Threads&) = delete;

    int count() const { return count_; }

    // Calls piece(0) … piece(pieces - 1), each once, and returns when all are done. Not from several threads at once.
    template <class Piece>
    void run(int pieces, Piece&& piece) {
        if (pieces <= 1 || count_ == 1) {
            for (int i = 0; i < pieces; i++) piece(i);
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
        while (take_one()) {}
        for (int spin = 0; done_.load(std::memory_order_acquire) < pieces; spin++) {
            if (spin < 20000) _mm_pause();
            else std::this_thread::yield();
        }
    }

  private:
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

    void help() {
        for (;;) {
            int spin = 0;
            while (spin < spins_) {
                if (take_one()) spin = 0;
                else {
                    _mm_pause();
                    spin++;
                }
            }
            std::unique_lock<std::mutex> hold(sleep_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(hold, [this] { return stop_ || anything(); });
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            if (stop_) return;
        }
    }

    int count_, spins_;
    std::vector<std::thread> helpers_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    uint64_t generation_ = 0;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::mutex sleep_;
    std::condition_variable wake_;
    bool stop_ = false;
};

}  // namespace pd
