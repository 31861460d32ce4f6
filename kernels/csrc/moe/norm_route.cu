// Residual sum, norm, router and selection of experts for very few tokens, in one kernel of one cluster, for Hopper:
//
//     total    =  x + y, rounded
//     normed   =  rms_norm(total)                                                            linear/rms_norm.py
//     logits   =  router @ normed [+ bias], rounded
//     experts  =  those with the PER_TOKEN largest logits, the lowest of equal ones; weights by softmax
//                                                                                            moe/router/selection.py
//
// Each thread block computes the logits of some experts. It copies their router rows to shared memory before the
// previous kernel has ended, and reads x and y after it. Every block computes the norms of all tokens; its warps divide
// the columns of the products. All blocks send their logits to the first block, where one warp per token selects.
//
// Constants: CLUSTER blocks of WARPS warps; HIDDEN; EXPERTS; PER_TOKEN; NORMALISED; BIAS, 1 if there is one; HALF, 1
// for float16, 0 for bfloat16.

#include "hopper.cuh"
#include "linear/mma.cuh"
#include "warps.cuh"

namespace {

constexpr int kThreads = 32 * WARPS, kMostTokens = 4;
constexpr int kOwn = (EXPERTS + CLUSTER - 1) / CLUSTER;          // experts of a block
constexpr int kTiles = (kOwn + 15) / 16, kRows = 16 * kTiles;    // of products, with padding rows
constexpr int kPieces = HIDDEN / 8;                              // pieces of 16 bytes in a row
constexpr int kPerThread = (kPieces + kThreads - 1) / kThreads;  // pieces of a thread
constexpr int kRowBytes = 2 * HIDDEN, kPitch = kRowBytes + 16;   // padded: 8 adjacent rows are in different banks
constexpr unsigned kAll = 0xffffffffu;
static_assert(HIDDEN % 64 == 0, "products have 32 columns at a time, of rows whose banks differ");
static_assert(kMostTokens <= WARPS && PER_TOKEN <= 32 && PER_TOKEN <= EXPERTS && EXPERTS < 0xffff, "a lane has a choice");

struct __align__(16) Shared {
    char router[kRows][kPitch], normed[kMostTokens][kPitch];
    float sums[WARPS][kRows][kMostTokens];
    float squares[WARPS][kMostTokens];
    unsigned keys[kMostTokens][EXPERTS];  // used in the first block only
    unsigned long long copied, received;  // barriers: the router's rows are copied; all `keys` are received
};

// A larger logit has a larger key; of equal logits, the lower expert has the larger key. No logit has the key 0.
__device__ __forceinline__ unsigned key_of(Bits logit, int expert) {
    const unsigned ordered = logit & 0x8000u ? ~logit & 0xffffu : logit | 0x8000u;
    return ordered << 16 | (0xffffu - expert);
}

__device__ __forceinline__ int expert_of(unsigned key) { return 0xffff - (key & 0xffff); }

__device__ __forceinline__ float logit_of(unsigned key) {
    return to_float(static_cast<Bits>(key & 0x80000000u ? key >> 16 & 0x7fffu : ~key >> 16));
}

__device__ __forceinline__ float sum_of_warp(float number) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) number += __shfl_xor_sync(kAll, number, distance);
    return number;
}

// 8 elements, 16 bytes.
union Piece {
    uint4 words;
    Bits elements[8];
};

__device__ __forceinline__ int piece_of(int i) { return i * kThreads + threadIdx.x; }

__device__ __forceinline__ Piece load(const Bits* row, int i) {
    Piece piece = {};
    if (piece_of(i) < kPieces) piece.words = reinterpret_cast<const uint4*>(row)[piece_of(i)];
    return piece;
}

__device__ __forceinline__ void store(Bits* row, int i, const Piece& piece) {
    if (piece_of(i) < kPieces) reinterpret_cast<uint4*>(row)[piece_of(i)] = piece.words;
}

// Computes the residual sums of all tokens and their norms. Each block stores the parts of some of its warps to global
// memory.
__device__ __forceinline__ void add_norms(
    Shared& shared, const Bits* x, const Bits* y, const Piece (&scales)[kPerThread], float eps, int tokens, Bits* total,
    Bits* normed
) {
    Piece sums[kMostTokens][kPerThread], updates[kMostTokens][kPerThread];
#pragma unroll
    for (int token = 0; token < kMostTokens; ++token)
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (token >= tokens) continue;
            sums[token][i] = load(x + token * HIDDEN, i);
            updates[token][i] = load(y + token * HIDDEN, i);
        }
#pragma unroll
    for (int token = 0; token < kMostTokens; ++token) {
        if (token >= tokens) continue;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
#pragma unroll
            for (int element = 0; element < 8; ++element) {
                Bits& sum = sums[token][i].elements[element];
                sum = to_bits(to_float(sum) + to_float(updates[token][i].elements[element]));
                squares += to_float(sum) * to_float(sum);
            }
        squares = sum_of_warp(squares);
        if (lane() == 0) shared.squares[warp()][token] = squares;
    }
    __syncthreads();
    const bool stores = warp() % CLUSTER == blockIdx.x;
#pragma unroll
    for (int token = 0; token < kMostTokens; ++token) {
        if (token >= tokens) continue;
        float squares = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) squares += shared.squares[other][token];
        const float scale = rsqrtf(squares * (1.0f / HIDDEN) + eps);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            Piece result;
