// Weights in 4 bits, for products.cuh, multiplied as integers of 8 bits; group_format.py has the layout.
//
// Each block converts x to integers once: x = scale * (256 * high + low). The scale is a power of two per row and group
// of columns; the 8-bit integers `high` and `low` are two rows of a product. The largest value of a group has 15 bits,
// so bfloat16 values of at least 1/64 of it keep all their 8 bits. Products are added exactly, and scaled in float32:
//
//     result  +=  weight scale * (x scale * sum(value * x) - zero * x scale * sum(x))
//
// Three instructions unpack a 4-byte word of weights to operands; unpacking to 16-bit values takes eleven (format.cuh).
// A step has a pair of groups. Constants: GROUP columns of a group; X_ROWS is 4.

#pragma once

#include "packed4/copy.cuh"

namespace {

constexpr int kXPad = 16 * kLoad;  // bytes after a row in shared memory, so that adjacent rows are in different banks
constexpr int kFraction = 14;      // bits after the leading bit of a group's largest x
constexpr float kMost = 32639.0f;  // the largest integer whose high part is below 128
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: added to a number, it leaves the rounded number in the low bits

struct alignas(4 * kLoad) Words {
    unsigned words[kLoad];
};

__device__ __forceinline__ Words load_words(const char* from) { return *reinterpret_cast<const Words*>(from); }

__device__ __forceinline__ void multiply_bytes(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte BYTE of each of four numbers.
template <int BYTE>
__device__ __forceinline__ unsigned bytes_of(const unsigned* numbers) {
    constexpr unsigned kTwo = BYTE | (4 + BYTE) << 4;
    return __byte_perm(__byte_perm(numbers[0], numbers[1], kTwo), __byte_perm(numbers[2], numbers[3], kTwo), 0x5410);
}

// A row of x in shared memory: `high` of all columns, `low` of all columns, and the scale and the scaled sum of each
// group.
struct XRow {
    int groups, pitch, bytes;

    __device__ __forceinline__ explicit XRow(int steps)
        : groups(2 * steps), pitch(groups * GROUP + kXPad),
          bytes(2 * pitch + groups * static_cast<int>(sizeof(float2))) {}

    // The first row; it follows the rings and the sums of few_rows.cuh.
    static __device__ __forceinline__ char* first() {
        extern __shared__ __align__(16) char rings[];
        return rings + WARPS * (STAGES * PackedGroups::kStageBytes + 2 * kSums * 32 * static_cast<int>(sizeof(float)));
    }
};

// Adjacent columns of a row of x, which a thread converts to integers.
struct Chunk {
    static constexpr int kColumns = 8, kLanes = GROUP / kColumns;  // lanes that have a group

    int row, column;
    uint4 loaded;

    __device__ __forceinline__ void load(const Shape& shape, const Divisor& per_row, int number) {
        row = per_row.quotient(number);
        column = per_row.rest(number) * kColumns;
        loaded = {};  // zeros after the last group; the scales there are 0
        if (column < shape.in_size)
            loaded = *reinterpret_cast<const uint4*>(shape.x + row * shape.in_size + column);
    }

    // Called by whole warps; `exists` is false for a thread without a chunk.
    __device__ __forceinline__ void store(const XRow& form, bool exists) const {
        const unsigned pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        float values[kColumns];
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const unsigned bits = pairs[i / 2] >> 16 * (i % 2) & 0xffffu;
            values[i] = to_float(static_cast<Bits>(bits));
            largest = max(largest, bits & 0x7fffu);
        }
#pragma unroll
        for (int other = kLanes / 2; other; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
        // The float32 exponent of the group's largest value; 255 for infinity and NaN. The value is first enlarged a
        // little, so that its integer is at most kMost.
        const float enlarged = to_float(static_cast<Bits>(largest)) * (32768.0f / kMost);
        const unsigned exponent = max(__float_as_uint(enlarged) >> 23, kFraction + 1u);
        const float inverse = __uint_as_float((254 + kFraction - exponent) << 23);
        const float scale = __uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - kFraction) << 23);
        unsigned numbers[kColumns], above[kColumns];  // above = number + 128: its second byte is `high`
        int sum = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            numbers[i] = __float_as_uint(fmaf(values[i], inverse, kRounding));
            above[i] = numbers[i] + 128;
            sum += static_cast<int>(numbers[i] - __float_as_uint(kRounding));
        }
#pragma unroll
        for (int other = kLanes / 2; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (!exists) return;
        char* const to = XRow::first() + row * form.bytes;
        *reinterpret_cast<uint2*>(to + column) = make_uint2(bytes_of<1>(above), bytes_of<1>(above + 4));
        *reinterpret_cast<uint2*>(to + form.pitch + column) =
            make_uint2(bytes_of<0>(numbers), bytes_of<0>(numbers + 4));
        if (column % GROUP == 0)
            reinterpret_cast<float2*>(to + 2 * form.pitch)[column / GROUP] =
                make_float2(scale, scale * static_cast<float>(sum));
    }
};

