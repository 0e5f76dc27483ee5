// What the kernels use of CUDA, on the CPU: g++ compiles the same .cu files.
//
// The threads of a block are fibers: each runs until it waits at a barrier or in a shuffle, polls, or
// ends. A barrier that not all threads of the block reach, and a shuffle that not all lanes of the
// warp take part in, are launch errors. A warp runs as far as it can before the next one starts;
// every other block runs its warps and lanes in reverse order, so a missing barrier changes results.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kStackBytes = 1 << 17;

// Turns of all threads without progress after which those that poll wait for ever.
constexpr unsigned kMostIdle = 3;

enum class State { ready, barrier, shuffle, polling, done };

// Whether a thread has changed what others poll for, and why a kernel ends with an error.
inline bool progress = false;
inline const char* problem = nullptr;

struct Thread {
  dim3 index;
  State state = State::ready;
  float value = 0;  // in a shuffle: the value given, then the value received
  int distance = 0;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

class Block {
 public:
  // Runs a block. Returns the error, or "".
  const char* run(dim3 size, bool backwards, const std::function<void()>& kernel) {
    const unsigned count = size.x * size.y * size.z;
    kernel_ = &kernel;
    while (threads_.size() < count) start();
    for (unsigned i = 0; i < count; ++i) {
      threads_[i]->index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      threads_[i]->state = State::ready;
    }
    const unsigned warps = (count + kWarp - 1) / kWarp;
    for (unsigned idle = 0;;) {
      progress = false;
      for (unsigned warp = 0; warp < warps; ++warp) {
        const unsigned first = (backwards ? warps - 1 - warp : warp) * kWarp;
        const unsigned end = first + kWarp < count ? first + kWarp : count;
        do {
          for (unsigned i = first; i < end; ++i) {
            Thread& thread = *threads_[backwards ? end - 1 - (i - first) : i];
            if (thread.state == State::ready) resume(thread);
          }
        } while (shuffled(first, end));
      }
      unsigned done = 0, waiting = 0, shuffling = 0, polling = 0;
      for (unsigned i = 0; i < count; ++i) {
        done += threads_[i]->state == State::done;
        waiting += threads_[i]->state == State::barrier;
        shuffling += threads_[i]->state == State::shuffle;
        polling += threads_[i]->state == State::polling;
        if (threads_[i]->state == State::polling) threads_[i]->state = State::ready;
      }
      idle = progress ? 0 : idle + 1;
      if (polling && idle > kMostIdle) problem = "a wait that never ends";
      if (problem) {
        threads_.clear();
        return std::exchange(problem, nullptr);
      }
      if (done == count) return "";
      if (polling) continue;
      if (waiting < count) {
        threads_.clear();  // their stacks are inside the kernel
        return shuffling ? "a shuffle that not all lanes of the warp take part in"
                         : "a barrier that not all threads of the block reach";
      }
      for (unsigned i = 0; i < count; ++i) threads_[i]->state = State::ready;
    }
  }

  // Suspends the current thread until the others have arrived.
  void wait(State state) {
    current_->state = state;
    swapcontext(&current_->context, &scheduler_);
  }

  Thread& current() { return *current_; }

 private:
  void start() {
    threads_.push_back(std::make_unique<Thread>());
    Thread& thread = *threads_.back();
    thread.stack.reset(new char[kStackBytes]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, &Block::loop, 0);
  }

  static void loop();

  void resume(Thread& thread) {
    current_ = &thread;
    threadIdx = thread.index;
    swapcontext(&scheduler_, &thread.context);
  }

  // Resumes the lanes of a warp if all of them are in the same shuffle.
  bool shuffled(unsigned first, unsigned end) {
    if (end - first != kWarp) return false;
    float given[kWarp];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const Thread& thread = *threads_[first + lane];
      if (thread.state != State::shuffle || thread.distance != threads_[first]->distance) {
        return false;
      }
      given[lane] = thread.value;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      Thread& thread = *threads_[first + lane];
      thread.value = given[lane ^ thread.distance];
      thread.state = State::ready;
    }
    return true;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* current_ = nullptr;
  ucontext_t scheduler_;
  const std::function<void()>* kernel_ = nullptr;
};

inline Block block;
inline void Block::loop() {
  for (;;) {
    (*block.kernel_)();
    block.wait(State::done);
  }
}

}  // namespace emulator

inline void __syncthreads() { emulator::block.wait(emulator::State::barrier); }

inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
  emulator::Thread& thread = emulator::block.current();
  thread.value = value;
  thread.distance = distance;
  // Other masks are not emulated: the lanes wait at a barrier instead.
  emulator::block.wait(mask == ~0u ? emulator::State::shuffle : emulator::State::barrier);
  return thread.value;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline float __uint_as_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

inline float __fadd_rn(float a, float b) { return a + b; }

// The threads of a block take turns, and so do blocks.
template <class Number>
Number atomicAdd(Number* to, Number more) {
  const Number before = *to;
  *to += more;
  return before;
}

inline int __float2int_rn(float v) { return static_cast<int>(nearbyintf(v)); }

inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }

// Functions that a GPU rounds differently have its largest error here.
namespace emulator {

inline float ulps_off(float v, int ulps) {
  for (; ulps > 0; --ulps) v = nextafterf(v, INFINITY);
  for (; ulps < 0; ++ulps) v = nextafterf(v, -INFINITY);
  return v;
}

inline bool odd(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits & 1;
}

}  // namespace emulator

// `2^(x log2(e))` with a rounded product and two ulps.
inline float __expf(float x) {
  const float y = exp2f(x * 1.44269504f);
  return y > 0 && y < INFINITY && x != 0 ? emulator::ulps_off(y, emulator::odd(x) ? 2 : -2) : y;
}

// Two ulps; the result is 0 for a divisor above 2^126.
inline float __fdividef(float x, float y) {
  const float quotient = fabsf(y) > 0x1p126f ? x * 0.0f : x / y;
  if (!isfinite(quotient) || quotient == 0) return quotient;
  return emulator::ulps_off(quotient, emulator::odd(y) ? 2 : -2);
}

namespace emulator {

// Runs a function as the threads of a grid. Returns the error, or "".
inline const char* run(dim3 grid, dim3 size, const std::function<void()>& kernel) {
  const unsigned long long threads = 1ull * size.x * size.y * size.z;
  if (!threads || threads > kMostThreads || !grid.x || grid.x > 0x7fffffff) {
    return "invalid configuration argument";
  }
  gridDim = grid;
  blockDim = size;
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    const char* error = block.run(size, blockIdx.x % 2, kernel);
    if (*error) return error;
  }
  return "";
}

// Launches a kernel with the memory of its argument, as the driver does.
template <class Arguments>
const char* launch(void (*kernel)(Arguments), unsigned blocks, unsigned x, unsigned y,
                   const void* memory, size_t bytes) {
  static std::string message;
  constexpr size_t expected = (sizeof(Arguments) + 7) / 8 * 8;
  if (bytes != expected) {
    message = "the argument has " + std::to_string(bytes) + " bytes; expected " +
              std::to_string(expected);
    return message.c_str();
  }
  alignas(alignof(Arguments) > 16 ? alignof(Arguments) : 16) char copy[expected];
  memcpy(copy, memory, bytes);
  const Arguments& arguments = *reinterpret_cast<const Arguments*>(copy);
  return run(dim3(blocks), dim3(x, y), [&] { kernel(arguments); });
}

}  // namespace emulator
