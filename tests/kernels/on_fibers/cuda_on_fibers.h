// The part of CUDA that some kernels use, on a CPU: the threads of a cluster are fibers, which yield at barriers and at
// operations of warps. cp.async copies immediately.
//
// Every test compiles its kernels, so this includes no headers of C++: parsing them and instantiating their templates
// takes longer than compiling a kernel.
//
// Constants: CLUSTER_BLOCKS, BLOCK_THREADS.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __align__(bytes) alignas(bytes)
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __shared__

template <typename T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}

template <typename T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

constexpr int kClusterBlocks = CLUSTER_BLOCKS, kBlockThreads = BLOCK_THREADS, kStackBytes = 64 << 10;

struct Barrier {
    int arrived = 0, phase = 0;
};

struct Warp {
    Barrier barrier;
    char operands[2][32][64];  // of lanes, in two phases
};

struct Block {
    Barrier barrier;
    Warp warps[kBlockThreads / 32];
    char* memory;
    int index;
};

struct Cluster {
    Barrier barrier;
    Block blocks[kClusterBlocks];
};

struct Fiber {
    ucontext_t start;
    jmp_buf place;  // where it resumes: swapcontext() would make a system call
    Block* block;
    int thread, cluster_phase;
    bool started, done;
};

struct Index {
    int x;
};

inline int all_blocks;
inline Cluster* cluster;
inline Fiber* current;
inline jmp_buf scheduler;

#define threadIdx (Index{current->thread})
#define blockIdx (Index{current->block->index})
#define gridDim (Index{all_blocks})

inline void yield_fiber() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

// Run a fiber until it yields or ends.
inline void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

inline void wait_at(Barrier& barrier, int count) {
    const int phase = barrier.phase;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.phase;
    }
    while (barrier.phase == phase) yield_fiber();
}

inline void __syncthreads() { wait_at(current->block->barrier, kBlockThreads); }

inline void arrive_at_cluster() {
    Barrier& barrier = cluster->barrier;
    current->cluster_phase = barrier.phase;
    if (++barrier.arrived == kClusterBlocks * kBlockThreads) {
        barrier.arrived = 0;
        ++barrier.phase;
    }
}

inline void wait_for_cluster() {
    while (cluster->barrier.phase == current->cluster_phase) yield_fiber();
}

// The operands of all lanes of this warp. Valid until the next operation of the warp.
template <typename T>
struct Operands {
    const char (*lanes)[64];

    T operator[](int lane) const {
        T operand;
        __builtin_memcpy(&operand, lanes[lane], sizeof operand);
        return operand;
    }
};

template <typename T>
Operands<T> operands_of_warp(const T& own) {
    static_assert(sizeof own <= 64);
    Warp& warp = current->block->warps[current->thread / 32];
    auto& operands = warp.operands[warp.barrier.phase % 2];
    __builtin_memcpy(operands[current->thread % 32], &own, sizeof own);
    wait_at(warp.barrier, 32);
    return {operands};
}

inline void __syncwarp() { operands_of_warp(0); }

template <typename T>
T __shfl_sync(unsigned, T own, int lane) {
    return operands_of_warp(own)[lane];
}

template <typename T>
T __shfl_xor_sync(unsigned, T own, int distance) {
    return operands_of_warp(own)[current->thread % 32 ^ distance];
}

inline unsigned __reduce_max_sync(unsigned, unsigned own) {
    const auto all = operands_of_warp(own);
    unsigned most = own;
    for (int lane = 0; lane < 32; ++lane) most = max(most, all[lane]);
    return most;
}

extern "C" {
float expf(float);
float exp2f(float);
float fmaf(float, float, float);
float fmaxf(float, float);
float log2f(float);
float sqrtf(float);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline float __int_as_float(int bits) {
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }

inline unsigned __float_as_uint(float number) {
    unsigned bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    return bits;
}

inline float __expf(float x) { return expf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

template <typename T>
T __ldcg(const T* from) {
    return *from;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(bytes >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}

constexpr int kFibers = kClusterBlocks * kBlockThreads, kGuardBytes = 256;
constexpr char kUnwritten = static_cast<char>(0xff);

// Run a kernel with `shared_bytes` of shared memory, one cluster after another. Returns false if it wrote beyond it.
template <typename Kernel>
bool run_clusters(int clusters, int shared_bytes, const Kernel& kernel) {
    static const Kernel* body;
    static Fiber fibers[kFibers];
    body = &kernel;
    all_blocks = clusters * kClusterBlocks;
    // the shared memory of all blocks, a multiple of 128 bytes each, and then the stacks
    const long long block_bytes = shared_bytes + kGuardBytes + 127 & ~127;
    const long long bytes = block_bytes * kClusterBlocks + static_cast<long long>(kStackBytes) * kFibers;
    char* const memory = static_cast<char*>(__builtin_aligned_alloc(128, bytes));
    bool within = true;
    for (int number = 0; number < clusters && within; ++number) {
        Cluster own;
        cluster = &own;
        __builtin_memset(memory, kUnwritten, block_bytes * kClusterBlocks);
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            own.blocks[rank].memory = memory + rank * block_bytes;
            own.blocks[rank].index = number * kClusterBlocks + rank;
        }
        for (int i = 0; i < kFibers; ++i) {
            Fiber& fiber = fibers[i];
            fiber.block = &own.blocks[i / kBlockThreads];
            fiber.thread = i % kBlockThreads;
            fiber.started = fiber.done = false;
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = memory + block_bytes * kClusterBlocks + static_cast<long long>(kStackBytes) * i;
            fiber.start.uc_stack.ss_size = kStackBytes;
            makecontext(&fiber.start, [] { (*body)(); current->done = true; _longjmp(scheduler, 1); }, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (Fiber& fiber : fibers) {
                if (fiber.done) continue;
                running = true;
                resume(fiber);
            }
        }
        for (Block& block : own.blocks)
            for (int i = 0; i < kGuardBytes; ++i) within = within && block.memory[shared_bytes + i] == kUnwritten;
    }
    __builtin_free(memory);
    return within;
}
