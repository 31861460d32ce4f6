// 16-bit elements of x and of results, for the kernels of linear layers and others.
//
// Constants: HALF, 1 for float16, 0 for bfloat16.

#pragma once

#include "overlap.cuh"

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

namespace {

typedef unsigned short Bits;  // of a float16 or bfloat16

__device__ __forceinline__ float to_float(Bits bits) {
#if HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

__device__ __forceinline__ Bits to_bits(float value) {
    Bits bits;
    asm("cvt.rn." ELEMENT ".f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float rounded(float value) { return to_float(to_bits(value)); }

__device__ __forceinline__ float swiglu(float gate, float up) {
    gate = rounded(gate);
    return rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
}

}  // namespace
