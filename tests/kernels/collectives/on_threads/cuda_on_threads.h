// The part of CUDA that csrc/collectives/all_reduce.cu uses, on threads of a CPU. The functions that need large headers
// are in main.cc, which is compiled once: these headers take most of the time.
#pragma once

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline long long min(long long one, long long other) { return one < other ? one : other; }

struct Index { int x; };

// Of the calling thread.
extern thread_local Index threadIdx, blockIdx, gridDim;

void __syncthreads();
bool __syncthreads_and(bool value);
void __nanosleep(unsigned nanoseconds);
unsigned long long clock_ns();

inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline unsigned short round_to_bfloat16(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
