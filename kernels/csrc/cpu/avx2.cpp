// The kernels for processors with AVX2, FMA and F16C: vectors of 8 floats.
#include "ops.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdlib.h>

#include <new>

// By a pragma instead of a compiler flag: only the code between here and the pop is compiled for
// AVX2, and no function of a header that the linker might use for all files.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define FVV_ISA avx2
#define FVV_LANES 8
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fast_video_vae {

const Kernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace fast_video_vae

#else

namespace fast_video_vae {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace fast_video_vae

#endif
