#define MEGALITH_KERNELS kernels_portable
#define MEGALITH_ISA portable
#include "kernels.inl"
