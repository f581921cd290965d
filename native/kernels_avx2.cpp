#define MEGALITH_KERNELS kernels_avx2
#define MEGALITH_ISA avx2
#include "kernels.inl"
