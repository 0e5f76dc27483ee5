// The kernels for processors with AVX2, FMA and F16C: vectors of 8 floats.
#define FVV_ISA avx2
#define FVV_LANES 8
#define FVV_TARGET "avx2,fma,f16c"
#define FVV_KERNELS avx2_kernels
#include "x86.h"
