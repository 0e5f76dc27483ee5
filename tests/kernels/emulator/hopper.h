// The instructions of `hopper.cuh` on the CPU, as "PTX ISA" states them, in the worst order.
//
// Products are computed when a warp waits for them: what they read must still be there. Every second
// load fills its memory with NaN, and writes its box when a thread waits for the barrier: what has
// not arrived is not used. Barriers lie in shared memory, so what is written over one is found.
#pragma once

#include <map>

#include "numbers.cuh"

#define __grid_constant__

namespace emulator {

constexpr uint32_t kFirst = 1024, kMagic = 0x42415252;

alignas(1024) inline unsigned char memory[FVV_SHARED];

// Ends the threads of a block with an error.
[[noreturn]] inline void fail(const char* reason) {
  problem = reason;
  for (;;) block.wait(State::done);
}

inline unsigned char* at(uint32_t address, uint32_t bytes) {
  if (address < kFirst || address + bytes > kFirst + FVV_SHARED) fail("outside of shared memory");
  return memory + address - kFirst;
}

struct Barrier {
  int arrivals, left, bytes = 0;
  unsigned phase = 0;
  std::vector<std::function<void()>> loads;

  void advance() {
    progress = true;
    if (left || bytes || !loads.empty()) return;
    phase ^= 1;
    left = arrivals;
  }
};

inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier(uint32_t address) {
  if (memcmp(at(address, 8), &kMagic, 4)) fail("there is no barrier");
  return barriers[address];
}

// What the host writes instead of a `CUtensorMap`: sizes and steps, the fastest dimension first.
struct Map {
  const unsigned char* data;
  uint64_t sizes[5], steps[5];
  uint32_t box[5], swizzle;
};

// The address of a number in rows of 128 bytes (3) or of 64 (2), whose parts of 16 are permuted.
inline uint32_t permuted(uint32_t address, uint32_t swizzle) {
  return address ^ (address >> 7 & ((1u << swizzle) - 1)) << 4;
}

inline void copy(const Map& map, uint32_t to, const std::vector<int64_t>& start) {
  const uint32_t* box = map.box;
  const uint32_t count = box[0] * box[1] * box[2] * box[3] * box[4];
  for (uint32_t number = 0; number < count; ++number) {
    const unsigned char* from = map.data;
    bool inside = true;
    for (uint32_t i = 0, rest = number; i < 5; rest /= box[i++]) {
      const int64_t place = start[i] + rest % box[i];
      inside &= place >= 0 && place < static_cast<int64_t>(map.sizes[i]);
      from += place * static_cast<int64_t>(map.steps[i]);
    }
    const uint16_t zero = 0;
    memcpy(at(permuted(to + 2 * number, map.swizzle), 2), inside ? from : (const void*)&zero, 2);
  }
}

inline void load(const void* from, uint32_t to, uint32_t address, std::vector<int64_t> start) {
  static unsigned count = 0;
  Barrier& b = barrier(address);
  Map map;
  memcpy(&map, from, sizeof map);
  int bytes = 2;
  for (uint32_t length : map.box) bytes *= length;
  if (to % 128) fail("a box is not at a multiple of 128 bytes");
  memset(at(to, bytes), 0xff, bytes);
  b.loads.push_back([=, &b] {
    copy(map, to, start);
    b.bytes -= bytes;
  });
  if (++count % 2) return;
  b.loads.back()();
  b.loads.pop_back();
  b.advance();
}

// Products that a thread has not waited for, and the ends of their groups.
struct Product {
  uint64_t a, b;
  float* sums;
};

struct Open {
  std::vector<Product> products;
  std::vector<size_t> ends;
};

inline Open open[kMostThreads];

inline float number(uint64_t descriptor, int row, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, distance = (descriptor >> 32 & 0x3fff) << 4;
  const uint32_t swizzle = 4 - (descriptor >> 62);
  fast_video_vae::T found;
  const uint32_t place = start + row / 8 * distance + row % 8 * (16u << swizzle) + 2 * k;
  memcpy(&found, at(permuted(place, swizzle), 2), 2);
  return widen(found);
}

inline void compute(const Product& product) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float rows[2][16];
  for (int i = 0; i < 32; ++i) rows[i / 16][i % 16] = number(product.a, first + i / 16 * 8, i % 16);
  for (int i = 0; i < FVV_WIDTH / 4; ++i) {
    const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
    double sums[2] = {};
    for (int k = 0; k < 16; ++k) {
      const float b = number(product.b, column, k);
      for (int row = 0; row < 2; ++row) sums[row] += rows[row][k] * b;
    }
    for (int row = 0; row < 2; ++row) product.sums[i / 2 * 4 + row * 2 + i % 2] += sums[row];
  }
}

}  // namespace emulator

namespace fast_video_vae {

inline unsigned char* const shared_memory = emulator::memory;

inline unsigned shared_address() { return emulator::kFirst; }

inline void create_barrier(unsigned address, int arrivals) {
  memcpy(emulator::at(address, 8), &emulator::kMagic, 4);
  emulator::barriers[address] = {arrivals, arrivals};
}

inline void arrive(unsigned address, int bytes = 0) {
  emulator::Barrier& b = emulator::barrier(address);
  if (b.left-- <= 0) emulator::fail("a barrier has more arrivals than it waits for");
  b.bytes += bytes;
  b.advance();
}

inline void wait(unsigned address, unsigned parity) {
  emulator::Barrier& b = emulator::barrier(address);
  while (b.phase == parity) {
    const bool loads = !b.loads.empty();
    for (auto& load : std::exchange(b.loads, {})) load();
    if (loads) b.advance();
    if (b.phase == parity) emulator::block.wait(emulator::State::polling);
  }
}

template <class Map>
void load_box(unsigned to, const Map& map, unsigned barrier, int c, int x, int y, int t, int b) {
  emulator::load(&map, to, barrier, {c, x, y, t, b});
}

template <class Map>
void load_weight(unsigned to, const Map& map, unsigned barrier, int value, int channel) {
  emulator::load(&map, to, barrier, {value, channel, 0, 0, 0});
}

inline void prefetch(const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("no multiple of 16");
}

inline float gated(float y) { return y / (1.0f + exp2f(y * -1.44269504f)); }

inline int uniform(int v) { return v; }

inline void sync_warp() { __shfl_xor_sync(~0u, 0.0f, 0); }
inline void publish_barriers() {}
inline void drop_registers() {}
inline void take_registers() {}
inline void begin_group() {}

inline void end_group() {
  emulator::Open& open = emulator::open[threadIdx.x];
  open.ends.push_back(open.products.size());
}

template <int kLeft>
void wait_groups() {
  auto& [products, ends] = emulator::open[threadIdx.x];
  for (size_t done = 0; ends.size() > kLeft; ends.erase(ends.begin()), done = 0) {
    for (; done < ends[0]; ++done) emulator::compute(products[done]);
    products.erase(products.begin(), products.begin() + done);
    for (size_t& end : ends) end -= done;
  }
  sync_warp();
}

template <int kCount>
void hold(float (&)[kCount]) {}

template <int kCount>
void multiply(float (&sums)[kCount], unsigned long long a, unsigned long long b) {
  emulator::open[threadIdx.x].products.push_back({a, b, sums});
}

}  // namespace fast_video_vae
