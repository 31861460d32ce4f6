// Collectives between processes through memory that all of them have mapped (CUDA IPC); see
// kernels/collectives/ipc_collectives.py. The processes may be on one GPU or on several with peer access.
//
// Memory of a rank: flags [MAX_BLOCKS][RANKS], then two halves of HALF_BYTES. Call n writes the data for the other
// ranks into half n % 2, and then waits at a barrier between the ranks (`meet`). When a rank has passed the barrier of
// call n + 1, all ranks have ended call n, because the calls of a rank run one after another. So call n + 2 may
// overwrite the half of call n.
//
// The barrier is between the thread blocks of the same index on all ranks, and a block reads only what blocks of its
// index have written. The number of a call is in `calls`, one counter per block in the rank's own memory, so that a
// CUDA graph can replay a call. Every launch sets all counters, even if it has fewer blocks.
//
// Constants: RANKS, RANK, MAX_BLOCKS, HALF_BYTES, THREADS; all_reduce: ELEMENT (0 bfloat16, 1 float16, 2 float32) and
// TWO_SHOT; gather_shares: UNIT_BYTES.

#include "overlap.cuh"

namespace {

typedef unsigned long long Flag;

constexpr long long kFlagBytes = MAX_BLOCKS * RANKS * sizeof(Flag);
static_assert(kFlagBytes % 16 == 0 && HALF_BYTES % 16 == 0, "vectors of 16 bytes are aligned");
static_assert(RANKS <= THREADS && MAX_BLOCKS <= THREADS, "a thread per flag and per counter");

// State in a rank's own memory.
struct State {
    Flag calls[MAX_BLOCKS];
    Flag timeout_ns;
    Flag failed;  // a wait has timed out: other waits of this rank give up at once
};

__device__ void store_release(Flag* flag, Flag value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ Flag load_acquire(const Flag* flag) {
    Flag value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ Flag now_ns() {
    Flag time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Waits until `flag` has reached `value`. Returns false after a timeout; then `report` (host memory) has 1 + peer and
// the number of the call.
__device__ bool wait_for(const Flag* flag, Flag value, int peer, State* state, Flag* report) {
    if (load_acquire(flag) >= value) return true;
    const Flag started = now_ns(), timeout = state->timeout_ns;
    volatile Flag* failed = &state->failed;
    while (load_acquire(flag) < value) {
        if (*failed != 0) return false;
        if (now_ns() - started > timeout) {
            *failed = 1;
            report[1] = value / 2;
            __threadfence_system();
            *static_cast<volatile Flag*>(report) = 1 + peer;
            return false;
        }
        __nanosleep(40);  // leaves the memory system to others
    }
    return true;
}

// Barrier between the blocks of this index on all ranks: afterwards, each of them sees what the others wrote before.
// Returns false if a rank has not arrived in time: its memory may be gone.
__device__ bool meet(char* const* memory, Flag value, State* state, Flag* report) {
    __syncthreads();
    const int peer = threadIdx.x;
    bool arrived = true;
    if (peer < RANKS) {
        const long long row = blockIdx.x * RANKS;
        store_release(reinterpret_cast<Flag*>(memory[peer]) + row + RANK, value);
        arrived = wait_for(reinterpret_cast<Flag*>(memory[RANK]) + row + peer, value, peer, state, report);
    }
    return __syncthreads_and(arrived);
}

__device__ char* half(char* const* memory, int rank, Flag call) {
    return memory[rank] + kFlagBytes + (call & 1) * HALF_BYTES;
}

// Counts the call for this block. All its threads have read the counter before, because they have passed the barrier.
__device__ void count(State* state, Flag call) {
    if (threadIdx.x < MAX_BLOCKS && threadIdx.x % gridDim.x == blockIdx.x) state->calls[threadIdx.x] = call;
}

}  // namespace

#ifdef ELEMENT

namespace {

constexpr int kElementBytes = ELEMENT == 2 ? 4 : 2;
constexpr int kElements = 16 / kElementBytes;  // of a vector

union Vector {
    uint4 words;
    unsigned short shorts[8];
    float floats[4];
};

__device__ float element(const Vector& vector, int at) {
#if ELEMENT == 0
    return __uint_as_float(static_cast<unsigned>(vector.shorts[at]) << 16);
#elif ELEMENT == 1
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(vector.shorts[at]));
    return value;
#else
    return vector.floats[at];
#endif
}

__device__ void set_element(Vector& vector, int at, float value) {
#if ELEMENT == 0
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(vector.shorts[at]) : "f"(value));
#elif ELEMENT == 1
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(vector.shorts[at]) : "f"(value));
#else
    vector.floats[at] = value;
#endif
}

// Vector `at` of a tensor of `bytes` bytes, which may end inside it; the rest of it is 0.
__device__ Vector read(const char* tensor, long long at, long long bytes) {
    Vector vector;
    const long long start = at * 16;
    if (start + 16 <= bytes) {
        vector.words = *reinterpret_cast<const uint4*>(tensor + start);
    } else {
        vector.words = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int index = 0; index < 8; ++index)
            if (start + 2 * index < bytes)
                vector.shorts[index] = *reinterpret_cast<const unsigned short*>(tensor + start + 2 * index);
    }
    return vector;
}

