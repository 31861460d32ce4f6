// Which thread of its warp, and which warp of its block, a thread is.

#pragma once

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
