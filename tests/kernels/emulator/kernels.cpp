// The kernels as they are, for the CPU. The emulated headers come first on the path.
#include "group_norm.cu"
#include "rms_norm.cu"
#include "silu_mul.cu"