#pragma unroll
            for (int element = 0; element < 8; ++element)
                result.elements[element] = to_bits(
                    to_float(scales[i].elements[element]) * rounded(to_float(sums[token][i].elements[element]) * scale)
                );
            store(reinterpret_cast<Bits*>(shared.normed[token]), i, result);
            if (!stores) continue;
            store(total + token * HIDDEN, i, sums[token][i]);
            store(normed + token * HIDDEN, i, result);
        }
    }
}

// Computes each warp's part of the logits of this block's experts.
__device__ __forceinline__ void multiply_rows(Shared& shared, int tokens) {
    // Lane l has the address of line l % 8 of matrix l / 8. The matrices of the router are rows 0 to 7, rows 8 to 15,
    // and the same rows in the next 8 columns. Those of x are adjacent groups of 8 columns; lines after the last token
    // repeat it.
    const unsigned rows = shared_address(shared.router) + lane() % 16 * kPitch + lane() / 16 * 16;
    const unsigned x = shared_address(shared.normed) + min(lane() % 8, tokens - 1) * kPitch + lane() / 8 * 16;
    float sums[kTiles][2][4] = {};
#pragma unroll 4
    for (int pair = warp(); pair < HIDDEN / 32; pair += WARPS) {
        unsigned columns[4];
        load_matrices(columns, x + pair * 64);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned weights[4];
                load_matrices(weights, rows + tile * 16 * kPitch + pair * 64 + half * 32);
                multiply(sums[tile][half], weights, columns[2 * half], columns[2 * half + 1]);
            }
    }
    if (lane() % 4 >= kMostTokens / 2) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tile * 16 + lane() / 4 + i / 2 * 8, token = lane() % 4 * 2 + i % 2;
            shared.sums[warp()][row][token] = sums[tile][0][i] + sums[tile][1][i];
        }
}

// Lane i < PER_TOKEN gets the key of a token's choice i, and its weight.
__device__ __forceinline__ unsigned select(const unsigned (&all)[EXPERTS], float& weight) {
    constexpr int kCount = (EXPERTS + 31) / 32;
    unsigned left[kCount], chosen = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) left[i] = i * 32 + lane() < EXPERTS ? all[i * 32 + lane()] : 0;
#pragma unroll
    for (int choice = 0; choice < PER_TOKEN; ++choice) {
        unsigned most = left[0];
#pragma unroll
        for (int i = 1; i < kCount; ++i) most = max(most, left[i]);
        most = __reduce_max_sync(kAll, most);
        if (lane() == choice) chosen = most;
#pragma unroll
        for (int i = 0; i < kCount; ++i) left[i] = left[i] == most ? 0 : left[i];
    }
    const float top = logit_of(__shfl_sync(kAll, chosen, 0));
    weight = lane() < PER_TOKEN ? __expf(logit_of(chosen) - top) : 0.0f;
    float sum = weight;
    if (!NORMALISED) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum += left[i] ? __expf(logit_of(left[i]) - top) : 0.0f;
    }
    weight /= sum_of_warp(sum);
    return chosen;
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads) norm_route(
    const Bits* x, const Bits* y, const Bits* norm, const Bits* router, const Bits* bias, Bits* total, Bits* normed,
    float* weights, long long* experts, long long token_count, long long eps_bits, long long scale_bits
) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    start_next();
    const int thread = threadIdx.x, tokens = static_cast<int>(token_count);
    const int first = blockIdx.x * kOwn, own = max(min(kOwn, EXPERTS - first), 0);
    const unsigned copied = shared_address(&shared.copied), received = shared_address(&shared.received);
    if (thread == 0) {
        init_barrier(copied, 1);
        init_barrier(received, 1);
        fence_barriers();
        expect_bytes(copied, own * kRowBytes);
        expect_bytes(received, tokens * EXPERTS * 4);
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // the first block inits its barrier before others send
    for (int row = thread; row < own; row += kThreads)
        copy_bulk_async(
            shared_address(shared.router[row]),
            reinterpret_cast<const char*>(router) + static_cast<long long>(first + row) * kRowBytes, kRowBytes, copied,
            read_once()
        );
    Piece scales[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) scales[i] = load(norm, i);
    wait_for_previous();
    add_norms(shared, x, y, scales, __int_as_float(static_cast<int>(eps_bits)), tokens, total, normed);
    __syncthreads();
    wait_phase(copied, 0);
    multiply_rows(shared, tokens);
    __syncthreads();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    for (int i = thread; i < own * kMostTokens; i += kThreads) {
        const int row = i / kMostTokens, token = i % kMostTokens, expert = first + row;
        if (token >= tokens) continue;
        float logit = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) logit += shared.sums[other][row][token];
        if (BIAS) logit += to_float(bias[expert]);
        const unsigned to = in_block(shared_address(&shared.keys[token][expert]), 0);
        store_async(to, key_of(to_bits(logit), expert), in_block(received, 0));
    }
    if (blockIdx.x > 0 || warp() >= tokens) return;
    wait_phase(received, 0);
    float weight;
    const unsigned chosen = select(shared.keys[warp()], weight);
    if (lane() >= PER_TOKEN) return;
    weights[warp() * PER_TOKEN + lane()] = weight * __int_as_float(static_cast<int>(scale_bits));
    experts[warp() * PER_TOKEN + lane()] = expert_of(chosen);
}
