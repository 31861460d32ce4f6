// Linear layers with weights in 16 bits and very few rows of x, for Hopper: see linear/linear.py.
//
// A unit is 8 weight rows, divided into chunks of COLUMNS columns; the warps of a thread block divide the chunks. A
// block processes units one after another. Each warp prefetches chunks, also those of later units, into its ring in
// shared memory. It needs one bulk copy per row of a chunk, so few instructions per byte. Weights are copied before the
// previous kernel has ended, x is read after it; a warp copies the columns of x that it needs to shared memory as well.
// At the end of a unit the sums of the warps are added in a fixed order.
//
// A product (one mma instruction) multiplies both halves of a chunk. Rows 0 to 7 of its first operand are 16 columns of
// the 8 weight rows from the first half of the chunk; rows 8 to 15 are 16 columns of the same weight rows from the
// second half. Its second operand has the same columns of both halves for up to 4 rows of x. Of the 16 x 8 results a
// thread has four: one for each half, which it adds, and two of weights and x from different halves, which it ignores.
//
// Constants: WARPS; SLOTS of a ring; COLUMNS, a multiple of 64; GATED, 1 if even rows of a unit belong to the gate and
// odd rows to up; BIAS, 1 if there is one; HALF, 1 for float16, 0 for bfloat16.

#include "hopper.cuh"
#include "linear/mma.cuh"
#include "warps.cuh"

namespace {

constexpr int kUnitRows = 8, kOutputs = GATED ? 4 : 8;  // of a unit
constexpr int kSteps = COLUMNS / 32;                    // products of a chunk
constexpr int kRowBytes = 2 * COLUMNS, kHalfBytes = COLUMNS;
constexpr int kPad = 16;  // bytes after a row in shared memory, so that 8 adjacent rows are in different banks
constexpr int kPitch = kRowBytes + kPad, kHalfPitch = kHalfBytes + kPad;
static_assert(COLUMNS % 64 == 0, "x of two products is loaded at a time");

struct __align__(128) Shared {
    char slots[WARPS][SLOTS][kUnitRows * kPitch];
    float sums[2][WARPS][32];
    unsigned long long filled[WARPS][SLOTS];

    // x follows in shared memory, in halves of chunks.
    __device__ __forceinline__ char* x() { return reinterpret_cast<char*>(this + 1); }
};

struct Layer {
    const Bits *weights, *bias;
    Bits* out;
    long long out_size;
    int rows, units, chunks;  // rows of x; units of all weights; chunks of a unit

    __device__ __forceinline__ long long output(int unit, int weight_row) const {
        return static_cast<long long>(unit) * kOutputs + (GATED ? weight_row / 2 : weight_row);
    }

    // The address of a chunk of a weight row. Rows after the last one read the last one; their results are not stored.
    __device__ __forceinline__ const char* source(int unit, int weight_row, int chunk) const {
        const long long of_gate = min(output(unit, weight_row), out_size - 1);
        const long long row = GATED && weight_row % 2 ? out_size + of_gate : of_gate;
        return reinterpret_cast<const char*>(weights) + (row * chunks + chunk) * kRowBytes;
    }

    // Stores the sum of a weight row and a row of x; `next` is the sum of the next weight row, with a gate that of up.
    __device__ __forceinline__ void store(int unit, int weight_row, int row, float sum, float next) const {
        const long long place = output(unit, weight_row);
        if (place >= out_size || (GATED && weight_row % 2)) return;
        if (BIAS) {
            sum += to_float(bias[place]);
            if (GATED) next += to_float(bias[out_size + place]);
        }
        out[row * out_size + place] = to_bits(GATED ? swiglu(sum, next) : sum);
    }
};

// A chunk of this warp and its slot in the ring; `turn` is how often the slot was used before.
struct Position {
    int unit = blockIdx.x, chunk = warp(), slot = 0, turn = 0;

