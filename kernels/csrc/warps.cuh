// The index of a thread in its warp, and of its warp in the block.

#pragma once

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
