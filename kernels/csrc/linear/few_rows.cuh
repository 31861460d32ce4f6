// Linear layers with few rows of x, for weights in any format: int4_linear.cu, fp8_linear.cu, plain_linear.cu.
//
// A block takes tiles of 16 * OUTPUT_TILES weight rows, one after the other. Its warps divide the steps of a tile among
// them, which are ranges of columns; a warp copies several steps ahead into a ring in shared memory, also across tiles.
// A product (16 weight rows x 16 columns x 8 rows of x) takes both operands from registers. The order of its columns is
// free, as long as both operands have the same: so a thread reads adjacent bytes of a weight row, and the x of the same
// columns. Weights are read before the previous kernel has ended, x after it. At the end of a tile the sums of the
// warps are added, always in the same order.
//
// Constants: WARPS; STAGES of a ring; OUTPUT_TILES, and ROW_TILES of 8 rows of x; GATED, 1 if the lower 8 rows of a
// tile are of the gate and the upper 8 of up; BIAS; HALF, 1 for float16, 0 for bfloat16.
//
// A format is a struct with these members:
//     kStageBytes                                   of a step in the ring of a warp
//     steps                                         of a row
//     copy(stage, shape, number, step, lane)        copy the weights of a step of tile `number`, asynchronously
//     X; load(x, shape, number, step, lane)         load the x of a step
//     add(sums, stage, x, lane)                     add the products of a step

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

namespace {

typedef unsigned short Bits;  // of a float16 or bfloat16
typedef float Sums[OUTPUT_TILES][ROW_TILES][4];  // of a thread, as products have them

constexpr int kOutputs = (GATED ? 8 : 16) * OUTPUT_TILES;  // results of a tile for each row of x
constexpr int kRows = 8 * ROW_TILES;
constexpr int kSums = 4 * OUTPUT_TILES * ROW_TILES;  // of a thread

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

struct Shape {
    const Bits* x;
    long long rows, out_size, in_size;
    int row_tiles;
};

// The weight row of result `output`: of the gate or of up, in half 0 or 1 of a gated tile.
__device__ __forceinline__ long long weight_row(const Shape& shape, long long output, int half) {
    if (output >= shape.out_size) output = 0;  // not stored
    return GATED && half ? shape.out_size + output : output;
}

__device__ __forceinline__ long long output_of(long long first, int tile, int half, int quad) {
    return first + quad + (GATED ? 8 * tile : 16 * tile + 8 * half);
}

__device__ __forceinline__ long long first_output(const Shape& shape, int number) {
    return static_cast<long long>(number / shape.row_tiles) * kOutputs;
}

__device__ __forceinline__ void multiply(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Add the sums of a group; a thread has one row of the lower 8 of a tile and one of the upper 8, each with its scale.
__device__ __forceinline__ void add_scaled(
    float (&sums)[ROW_TILES][4], const float (&parts)[ROW_TILES][4], float lower, float upper
) {
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row) {
        sums[row][0] += parts[row][0] * lower;
        sums[row][1] += parts[row][1] * lower;
        sums[row][2] += parts[row][2] * upper;
        sums[row][3] += parts[row][3] * upper;
    }
}

// A thread's columns of a group: words of 4, in runs of RUN adjacent columns. The 4 threads that share a row of x have
// runs next to each other.
template <int COLUMNS, int RUN>
struct Columns {
    static constexpr int kWords = COLUMNS / 16;
    uint4 of_words[ROW_TILES][kWords / 2];

    __device__ __forceinline__ void load(const Shape& shape, int number, long long first, int lane) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const long long row = static_cast<long long>(number % shape.row_tiles) * kRows + 8 * tile + lane / 4;
            // instead of a row that does not exist, the last one: its results are not stored
            const Bits* x = shape.x + min(row, shape.rows - 1) * shape.in_size + first + lane % 4 * RUN;
#pragma unroll
            for (int word = 0; word < kWords; word += 2)
                of_words[tile][word / 2] =
                    *reinterpret_cast<const uint4*>(x + word / (RUN / 4) * 4 * RUN + word % (RUN / 4) * 4);
        }
    }
};

