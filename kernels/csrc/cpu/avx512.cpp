// The kernels for processors with AVX-512 (F, BW, DQ, VL): vectors of 16 floats.
#include "ops.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdlib.h>

#include <new>

// By a pragma instead of a compiler flag: only the code between here and the pop is compiled for
// AVX-512, and no function of a header that the linker might use for all files.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define FVV_ISA avx512
#define FVV_LANES 16
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fast_video_vae {

const Kernels* avx512_kernels() { return &avx512::kKernels; }

}  // namespace fast_video_vae

#else

namespace fast_video_vae {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace fast_video_vae

#endif
