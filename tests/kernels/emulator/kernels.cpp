// The unchanged kernels for the CPU: the emulated headers come first on the include path.
#include "group_norm.cu"
#include "rms_norm.cu"
#include "silu_mul.cu"