// A thread stores a result: a part of what lane `lane` of all warps has summed up.
__device__ __forceinline__ void store_tile(
    Bits* out, const float (&all_sums)[WARPS][kSums][32], const Shape& shape, const Bits* bias, int number
) {
    const long long first = first_output(shape, number);
    const long long first_row = static_cast<long long>(number % shape.row_tiles) * kRows;
    const int lane = threadIdx.x % 32;
    for (int sum = threadIdx.x / 32; sum < kSums; sum += WARPS) {
        const int part = sum % 4, row_tile = sum / 4 % ROW_TILES, tile = sum / 4 / ROW_TILES;
        const long long row = first_row + 8 * row_tile + 2 * (lane % 4) + part % 2;
        const long long output = output_of(first, tile, part / 2, lane / 4);
        if (row >= shape.rows || output >= shape.out_size || (GATED && part >= 2)) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            total += all_sums[warp][sum][lane];
            if (GATED) up += all_sums[warp][sum + 2][lane];
        }
        if (BIAS) {
            total += to_float(bias[output]);
            if (GATED) up += to_float(bias[shape.out_size + output]);
        }
        if (GATED) {
            const float gate = rounded(total);
            total = rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
        }
        out[row * shape.out_size + output] = to_bits(total);
    }
}

template <class Weights>
__device__ __forceinline__ void few_rows(const Weights& weights, const Shape& shape, const Bits* bias, Bits* out) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    extern __shared__ __align__(16) char rings[];
    constexpr int kRingBytes = STAGES * Weights::kStageBytes;
    auto all_sums = reinterpret_cast<float(*)[WARPS][kSums][32]>(rings + WARPS * kRingBytes);  // two buffers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* ring = rings + warp * kRingBytes;
    const int tiles = static_cast<int>((shape.out_size + kOutputs - 1) / kOutputs) * shape.row_tiles;

    // What is copied next: a tile, a step, and a stage of the ring.
    int ahead_tile = blockIdx.x, ahead_step = warp, ahead_stage = 0;
    const auto advance = [&](int& tile, int& step, int& stage) {
        step += WARPS;
        if (step - warp >= weights.steps) {  // all warps have as many turns; some have no step in the last one
            step = warp;
            tile += gridDim.x;
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
#pragma unroll 1
    for (int count = 0; count < STAGES - 1; ++count) {
        if (ahead_tile < tiles && ahead_step < weights.steps)
            weights.copy(ring + ahead_stage * Weights::kStageBytes, shape, ahead_tile, ahead_step, lane);
        commit();
        advance(ahead_tile, ahead_step, ahead_stage);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // The x of the next step is loaded ahead, as far as there are registers for it.
    constexpr bool kAhead = ROW_TILES == 1;
    int tile = blockIdx.x, step = warp, stage = 0;
    typename Weights::X x, next;
    if (kAhead && tile < tiles && step < weights.steps) weights.load(next, shape, tile, step, lane);
    Sums sums = {};
    int buffer = 0;
#pragma unroll 1
    while (tile < tiles) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();  // scales are copied by other lanes, and all have read the stage that is filled next
        if (ahead_tile < tiles && ahead_step < weights.steps)
            weights.copy(ring + ahead_stage * Weights::kStageBytes, shape, ahead_tile, ahead_step, lane);
        commit();
        advance(ahead_tile, ahead_step, ahead_stage);
        const int current = tile, current_step = step, current_stage = stage;
        advance(tile, step, stage);
        if (kAhead) {
            x = next;
            if (tile < tiles && step < weights.steps) weights.load(next, shape, tile, step, lane);
        }
        if (current_step < weights.steps) {
            if (!kAhead) weights.load(x, shape, current, current_step, lane);
            weights.add(sums, ring + current_stage * Weights::kStageBytes, x, lane);
        }
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
        store_tile(out, all_sums[buffer], shape, bias, current);
        buffer ^= 1;  // the other one has been read: before the __syncthreads above
    }
}

}  // namespace
