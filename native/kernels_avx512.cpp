#define MEGALITH_KERNELS kernels_avx512
#define MEGALITH_ISA avx512
#include "kernels.inl"
