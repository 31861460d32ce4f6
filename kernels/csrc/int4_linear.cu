// Linear layers with 4-bit weights and few rows of x: see int4_linear.py, and group_format.py for the layout.
//
// A block takes tiles of 16 * OUTPUT_TILES weight rows, one after the other. Its warps divide the pairs of groups of a
// tile among them; a warp copies several pairs ahead into a ring in shared memory, also across tiles. A product (16
// weight rows x 16 columns x 8 rows of x) takes both operands from registers. The order of its columns is free, as long
// as both operands have the same: so a thread reads adjacent bytes of a weight row, and the x of the same columns.
// Weights are read before the previous kernel has ended, x after it. Sums of a group are scaled in float32; at the end
// of a tile the sums of the warps are added, always in the same order.
//
// Constants: GROUP columns of a group; WARPS; STAGES of a ring; OUTPUT_TILES, and ROW_TILES of 8 rows of x; GATED, 1 if
// the lower 8 rows of a tile are of the gate and the upper 8 of up; BIAS; HALF, 1 for float16, 0 for bfloat16.

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

namespace {

typedef unsigned short Bits;  // of a float16 or bfloat16

constexpr int kOutputs = (GATED ? 8 : 16) * OUTPUT_TILES;  // results of a tile for each row of x
constexpr int kRows = 8 * ROW_TILES;
constexpr int kWords = GROUP / 16;               // of 4 bytes, that a thread has of a weight row and pair of groups
constexpr int kLoad = kWords < 4 ? kWords : 4;   // words of one copy
constexpr int kSums = 4 * OUTPUT_TILES * ROW_TILES;  // of a thread
// A stage of a ring, in bytes: weights; scales and zeros.
constexpr int kWeightBytes = OUTPUT_TILES * 2 * kWords * 4 * 32;
constexpr int kStageBytes = kWeightBytes + OUTPUT_TILES * 8 * 16;
// A byte in the lower half of this number is the number plus the byte: 128 in bfloat16, 1024 in float16.
constexpr unsigned kOffset = HALF ? 0x6400u : 0x4300u;
constexpr unsigned kOne = HALF ? 0x3c003c00u : 0x3f803f80u;

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

template <int BYTES>
__device__ __forceinline__ void copy_async(char* to, const void* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

struct Problem {
    const Bits* x;
    const unsigned char* packed;
    const Bits *scales, *zeros;
    long long rows, out_size, in_size, row_bytes, group_stride;
    int row_tiles;
};

// The weight row of result `output`: of the gate or of up, in half 0 or 1 of a gated tile.
__device__ __forceinline__ long long weight_row(const Problem& problem, long long output, int half) {
    if (output >= problem.out_size) output = 0;  // not stored
    return GATED && half ? problem.out_size + output : output;
}

__device__ __forceinline__ long long output_of(long long first, int tile, int half, int quad) {
    return first + quad + (GATED ? 8 * tile : 16 * tile + 8 * half);
}

// Copy the weights of a pair of groups: each thread those that it multiplies.
__device__ __forceinline__ void copy_weights(char* stage, const Problem& problem, int number, int pair, int lane) {
    const long long first = static_cast<long long>(number / problem.row_tiles) * kOutputs;
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long row = weight_row(problem, output_of(first, tile, half, lane / 4), half);
            const unsigned char* bytes = problem.packed + row * problem.row_bytes +
                                         static_cast<long long>(pair) * GROUP + lane % 4 * 4 * kLoad;
#pragma unroll
            for (int word = 0; word < kWords; word += kLoad)
                copy_async<4 * kLoad>(
                    stage + (((tile * 2 + half) * kWords + word) * 32 + lane * kLoad) * 4, bytes + word * 16
                );
        }
        if (lane < 8) {  // 8 adjacent scales or zeros: lane = (zeros * 2 + group) * 2 + half
            const int half = lane % 2, group = lane / 2 % 2;
            const long long row = weight_row(problem, output_of(first, tile, half, 0), half);
            const long long place = (2 * pair + group) * problem.group_stride + row;
            copy_async<16>(
                stage + kWeightBytes + (tile * 8 + lane) * 16, (lane < 4 ? problem.scales : problem.zeros) + place
            );
        }
    }
}

