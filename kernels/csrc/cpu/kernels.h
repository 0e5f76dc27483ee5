// All kernels, compiled for one instruction set: FVV_ISA is its name and the namespace, FVV_LANES
// the floats of a vector. The including file selects the instructions by a pragma.

#define FVV_INLINE static inline __attribute__((always_inline))
#define FVV_METHOD inline __attribute__((always_inline))

namespace fast_video_vae {
namespace FVV_ISA {

#include "vector.h"

#include "results.h"

#include "rows.h"

#include "pixels.h"

static const Kernels kKernels = {
    FVV_QUOTE(FVV_ISA),
    rms_norm_silu,
    group_norm_sums,
    group_norm_silu,
    silu_mul,
    bias_residual,
    interleave_time,
    merge_phases,
    pixel_shuffle_3d,
    average_down,
    frames_to_images,
};

}  // namespace FVV_ISA
}  // namespace fast_video_vae
