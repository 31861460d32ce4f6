// Linear layers with float32 weights and few rows of x in bfloat16, for Hopper. All weights must fit in the shared
// memory of all multiprocessors: see at_once.cuh.
//
// Each weight is split into three bfloat16 whose sum is the weight with all its 24 bits. So every product is exact, and
// products are added in float32.
//
// Constants: those of at_once.cuh.

#define WEIGHT_BYTES 4
#define HALF 0
#include "linear/at_once.cuh"

namespace {

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Subtracts the two bfloat16 of `both`.
__device__ __forceinline__ void subtract(float& low, float& high, unsigned both) {
    low -= __uint_as_float(both << 16);
    high -= __uint_as_float(both & 0xffff0000u);
}

__device__ __forceinline__ void multiply_bfloat(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int kProducts = kBlock / 16;  // for the columns of a warp

// Adds the products of 16 columns. Each thread has four adjacent columns of its weight rows `quad` and `quad` + 8.
__device__ __forceinline__ void multiply_weights(
    float (&sums)[ROW_TILES][4], float4 lower, float4 upper, const uint2 (&x)[ROW_TILES][kProducts], int number
) {
    float numbers[4][2] = {{lower.x, lower.y}, {upper.x, upper.y}, {lower.z, lower.w}, {upper.z, upper.w}};
#pragma unroll
    for (int piece = 0; piece < 3; ++piece) {
        unsigned operand[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            operand[i] = pack(numbers[i][0], numbers[i][1]);
            subtract(numbers[i][0], numbers[i][1], operand[i]);
        }
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
            multiply_bfloat(sums[row_tile], operand, x[row_tile][number].x, x[row_tile][number].y);
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * kWarps) float_at_once(
    const Bits* x, const float* weights, float* out, long long rows, long long out_size, long long in_size
) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Exchange exchange;
    start_next();
    const Columns columns(static_cast<int>(in_size));
    const int first_output = static_cast<int>(blockIdx.x / CLUSTER) * kWeightRows;
    copy_weights(columns, memory, exchange, [&](int row) {
        const long long weight_row = min(first_output + row, static_cast<int>(out_size) - 1);
        return reinterpret_cast<const char*>(weights + weight_row * in_size);
    });
    wait_for_x();
    Sums sums = {};
#pragma unroll 1
    for (int block = warp(); block < columns.count; block += kWarps) {
        uint2 own_x[ROW_TILES][kProducts];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            const long long row = min(8 * row_tile + quad(), static_cast<int>(rows) - 1);  // or the last row
            const Bits* const from = x + row * in_size + (columns.first + block) * kBlock + part() * 4;
#pragma unroll
            for (int number = 0; number < kProducts; ++number)
                own_x[row_tile][number] = *reinterpret_cast<const uint2*>(from + number * 16);
        }
        wait_phase(shared_address(&exchange.filled[block / kWarps]), 0);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const unsigned char* const lower =
                memory + (16 * unit + quad()) * columns.pitch() + (block * kBlock + part() * 4) * 4;
            const unsigned char* const upper = lower + 8 * columns.pitch();
#pragma unroll
            for (int number = 0; number < kProducts; ++number) {
                const float4 one = *reinterpret_cast<const float4*>(lower + number * 64);
                const float4 other = *reinterpret_cast<const float4*>(upper + number * 64);
                multiply_weights(sums[unit], one, other, own_x, number);
            }
        }
    }
    add_sums(memory, exchange, sums, [&](int pair, float2 total) {
        const int row_tile = pair / 2 % ROW_TILES, unit = pair / 2 / ROW_TILES;
        const int row = 8 * row_tile + 2 * part() + pair % 2, output = first_output + 16 * unit + quad();
        if (row >= rows) return;
        if (output < out_size) out[row * out_size + output] = total.x;
        if (output + 8 < out_size) out[row * out_size + output + 8] = total.y;
    });
}
