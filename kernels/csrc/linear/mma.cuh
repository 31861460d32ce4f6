// A product of the tensor cores: sums [16, 8] += a [16, 16] * b [16, 8], 16-bit elements (elements.cuh), float32 sums.

#pragma once

#include "linear/elements.cuh"

namespace {

__device__ __forceinline__ void multiply(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace
