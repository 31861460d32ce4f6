// Linear layers with 4-bit weights and few rows of x: see int4_linear.py, and group_format.py for the layout.
//
// The warps of a block have the same 16 * OUTPUT_TILES weight rows and divide the pairs of groups among them. A product
// (16 weight rows x 16 columns x 8 rows of x) takes both operands from registers. The order of its columns is free, as
// long as both operands have the same: so a thread reads adjacent bytes of a weight row, and the x of the same columns.
// Weights are read before the previous kernel has ended, x after it. Sums of a group are scaled in float32; in the end
// the sums of the warps are added, always in the same order.
//
// Constants: GROUP columns of a group; WARPS; OUTPUT_TILES and ROW_TILES, tiles of 16 weight rows and of 8 rows of x;
// GATED, 1 if the lower 8 rows of a tile are of the gate and the upper 8 of up; BIAS; HALF, 1 for float16, 0 for bfloat16.

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

namespace {

typedef unsigned short Bits;  // of a float16 or bfloat16

constexpr int kOutputs = (GATED ? 8 : 16) * OUTPUT_TILES;  // results of a block for each row of x
constexpr int kRows = 8 * ROW_TILES;
constexpr int kWords = GROUP / 16;               // of 4 bytes, that a thread has of a weight row and pair of groups
constexpr int kLoad = kWords < 4 ? kWords : 4;  // words of one load
constexpr int kSums = 4 * OUTPUT_TILES * ROW_TILES;  // of a thread
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

// The weights of a thread in one pair of groups: rows `lane / 4` and `lane / 4 + 8` of each tile.
struct Weights {
    unsigned words[OUTPUT_TILES][2][kWords];
    Bits scales[OUTPUT_TILES][2][2], zeros[OUTPUT_TILES][2][2];  // tile, row, group
};

struct Source {
    const unsigned char* packed[OUTPUT_TILES][2];  // where this thread begins in a weight row
    long long row[OUTPUT_TILES][2];
    const Bits *scales, *zeros;
    long long group_stride;
};

__device__ __forceinline__ void load_words(unsigned* to, const unsigned char* from) {
    if constexpr (kLoad == 4) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(from));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
}

__device__ __forceinline__ void load_weights(Weights& to, const Source& from, int pair) {
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned char* bytes = from.packed[tile][half] + static_cast<long long>(pair) * GROUP;
#pragma unroll
            for (int word = 0; word < kWords; word += kLoad)
                load_words(to.words[tile][half] + word, bytes + word / kLoad * 16 * kLoad);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const long long place = (2 * pair + group) * from.group_stride + from.row[tile][half];
                to.scales[tile][half][group] = __ldg(from.scales + place);
                to.zeros[tile][half][group] = __ldg(from.zeros + place);
            }
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

