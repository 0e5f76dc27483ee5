// The kernels for processors with AVX-512 (F, BW, DQ, VL): vectors of 16 floats.
#define FVV_ISA avx512
#define FVV_LANES 16
#define FVV_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define FVV_KERNELS avx512_kernels
#include "x86.h"