    __device__ __forceinline__ void advance(const Layer& layer) {
        if (++slot == SLOTS) {
            slot = 0;
            ++turn;
        }
        chunk += WARPS;
        if (chunk < layer.chunks) return;
        chunk = warp();
        unit += gridDim.x;
    }
};

__device__ __forceinline__ void copy_chunk(Shared& shared, const Layer& layer, Position& next) {
    if (next.unit >= layer.units) return;
    if (lane() < kUnitRows) {
        const unsigned barrier = shared_address(&shared.filled[warp()][next.slot]);
        expect_bytes(barrier, kRowBytes);
        copy_bulk_async(
            shared_address(shared.slots[warp()][next.slot]) + lane() * kPitch,
            layer.source(next.unit, lane(), next.chunk), kRowBytes, barrier, read_once()
        );
    }
    next.advance(layer);
}

// Copies the columns of x that this warp multiplies.
__device__ __forceinline__ void copy_x(Shared& shared, const Layer& layer, const Bits* x) {
    constexpr int kPieces = COLUMNS / 8, kAtOnce = 4;  // pieces of 16 bytes that a thread loads before it stores
#pragma unroll 1
    for (int row = 0; row < layer.rows; ++row)
#pragma unroll 1
        for (int first = warp(); first < layer.chunks; first += kAtOnce / 2 * WARPS) {
            uint4 loaded[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int chunk = first + i / 2 * WARPS, piece = i % 2 * 32 + lane();
                if (chunk < layer.chunks && piece < kPieces)
                    loaded[i] = reinterpret_cast<const uint4*>(x)[(row * layer.chunks + chunk) * kPieces + piece];
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int chunk = first + i / 2 * WARPS, piece = i % 2 * 32 + lane();
                const int half = (row * layer.chunks + chunk) * 2 + piece / (kPieces / 2);
                if (chunk < layer.chunks && piece < kPieces)
                    *reinterpret_cast<uint4*>(shared.x() + half * kHalfPitch + piece % (kPieces / 2) * 16) = loaded[i];
            }
        }
    __syncwarp();
}

// The x of a chunk, as operands of products.
struct Columns {
    unsigned words[kSteps / 2][4];

    // Lane l has the address of line l % 8 of matrix l / 8. The lines of a matrix are 8 columns from each half of 4
    // rows of x; the next matrix has the next 8 columns.
    __device__ __forceinline__ void load(Shared& shared, const Layer& layer, int chunk) {
        const int row = min(lane() % 8 / 2, layer.rows - 1);  // rows after the last read the last
        const int half = (row * layer.chunks + chunk) * 2 + lane() % 2;
        const unsigned from = shared_address(shared.x()) + half * kHalfPitch + lane() / 8 * 16;
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) load_matrices(words[pair], from + pair * 64);
    }

    // The sum of weight row lane / 4 and row lane % 4 of x.
    __device__ __forceinline__ float multiply_chunk(const char* slot) const {
        // four matrices: 8 columns of 8 rows from the first half of the chunk, 8 from the second, the next 8 of both
        const int own = lane() % 8 * kPitch + lane() / 8 % 2 * kHalfBytes + lane() / 16 * 16;
        unsigned weights[kSteps][4];
        float parts[4][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_matrices(weights[step], shared_address(slot) + own + step * 32);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const unsigned* const x = &words[step / 2][step % 2 * 2];
            multiply(parts[step % 4], weights[step], x[0], x[1]);
        }
        const auto sum_of = [&](int i) { return parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i]; };
        return sum_of(0) + sum_of(3);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) gemv(
    const Bits* x, const Bits* weights, const Bits* bias, Bits* out, long long rows, long long out_size,
    long long in_size
) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    start_next();
    const int units = static_cast<int>((out_size + kOutputs - 1) / kOutputs);
    const Layer layer = {
        weights, bias, out, out_size, static_cast<int>(rows), units, static_cast<int>(in_size / COLUMNS)
    };
    if (lane() == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) init_barrier(shared_address(&shared.filled[warp()][slot]), kUnitRows);
        fence_barriers();
    }
    __syncwarp();
    Position ahead, now;
    // Copies one chunk at a time until the ring is full: more copies in flight would not arrive earlier, and small
    // loads of this kernel and of the previous one would wait behind them.
    copy_chunk(shared, layer, ahead);
#pragma unroll 1
    for (int slot = 1; slot < SLOTS && ahead.unit < units; ++slot) {
        wait_phase(shared_address(&shared.filled[warp()][slot - 1]), 0);
        copy_chunk(shared, layer, ahead);
    }
    wait_for_previous();
    copy_x(shared, layer, x);

    Columns columns;
    int loaded = -1, buffer = 0, storing = 0;  // the chunk of x in registers; the buffer of sums; the warp that stores
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        float total = 0.0f;
#pragma unroll 1
        do {
            if (now.chunk != loaded) columns.load(shared, layer, loaded = now.chunk);
            wait_phase(shared_address(&shared.filled[warp()][now.slot]), now.turn);
            total += columns.multiply_chunk(shared.slots[warp()][now.slot]);
            __syncwarp();  // before the slot is filled again
            copy_chunk(shared, layer, ahead);
            now.advance(layer);
        } while (now.unit == unit);
        shared.sums[buffer][warp()][lane()] = total;
        __syncthreads();
        if (warp() == storing && lane() % 4 < layer.rows) {
            float sum = 0.0f, next = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                sum += shared.sums[buffer][other][lane()];
                next += shared.sums[buffer][other][lane() ^ 4];
            }
            layer.store(unit, lane() / 4, lane() % 4, sum, next);
        }
        buffer ^= 1;  // the other buffer was read before the __syncthreads above
        storing = storing + 1 == WARPS ? 0 : storing + 1;
    }
}