__device__ void write(char* tensor, long long at, long long bytes, const Vector& vector) {
    const long long start = at * 16;
    if (start + 16 <= bytes) {
        *reinterpret_cast<uint4*>(tensor + start) = vector.words;
    } else {
#pragma unroll
        for (int index = 0; index < 8; ++index)
            if (start + 2 * index < bytes)
                *reinterpret_cast<unsigned short*>(tensor + start + 2 * index) = vector.shorts[index];
    }
}

struct Sum {
    float values[kElements];

    __device__ void add(const Vector& vector, bool first) {
#pragma unroll
        for (int at = 0; at < kElements; ++at)
            values[at] = first ? element(vector, at) : values[at] + element(vector, at);
    }

    __device__ Vector rounded() const {
        Vector vector;
#pragma unroll
        for (int at = 0; at < kElements; ++at) set_element(vector, at, values[at]);
        return vector;
    }
};

}  // namespace

// tensor = the sum of the ranks' tensors, added in float32 in the order of the ranks and rounded once, in place.
//
// One shot: each rank writes its tensor and reads those of all others. Two shots: each rank sums one share of the
// tensors, writes the result over its own part of that share, and reads the other shares' results.
extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce(char* tensor, long long bytes, char* const* memory, char* state_memory, char* report_memory) {
    start_next();
    wait_for_previous();
    State* state = reinterpret_cast<State*>(state_memory);
    Flag* report = reinterpret_cast<Flag*>(report_memory);
    const Flag call = state->calls[blockIdx.x] + 1;
    const long long vectors = (bytes + 15) / 16;
    const long long first = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    const long long step = gridDim.x * static_cast<long long>(THREADS);
    uint4* own = reinterpret_cast<uint4*>(half(memory, RANK, call));
    const uint4* theirs[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) theirs[rank] = reinterpret_cast<const uint4*>(half(memory, rank, call));

#if TWO_SHOT
    const long long share = (vectors + RANKS - 1) / RANKS;
    for (int rank = 0; rank < RANKS; ++rank) {
        if (rank == RANK) continue;
        for (long long at = rank * share + first; at < min((rank + 1) * share, vectors); at += step)
            own[at] = read(tensor, at, bytes).words;
    }
    const bool met = meet(memory, 2 * call, state, report);
    count(state, call);
    if (!met) return;
    for (long long at = RANK * share + first; at < min((RANK + 1) * share, vectors); at += step) {
        Sum sum;
        Vector parts[RANKS];
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            if (rank == RANK) parts[rank] = read(tensor, at, bytes);
            else parts[rank].words = theirs[rank][at];
        }
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) sum.add(parts[rank], rank == 0);
        const Vector result = sum.rounded();
        own[at] = result.words;
        write(tensor, at, bytes, result);
    }
    if (!meet(memory, 2 * call + 1, state, report)) return;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        if (rank == RANK) continue;
        for (long long at = rank * share + first; at < min((rank + 1) * share, vectors); at += step) {
            Vector result;
            result.words = theirs[rank][at];
            write(tensor, at, bytes, result);
        }
    }
#else
    for (long long at = first; at < vectors; at += step) own[at] = read(tensor, at, bytes).words;
    const bool met = meet(memory, 2 * call, state, report);
    count(state, call);
    if (!met) return;
    for (long long at = first; at < vectors; at += step) {
        Sum sum;
        Vector parts[RANKS];
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) parts[rank].words = theirs[rank][at];
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) sum.add(parts[rank], rank == 0);
        write(tensor, at, bytes, sum.rounded());
    }
#endif
}

#endif

#ifdef UNIT_BYTES

namespace {

template <int kBytes> struct UnitOf;
template <> struct UnitOf<16> { typedef uint4 Type; };
template <> struct UnitOf<8> { typedef uint2 Type; };
template <> struct UnitOf<4> { typedef unsigned Type; };
template <> struct UnitOf<2> { typedef unsigned short Type; };
template <> struct UnitOf<1> { typedef unsigned char Type; };
typedef UnitOf<UNIT_BYTES>::Type Unit;

}  // namespace

// Every rank gives a share of `rows` rows of `row_units` units. This rank gets those of the ranks [first_rank,
// end_rank), side by side in rows of `out` that are `out_row_units` apart. All ranks meet, also those that get nothing.
extern "C" __global__ void __launch_bounds__(THREADS)
gather_shares(const char* share, long long rows, long long row_units, char* out, long long out_row_units,
              long long first_rank, long long end_rank, char* const* memory, char* state_memory,
              char* report_memory) {
    start_next();
    wait_for_previous();
    State* state = reinterpret_cast<State*>(state_memory);
    const Flag call = state->calls[blockIdx.x] + 1;
    const long long units = rows * row_units;
    const long long first = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    const long long step = gridDim.x * static_cast<long long>(THREADS);
    Unit* own = reinterpret_cast<Unit*>(half(memory, RANK, call));
    for (long long at = first; at < units; at += step) own[at] = reinterpret_cast<const Unit*>(share)[at];
    const bool met = meet(memory, 2 * call, state, reinterpret_cast<Flag*>(report_memory));
    count(state, call);
    if (!met) return;
    for (long long rank = first_rank; rank < end_rank; ++rank) {
        const Unit* theirs = reinterpret_cast<const Unit*>(half(memory, rank, call));
        Unit* to = reinterpret_cast<Unit*>(out) + (rank - first_rank) * row_units;
        for (long long at = first; at < units; at += step)
            to[at / row_units * out_row_units + at % row_units] = theirs[at];
    }
}

#endif