// Two values of 4 bits, in bytes FIRST and FIRST + 1 of `values`, minus the zero point in both halves of `negated`.
template <int FIRST>
__device__ __forceinline__ unsigned two_weights(unsigned values, unsigned negated) {
    unsigned both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(values), "r"(kOffset >> 8), "n"(FIRST ? 0x4342 : 0x4140));
    asm("fma.rn." ELEMENT "x2 %0, %0, %1, %2;" : "+r"(both) : "r"(kOne), "r"(negated));
    return both;
}

__device__ __forceinline__ void multiply(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The columns of x that a thread multiplies with its weights of a group, 8 at a time.
struct Columns {
    uint4 of_words[ROW_TILES][kWords / 2];
};

__device__ __forceinline__ void load_columns(
    Columns& to, const Problem& problem, int number, int pair, int group, int lane
) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const long long row = static_cast<long long>(number % problem.row_tiles) * kRows + 8 * tile + lane / 4;
        // instead of a row that does not exist, the last one: its results are not stored
        const Bits* x = problem.x + min(row, problem.rows - 1) * problem.in_size +
                        (2 * static_cast<long long>(pair) + group) * GROUP + lane % 4 * 4 * kLoad;
#pragma unroll
        for (int word = 0; word < kWords; word += 2)
            to.of_words[tile][word / 2] =
                *reinterpret_cast<const uint4*>(x + word / kLoad * 16 * kLoad + word % kLoad * 4);
    }
}

// Add the products of a pair of groups. Group 0 is in the low halves of the bytes, group 1 in the high halves.
__device__ __forceinline__ void add_pair(
    float (&sums)[OUTPUT_TILES][ROW_TILES][4], const char* stage, const Problem& problem, int number, int pair, int lane
) {
    const Bits* scales = reinterpret_cast<const Bits*>(stage + kWeightBytes) + lane / 4;
    const bool second_exists = (2 * static_cast<long long>(pair) + 1) * GROUP < problem.in_size;
    Columns columns, second;
    load_columns(columns, problem, number, pair, 0, lane);
    if (ROW_TILES == 1 && second_exists) load_columns(second, problem, number, pair, 1, lane);  // one latency for both
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        if (group == 1) {
            if (!second_exists) break;
            if (ROW_TILES == 1)
                columns = second;
            else
                load_columns(columns, problem, number, pair, 1, lane);
        }
        float parts[OUTPUT_TILES][ROW_TILES][4] = {};
        unsigned negated[OUTPUT_TILES][2];
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Bits zero = scales[(tile * 8 + 4 + group * 2 + half) * 8];
                negated[tile][half] = (0x8000u | kOffset | static_cast<unsigned>(to_float(zero))) * 0x10001u;
            }
#pragma unroll
        for (int word = 0; word < kWords; word += 2) {
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                unsigned a[2][4];  // of two words
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int before = ((tile * 2 + half) * kWords + word / kLoad * kLoad) * 32;  // words
                    const uint2 bytes =
                        *reinterpret_cast<const uint2*>(stage + (before + lane * kLoad + word % kLoad) * 4);
                    const unsigned first = bytes.x >> (4 * group) & 0x0f0f0f0fu;
                    const unsigned second = bytes.y >> (4 * group) & 0x0f0f0f0fu;
                    a[0][half] = two_weights<0>(first, negated[tile][half]);
                    a[0][2 + half] = two_weights<2>(first, negated[tile][half]);
                    a[1][half] = two_weights<0>(second, negated[tile][half]);
                    a[1][2 + half] = two_weights<2>(second, negated[tile][half]);
                }
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) {
                    const uint4 x = columns.of_words[row][word / 2];
                    multiply(parts[tile][row], a[0], x.x, x.y);
                    multiply(parts[tile][row], a[1], x.z, x.w);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            const float lower = to_float(scales[(tile * 8 + group * 2) * 8]);
            const float upper = to_float(scales[(tile * 8 + group * 2 + 1) * 8]);
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row) {
                sums[tile][row][0] += parts[tile][row][0] * lower;
                sums[tile][row][1] += parts[tile][row][1] * lower;
                sums[tile][row][2] += parts[tile][row][2] * upper;
                sums[tile][row][3] += parts[tile][row][3] * upper;
            }
        }
    }
}

// A thread stores a result: a part of what lane `lane` of all warps has summed up.
__device__ __forceinline__ void store_tile(
    Bits* out, const float (&all_sums)[WARPS][kSums][32], const Problem& problem, const Bits* bias, int number
) {
    const long long first = static_cast<long long>(number / problem.row_tiles) * kOutputs;
    const long long first_row = static_cast<long long>(number % problem.row_tiles) * kRows;
    const int lane = threadIdx.x % 32;
    for (int sum = threadIdx.x / 32; sum < kSums; sum += WARPS) {
        const int part = sum % 4, row_tile = sum / 4 % ROW_TILES, tile = sum / 4 / ROW_TILES;
        const long long row = first_row + 8 * row_tile + 2 * (lane % 4) + part % 2;
        const long long output = output_of(first, tile, part / 2, lane / 4);
        if (row >= problem.rows || output >= problem.out_size || (GATED && part >= 2)) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            total += all_sums[warp][sum][lane];
            if (GATED) up += all_sums[warp][sum + 2][lane];
        }
        if (BIAS) {
            total += to_float(bias[output]);
            if (GATED) up += to_float(bias[problem.out_size + output]);
        }
        if (GATED) {
            const float gate = rounded(total);
            total = rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
        }
        out[row * problem.out_size + output] = to_bits(total);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) int4_linear(
    const Bits* x, const unsigned char* packed, const Bits* scales, const Bits* zeros, const Bits* bias, Bits* out,
    long long rows, long long out_size, long long in_size, long long row_bytes, long long group_stride
) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    extern __shared__ __align__(16) char rings[];
    auto all_sums = reinterpret_cast<float(*)[WARPS][kSums][32]>(rings + WARPS * STAGES * kStageBytes);  // two buffers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* ring = rings + warp * STAGES * kStageBytes;
    const int pairs = static_cast<int>(row_bytes / GROUP), row_tiles = static_cast<int>((rows + kRows - 1) / kRows);
    const Problem problem = {x, packed, scales, zeros, rows, out_size, in_size, row_bytes, group_stride, row_tiles};
    const int tiles = static_cast<int>((out_size + kOutputs - 1) / kOutputs) * row_tiles;

    // What is copied next: a tile, a pair of groups, and a stage of the ring.
    int ahead_tile = blockIdx.x, ahead_pair = warp, ahead_stage = 0;
    const auto advance = [&](int& tile, int& pair, int& stage) {
        pair += WARPS;
        if (pair - warp >= pairs) {  // the same number of turns for all warps; some have no pair in the last one
            pair = warp;
            tile += gridDim.x;
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
#pragma unroll 1
    for (int count = 0; count < STAGES - 1; ++count) {
        if (ahead_tile < tiles && ahead_pair < pairs)
            copy_weights(ring + ahead_stage * kStageBytes, problem, ahead_tile, ahead_pair, lane);
        commit();
        advance(ahead_tile, ahead_pair, ahead_stage);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int tile = blockIdx.x, pair = warp, stage = 0;
    float sums[OUTPUT_TILES][ROW_TILES][4] = {};
    int buffer = 0;
#pragma unroll 1
    while (tile < tiles) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();  // scales are copied by other lanes, and all have read the stage that is filled next
        if (ahead_tile < tiles && ahead_pair < pairs)
            copy_weights(ring + ahead_stage * kStageBytes, problem, ahead_tile, ahead_pair, lane);
        commit();
        advance(ahead_tile, ahead_pair, ahead_stage);
        if (pair < pairs) add_pair(sums, ring + stage * kStageBytes, problem, tile, pair, lane);
        const int current = tile;
        advance(tile, pair, stage);
        if (tile == current) continue;
#pragma unroll
        for (int output = 0; output < OUTPUT_TILES; ++output)
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    all_sums[buffer][warp][(output * ROW_TILES + row) * 4 + part][lane] = sums[output][row][part];
                    sums[output][row][part] = 0.0f;
                }
        __syncthreads();
        store_tile(out, all_sums[buffer], problem, bias, current);
        buffer ^= 1;  // the other one has been read: before the __syncthreads above
    }
}
