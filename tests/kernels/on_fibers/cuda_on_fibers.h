// The part of CUDA that some kernels use, on a CPU: the threads of a cluster are fibers, which take turns at barriers
// and at operations of warps. cp.async copies at once.
//
// Constants: CLUSTER_BLOCKS, BLOCK_THREADS.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

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
    std::vector<char> memory;
    int index;

    char* shared() {
        return reinterpret_cast<char*>((reinterpret_cast<unsigned long long>(memory.data()) + 127) & ~127ull);
    }
};

struct Cluster {
    Barrier barrier;
    Block blocks[kClusterBlocks];
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Block* block;
    int thread, cluster_phase;
    bool done;
};

struct Index {
    int x;
};

inline int all_blocks;
inline Cluster* cluster;
inline Fiber* current;
inline ucontext_t scheduler;

#define threadIdx (Index{current->thread})
#define blockIdx (Index{current->block->index})
#define gridDim (Index{all_blocks})

inline void take_turns() { swapcontext(&current->context, &scheduler); }

inline void wait_at(Barrier& barrier, int count) {
    const int phase = barrier.phase;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.phase;
    }
    while (barrier.phase == phase) take_turns();
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
    while (cluster->barrier.phase == current->cluster_phase) take_turns();
}

// The operands of all lanes of this warp.
template <typename T>
std::vector<T> operands_of_warp(const T& own) {
    Warp& warp = current->block->warps[current->thread / 32];
    auto& operands = warp.operands[warp.barrier.phase % 2];
    std::memcpy(operands[current->thread % 32], &own, sizeof own);
    wait_at(warp.barrier, 32);
    std::vector<T> all(32);
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], operands[lane], sizeof own);
    return all;
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

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline float __int_as_float(int bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }

inline unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

inline float __expf(float x) { return std::exp(x); }
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

constexpr int kGuardBytes = 256;

// Run a kernel with so many bytes of shared memory, one cluster after the other. Returns whether it has written to no
// memory after them.
template <typename Kernel>
bool run_clusters(int clusters, int shared_bytes, const Kernel& kernel) {
    std::vector<Fiber> fibers(kClusterBlocks * kBlockThreads);
    static const Kernel* body;
    body = &kernel;
    all_blocks = clusters * kClusterBlocks;
    for (int number = 0; number < clusters; ++number) {
        Cluster own;
        cluster = &own;
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            own.blocks[rank].memory.assign(shared_bytes + 127 + kGuardBytes, static_cast<char>(0xff));
            own.blocks[rank].index = number * kClusterBlocks + rank;
        }
        for (int i = 0; i < static_cast<int>(fibers.size()); ++i) {
            Fiber& fiber = fibers[i];
            fiber.stack.resize(kStackBytes);
            fiber.block = &own.blocks[i / kBlockThreads];
            fiber.thread = i % kBlockThreads;
            fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, [] { (*body)(); current->done = true; }, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (Fiber& fiber : fibers) {
                if (fiber.done) continue;
                running = true;
                current = &fiber;
                swapcontext(&scheduler, &fiber.context);
            }
        }
        for (Block& block : own.blocks)
            for (int i = 0; i < kGuardBytes; ++i)
                if (block.shared()[shared_bytes + i] != static_cast<char>(0xff)) return false;
    }
    return true;
}