struct GroupScaled : PackedGroups {
    // A thread loads one of the 8 rows of an operand (`high` or `low` of a row of x), and has the results of one of 4
    // rows of x. Rows after the last one read the last one; their results are not stored.
    struct Inputs {
        const char* bytes[ROW_TILES];
        const float2* groups[ROW_TILES];
        int row_bytes;

        __device__ __forceinline__ void move(int rows, long long) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                bytes[tile] += rows * row_bytes;
                groups[tile] = reinterpret_cast<const float2*>(
                    reinterpret_cast<const char*>(groups[tile]) + rows * row_bytes
                );
            }
        }
    };
    typedef Inputs X;  // of a step

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int, int lane) const {
        const XRow form(steps);
        const int last = static_cast<int>(shape.rows) - 1;
        Inputs found;
        found.row_bytes = form.bytes;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const char* const operand = XRow::first() + min(4 * tile + lane / 8, last) * form.bytes;
            const char* const result = XRow::first() + min(4 * tile + lane % 4, last) * form.bytes;
            found.bytes[tile] = operand + lane / 4 % 2 * form.pitch + lane % 4 * 4 * kLoad;
            found.groups[tile] = reinterpret_cast<const float2*>(result + 2 * form.pitch);
        }
        return found;
    }

    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int pair, int) const {
        x = inputs;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            x.bytes[tile] += 2 * pair * GROUP;
            x.groups[tile] += 2 * pair;
        }
    }

    // Group 0 is in the low halves of the bytes, group 1 in the high halves.
    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& x, int lane) const {
        int parts[2][OUTPUT_TILES][ROW_TILES][4] = {};
#pragma unroll
        for (int word = 0; word < kWords; word += kLoad) {
            Words columns[2][ROW_TILES];
#pragma unroll
            for (int group = 0; group < 2; ++group)
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row)
                    columns[group][row] = load_words(x.bytes[row] + group * GROUP + word * 16);
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                const char* own = stage + lane * 4 * kLoad + (tile * 2 * kWords + word) * 32 * 4;
                const Words lower = load_words(own), upper = load_words(own + kWords * 32 * 4);
#pragma unroll
                for (int pair = 0; pair < kLoad; pair += 2)
#pragma unroll
                    for (int group = 0; group < 2; ++group) {
                        const auto values = [&](unsigned bytes) { return bytes >> 4 * group & 0x0f0f0f0fu; };
                        const unsigned a[4] = {
                            values(lower.words[pair]), values(upper.words[pair]),
                            values(lower.words[pair + 1]), values(upper.words[pair + 1])
                        };
#pragma unroll
                        for (int row = 0; row < ROW_TILES; ++row) {
                            const Words& own_x = columns[group][row];
                            multiply_bytes(parts[group][tile][row], a, own_x.words[pair], own_x.words[pair + 1]);
                        }
                    }
            }
        }
        const Bits* own = reinterpret_cast<const Bits*>(stage + kWeightBytes) + lane / 4;
#pragma unroll
        for (int group = 0; group < 2; ++group)
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row) {
                const float2 scale_and_sum = x.groups[row][group];
#pragma unroll
                for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int(&two)[4] = parts[group][tile][row];
                        const float product = static_cast<float>(256 * two[2 * half] + two[2 * half + 1]);
                        const Bits* of_group = own + (tile * 8 + group * 2 + half) * 8;
                        const float zero = to_float(of_group[4 * 8]);
                        sums[tile][row][half] += to_float(*of_group)
                            * (product * scale_and_sum.x - zero * scale_and_sum.y);
                    }
            }
    }
};

// All threads of a block convert `rows` rows of x and write them to shared memory.
__device__ __forceinline__ void prepare(const GroupScaled& weights, const Shape& shape, int rows) {
    constexpr int kAtOnce = 4, kThreads = 32 * WARPS;  // chunks that a thread loads before it uses the first
    const XRow form(weights.steps);
    const Divisor per_row(form.groups * GROUP / Chunk::kColumns);
    const int total = rows * per_row.value, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = threadIdx.x - lane; first < total; first += kAtOnce * kThreads) {
        Chunk chunks[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int number = first + i * kThreads;  // of the warp's first chunk
            if (number < total) chunks[i].load(shape, per_row, min(number + lane, total - 1));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int number = first + i * kThreads;
            if (number < total) chunks[i].store(form, number + lane < total);
        }
    }
    __syncthreads();
}

}  // namespace
