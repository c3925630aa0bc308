// Enough of CUDA for g++ to run a block's threads on the CPU, in one of two ways:
//
// * as fibers of one thread (the default): each runs up to its next barrier, in a chosen order - forwards, backwards
//   or shuffled anew at every barrier. Fast, and a result that depends on the order of threads shows. A barrier that
//   only some of the threads reach is an error.
// * with SHIM_HOST_THREADS, as host threads with a real barrier, for ThreadSanitizer.
//
// Shared memory is overwritten before every block. In both ways the barrier in one chosen line of the source can be
// left out: the tests show so that each of them is needed and that a missing one is seen.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#ifdef SHIM_HOST_THREADS
#include <atomic>
#include <thread>

#include <pthread.h>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

struct Coordinate {
    unsigned x;
};

#ifdef SHIM_HOST_THREADS
static thread_local Coordinate threadIdx;
#else
static Coordinate threadIdx;
#endif
static Coordinate blockIdx, blockDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("block_shared")))
#define __syncthreads() shim::barrier(__LINE__)
#define __syncthreads_count(predicate) shim::count((predicate) != 0, __LINE__)

extern char __start_block_shared[], __stop_block_shared[];  // the linker's names for the ends of the section

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

namespace shim {

// What shared memory holds at the start of a block: garbage that shows; zeros where a race shall be reported before an
// index read too early leads astray.
#ifdef SHIM_HOST_THREADS
constexpr int FILLING = 0;
#else
constexpr int FILLING = 0xA5;
#endif

typedef void (*Call)(void** arguments);  // runs a kernel's body as the current thread

static int skipped_line = 0;

[[noreturn]] inline void fail(const char* message) {
    std::fprintf(stderr, "shim: %s\n", message);
    std::abort();
}

#ifdef SHIM_HOST_THREADS

// Two barriers in turn: ThreadSanitizer takes a thread that is late in leaving a barrier to have seen everything done
// before other threads came to it once more, and would overlook races.
static pthread_barrier_t gates[2];
static thread_local unsigned passed;

static std::atomic<int> votes[3];
static thread_local unsigned ballots;

inline void pass() { pthread_barrier_wait(&gates[passed++ % 2]); }

inline void barrier(int line) {
    if (line != skipped_line) pass();
}

inline int count(bool vote, int) {
    const unsigned now = ballots++;
    votes[now % 3].fetch_add(vote, std::memory_order_relaxed);
    pass();
    const int result = votes[now % 3].load(std::memory_order_relaxed);
    // Nobody votes here again before this thread has come to the next ballot, and everybody has left the one before.
    votes[(now + 2) % 3].store(0, std::memory_order_relaxed);
    return result;
}

inline void run_block(unsigned threads, unsigned, Call call, void** arguments) {
    for (auto& gate : gates) pthread_barrier_init(&gate, nullptr, threads);
    for (auto& vote : votes) vote = 0;
    std::vector<std::thread> team;
    for (unsigned thread = 0; thread < threads; ++thread)
        team.emplace_back([=] {
            threadIdx.x = thread;
            passed = ballots = 0;
            call(arguments);
        });
    for (auto& member : team) member.join();
    for (auto& gate : gates) pthread_barrier_destroy(&gate);
}

#else

constexpr std::size_t STACK = 64 * 1024;

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack;
    bool started, done;
    int line;  // the barrier it waits at
};

static std::vector<Fiber*> fibers;
static std::vector<unsigned> order;
static Call running;
static void** running_on;
static jmp_buf scheduler;
static unsigned current;
static int votes, counted;

inline void wait(int line) {
    Fiber& fiber = *fibers[current];
    fiber.line = line;
    if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

inline void barrier(int line) {
    if (line != skipped_line) wait(line);
}

inline int count(bool vote, int line) {
    votes += vote;
    wait(line);
    return counted;
}

inline void enter() {
    running(running_on);
    fibers[current]->done = true;
    _longjmp(scheduler, 1);
}

inline void resume() {  // a function of its own: nothing of the caller's may live in registers across setjmp
    if (_setjmp(scheduler)) return;
    Fiber& fiber = *fibers[current];
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    setcontext(&fiber.start);
    fail("setcontext failed");
}

// schedule: 0 forwards, 1 backwards, otherwise the seed of a shuffle at every barrier.
inline void run_block(unsigned threads, unsigned schedule, Call call, void** arguments) {
    while (fibers.size() < threads) {
        Fiber* fiber = new Fiber();
        fiber->stack.resize(STACK);
        getcontext(&fiber->start);
        fiber->start.uc_stack.ss_sp = fiber->stack.data();
        fiber->start.uc_stack.ss_size = STACK;
        fiber->start.uc_link = nullptr;
        makecontext(&fiber->start, enter, 0);
        fibers.push_back(fiber);
    }
    running = call;
    running_on = arguments;
    votes = 0;
    order.resize(threads);
    for (unsigned thread = 0; thread < threads; ++thread) {
        fibers[thread]->started = fibers[thread]->done = false;
        order[thread] = schedule == 1 ? threads - 1 - thread : thread;
    }
    unsigned state = schedule;
    while (true) {
        for (unsigned left = threads; schedule > 1 && left > 1; --left) {
            state = state * 1664525u + 1013904223u;
            std::swap(order[left - 1], order[(state >> 8) % left]);
        }
        for (unsigned thread : order) {
            threadIdx.x = current = thread;
            resume();
        }
        const Fiber& first = *fibers[0];
        for (unsigned thread = 1; thread < threads; ++thread) {
            const Fiber& other = *fibers[thread];
            if (other.done != first.done || (!first.done && other.line != first.line))
                fail("threads of a block wait at different barriers");
        }
        if (first.done) return;
        counted = votes;
        votes = 0;
    }
}

#endif

inline void run(unsigned blocks, unsigned threads, unsigned schedule, Call call, void** arguments) {
    blockDim.x = threads;
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        std::memset(__start_block_shared, FILLING, __stop_block_shared - __start_block_shared);
        run_block(threads, schedule, call, arguments);
    }
}

}  // namespace shim
