// The kernels for FVV_TARGET, instructions of x86, as the function FVV_KERNELS.
#include "ops.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdlib.h>

#include <new>

// By a pragma instead of a compiler flag: only the code between here and the pop is compiled for
// the instructions, and no function of a header that the linker might use for all files.
#define FVV_PRAGMA_(text) _Pragma(#text)
#define FVV_PRAGMA(text) FVV_PRAGMA_(text)
#if defined(__clang__)
FVV_PRAGMA(clang attribute push(__attribute__((target(FVV_TARGET))), apply_to = function))
#else
FVV_PRAGMA(GCC push_options)
FVV_PRAGMA(GCC target(FVV_TARGET))
#endif

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

namespace fast_video_vae {

const Kernels* FVV_KERNELS() {
#if defined(__x86_64__)
  return &FVV_ISA::kKernels;
#else
  return nullptr;
#endif
}

}  // namespace fast_video_vae
