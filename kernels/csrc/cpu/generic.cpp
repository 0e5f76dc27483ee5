// The kernels for any processor: vectors of four floats, as SSE2 and NEON have them.
#include <stdlib.h>

#include <new>

#include "ops.h"

#define FVV_ISA generic
#define FVV_LANES 4
#include "kernels.h"

namespace fast_video_vae {

const Kernels* generic_kernels() { return &generic::kKernels; }

}  // namespace fast_video_vae
