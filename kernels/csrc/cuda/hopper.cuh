// Instructions of sm_90a that are PTX only ("PTX ISA" 8.0): barriers in shared memory, loads of
// boxes by tensor maps, products of a warpgroup. The emulator of the tests has its own.
// Addresses of shared memory have 32 bits, `uint32`.
#pragma once

#include "numbers.cuh"

namespace fast_video_vae {

// What the driver makes of an address, sizes and strides: `CUtensorMap`.
struct alignas(64) TensorMap {
  uint8 bytes[128];
};

// Output channels of a product, and the sums that a thread has of 64 pixels by them.
constexpr int kWidth = FVV_WIDTH, kSums = kWidth / 2;

#if defined(__CUDA_ARCH__)

extern __shared__ __align__(1024) uint8 shared_memory[];

__device__ __forceinline__ uint32 shared_address() {
  return static_cast<uint32>(__cvta_generic_to_shared(shared_memory));
}

// The phase of a barrier ends after `arrivals`, and after all bytes that were announced.
__device__ __forceinline__ void create_barrier(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces the bytes of loads.
__device__ __forceinline__ void arrive(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended. That before the first phase has.
__device__ __forceinline__ void wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred ended;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@!ended bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Loads the box of `[B, T, H, W, C]` that begins with an element; zeros outside.
__device__ __forceinline__ void load_box(uint32 to, const TensorMap& map, uint32 barrier, int c,
                                         int x, int y, int t, int b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(c),
      "r"(x), "r"(y), "r"(t), "r"(b) : "memory");
}

// Loads a box of a weight `[C_out, taps * C]`.
__device__ __forceinline__ void load_weight(uint32 to, const TensorMap& map, uint32 barrier,
                                            int value, int channel) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(value), "r"(channel)
      : "memory");
}

// A number that all lanes have. Descriptors are in uniform registers, so that products do not wait.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xffffffff, v, 0); }

// Brings bytes of global memory to the L2 cache, multiples of 16; one thread after the other.
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

#define FVV_INSTRUCTION(name, text) \
  __device__ __forceinline__ void name() { asm volatile(text ";" ::: "memory"); }

FVV_INSTRUCTION(sync_warp, "bar.warp.sync 0xffffffff")

// Lets loads see new barriers.
FVV_INSTRUCTION(publish_barriers, "fence.mbarrier_init.release.cluster;\nfence.proxy.async")

// Registers of each thread of a warpgroup: 128 * 40 + 256 * 232 = 384 * 168, those of the launch.
FVV_INSTRUCTION(drop_registers, "setmaxnreg.dec.sync.aligned.u32 40")
FVV_INSTRUCTION(take_registers, "setmaxnreg.inc.sync.aligned.u32 232")

// A group of products.
FVV_INSTRUCTION(begin_group, "wgmma.fence.sync.aligned")
FVV_INSTRUCTION(end_group, "wgmma.commit_group.sync.aligned")

// Waits until all but the last `kLeft` groups of products are done.
template <int kLeft>
__device__ __forceinline__ void wait_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// `y * sigmoid(y)`.
__device__ __forceinline__ float gated(float y) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return y * inverse;
}

// Keeps the compiler from using the sums in front of this place.
__device__ __forceinline__ void hold(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define FVV_S4(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define FVV_S16(i) FVV_S4(i), FVV_S4(i + 4), FVV_S4(i + 8), FVV_S4(i + 12)
#define FVV_S48 FVV_S16(0), FVV_S16(16), FVV_S16(32)
#define FVV_NAMES_48                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"  \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FVV_NAMES_64 FVV_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FVV_NAMES_80 FVV_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define FVV_NAMES_96 FVV_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FVV_MULTIPLY(width, count, a_name, b_name, ...)                                           \
  asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n"    \
               width "k16.f32." FVV_KIND "." FVV_KIND " {" FVV_NAMES_##count "}, "                \
               a_name ", " b_name ", add, 1, 1, 0, 0;\n}" : __VA_ARGS__ : "l"(a), "l"(b))

// Adds the products of 64 pixels by `kWidth` channels over 16 input channels to the sums `s`. The
// descriptors `a` and `b` are of the pixels and the weights. Of each block of 8 channels a thread
// has two, of the pixels `lane / 4` and `lane / 4 + 8` of the 16 of its warp.
__device__ __forceinline__ void multiply(float (&s)[kSums], uint64 a, uint64 b) {
#if FVV_WIDTH == 96
  FVV_MULTIPLY("96", 48, "%48", "%49", FVV_S48);
#elif FVV_WIDTH == 128
  FVV_MULTIPLY("128", 64, "%64", "%65", FVV_S48, FVV_S16(48));
#elif FVV_WIDTH == 160
  FVV_MULTIPLY("160", 80, "%80", "%81", FVV_S48, FVV_S16(48), FVV_S16(64));
#else
  FVV_MULTIPLY("192", 96, "%96", "%97", FVV_S48, FVV_S16(48), FVV_S16(64), FVV_S16(80));
#endif
}

#endif

}  // namespace fast_video_vae