__device__ __forceinline__ void multiply(float* sums, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Add the products with one group: GROUP_OF_PAIR 0 is in the low halves of the bytes, 1 in the high halves.
template <int GROUP_OF_PAIR>
__device__ __forceinline__ void add_group(
    float (&sums)[OUTPUT_TILES][ROW_TILES][4], const Weights& weights, const Bits* const* x, const bool* exists
) {
    float parts[OUTPUT_TILES][ROW_TILES][4] = {};
    unsigned negated[OUTPUT_TILES][2];
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned zero = static_cast<unsigned>(to_float(weights.zeros[tile][half][GROUP_OF_PAIR]));
            negated[tile][half] = (0x8000u | kOffset | zero) * 0x10001u;
        }
#pragma unroll
    for (int word = 0; word < kWords; word += 2) {
        unsigned columns[ROW_TILES][4];  // 8 adjacent columns of x: of two words
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            uint4 loaded = {0u, 0u, 0u, 0u};
            const int column = word / kLoad * 16 * kLoad + word % kLoad * 4;
            if (exists[tile]) loaded = *reinterpret_cast<const uint4*>(x[tile] + column);
            columns[tile][0] = loaded.x, columns[tile][1] = loaded.y;
            columns[tile][2] = loaded.z, columns[tile][3] = loaded.w;
        }
#pragma unroll
        for (int next = 0; next < 2; ++next) {
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                unsigned a[4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned values = weights.words[tile][half][word + next] >> (4 * GROUP_OF_PAIR) & 0x0f0f0f0fu;
                    a[half] = two_weights<0>(values, negated[tile][half]);
                    a[2 + half] = two_weights<2>(values, negated[tile][half]);
                }
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) multiply(parts[tile][row], a, columns[row] + 2 * next);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
        const float lower = to_float(weights.scales[tile][0][GROUP_OF_PAIR]);
        const float upper = to_float(weights.scales[tile][1][GROUP_OF_PAIR]);
#pragma unroll
        for (int row = 0; row < ROW_TILES; ++row) {
            sums[tile][row][0] += parts[tile][row][0] * lower;
            sums[tile][row][1] += parts[tile][row][1] * lower;
            sums[tile][row][2] += parts[tile][row][2] * upper;
            sums[tile][row][3] += parts[tile][row][3] * upper;
        }
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
    __shared__ float all_sums[WARPS][kSums][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, place = lane % 4;
    const int row_tiles = static_cast<int>((rows + kRows - 1) / kRows);
    const long long first_output = static_cast<long long>(blockIdx.x / row_tiles) * kOutputs;
    const long long first_row = static_cast<long long>(blockIdx.x % row_tiles) * kRows;
    const int pairs = static_cast<int>(row_bytes / GROUP);

    Source source = {{}, {}, scales, zeros, group_stride};
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            long long output = first_output + quad + (GATED ? 8 * tile : 16 * tile + 8 * half);
            if (output >= out_size) output = 0;  // not stored
            source.row[tile][half] = GATED && half ? out_size + output : output;
            source.packed[tile][half] = packed + source.row[tile][half] * row_bytes + place * 4 * kLoad;
        }
    Weights weights, next;
    if (warp < pairs) load_weights(weights, source, warp);
    if (warp + WARPS < pairs) load_weights(next, source, warp + WARPS);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    const Bits* x_rows[ROW_TILES];
    bool exists[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const long long row = first_row + 8 * tile + quad;
        exists[tile] = row < rows;
        x_rows[tile] = x + row * in_size + place * 4 * kLoad;
    }
    float sums[OUTPUT_TILES][ROW_TILES][4] = {};
    for (int pair = warp; pair < pairs; pair += WARPS) {
        const Bits* columns[ROW_TILES];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
            columns[tile] = x_rows[tile] + static_cast<long long>(pair) * 2 * GROUP;
        add_group<0>(sums, weights, columns, exists);
        if (pair * 2 * GROUP + GROUP < in_size) {  // else the second group is padding
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) columns[tile] += GROUP;
            add_group<1>(sums, weights, columns, exists);
        }
        weights = next;
        if (pair + 2 * WARPS < pairs) load_weights(next, source, pair + 2 * WARPS);
    }
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
        for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                all_sums[warp][(tile * ROW_TILES + row) * 4 + part][lane] = sums[tile][row][part];
    __syncthreads();

    // A thread has a result: part `part` of what lane `lane` has summed up.
    for (int index = threadIdx.x; index < kSums * 32; index += 32 * WARPS) {
        const int sum = index / 32, part = sum % 4, row_tile = sum / 4 % ROW_TILES, tile = sum / 4 / ROW_TILES;
        const long long row = first_row + 8 * row_tile + 2 * place + part % 2;
        const long long output = first_output + quad + (GATED ? 8 * tile : 16 * tile + 8 * (part / 2));
        if (row >= rows || output >= out_size || (GATED && part >= 2)) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            total += all_sums[other][sum][lane];
            if (GATED) up += all_sums[other][sum + 2][lane];
        }
        if (BIAS) {
            total += to_float(bias[output]);
            if (GATED) up += to_float(bias[out_size + output]);
        }
        if (GATED) {
            const float gate = rounded(total);
            total = rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
        }
        out[row * out_size + output] = to_bits(total);
    }
}
