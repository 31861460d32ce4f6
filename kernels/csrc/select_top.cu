// The k largest of each row of scores, by position: the second half of index_topk.py.
//
// One block has one row. Floats are mapped to unsigned integers of the same order, and the k-th largest is found byte by
// byte from the top: a histogram of the keys that share the bytes known so far says which byte comes next. A last pass
// writes the positions of the larger keys, and of as many equal ones as are needed, in order. The row is read up to five
// times, from the L2 cache, where it was written just before.
//
// Scores are alike, so most of them fall into a few bins of the first byte. Every lane has its own column of the
// histogram, in a memory bank of its own, and no two lanes of a warp wait for each other.

namespace {

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == 32, "a warp adds up what the warps have");
constexpr int kBins = 256;
constexpr int kQuads = 4;  // float4 that a thread loads at a time
constexpr unsigned kAll = 0xffffffffu;

// Larger scores have larger keys; 0 and -0 have the same.
__device__ unsigned key_of(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Keys {
    unsigned key[4];
};

__device__ Keys load_keys(const float4* quads, int quad, int num_quads) {
    const float4 four = quad < num_quads ? quads[quad] : float4{};
    return {{key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w)}};
}

// What the threads before this one have, added up; the sum of all goes to `total`. Ends with a barrier before the next
// call may start.
__device__ unsigned sum_before(unsigned mine, unsigned* warp_sums, unsigned& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(kAll, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    unsigned of_warps = warp_sums[lane];  // every warp adds up all warps: one barrier less than if one did
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(kAll, of_warps, distance);
        if (lane >= distance) of_warps += other;
    }
    total = __shfl_sync(kAll, of_warps, kWarps - 1);
    const unsigned before = warp ? __shfl_sync(kAll, of_warps, warp - 1) : 0;
    __syncthreads();
    return before + sum - mine;
}

}  // namespace

// scores [rows, stride], each row 16-byte aligned; visible [rows]; out [rows, k]. A block of THREADS per row.
extern "C" __global__ void __launch_bounds__(kThreads)
select_top(const float* scores, long long stride, const int* visible, long long k, int* out) {
    __shared__ unsigned histogram[kBins][32];
    __shared__ unsigned bins[kBins];
    __shared__ unsigned warp_sums[kWarps];
    __shared__ unsigned found_bin, found_needed, found_count;

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int n = visible[blockIdx.x];
    out += blockIdx.x * k;
    if (n <= k) {
        for (int i = thread; i < k; i += kThreads) out[i] = i < n ? i : -1;
        return;
    }
    scores += blockIdx.x * stride;
    const float4* quads = reinterpret_cast<const float4*>(scores);
    const int num_quads = (n + 3) / 4;

    unsigned known = 0;       // the bytes of the k-th largest key that are known, zeros below them
    unsigned needed = static_cast<unsigned>(k);  // its rank among the keys that share them
    bool all_equal = false;   // whether all keys that share them are among the k largest
    for (int shift = 24; shift >= 0 && !all_equal; shift -= 8) {
        for (int i = thread; i < kBins * 32; i += kThreads) histogram[i / 32][i % 32] = 0;
        __syncthreads();
        for (int start = thread; start < num_quads; start += kQuads * kThreads) {
            Keys keys[kQuads];
#pragma unroll
            for (int q = 0; q < kQuads; ++q) keys[q] = load_keys(quads, start + q * kThreads, num_quads);
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned key = keys[q].key[i];
                    const bool shares = shift == 24 || (key ^ known) >> (shift + 8) == 0;
                    const bool exists = (start + q * kThreads) * 4 + i < n;
                    if (shares && exists) atomicAdd(&histogram[key >> shift & 0xff][lane], 1u);
                }
            }
        }
        __syncthreads();
        for (int bin = warp; bin < kBins; bin += kWarps) {
            const unsigned sum = __reduce_add_sync(kAll, histogram[bin][lane]);
            if (lane == 0) bins[bin] = sum;
        }
        __syncthreads();
        const unsigned count = thread < kBins ? bins[kBins - 1 - thread] : 0;  // from the largest down
        unsigned total;
        const unsigned before = sum_before(count, warp_sums, total);
        if (before < needed && needed <= before + count) {
            found_bin = kBins - 1 - thread;
            found_needed = needed - before;
            found_count = count;
        }
        __syncthreads();
        known |= found_bin << shift;
        needed = found_needed;
        all_equal = found_count == needed;
        __syncthreads();
    }

    // chosen are keys above `limit`, and the first `needed` that are equal to it
    const unsigned limit = all_equal ? known - 1 : known;
    if (all_equal) needed = 0;
    unsigned larger_before = 0, equal_before = 0;  // in what has been written
    for (int start = 0; start < num_quads; start += kQuads * kThreads) {
        if (larger_before + min(equal_before, needed) == k) break;
        const int mine = start + thread * kQuads;  // a thread has neighbours here, so that threads are in order
        Keys keys[kQuads];
        unsigned counts = 0;  // of equal keys in the upper half, of larger ones in the lower: at most 16,384 each
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
            keys[q] = load_keys(quads, mine + q, num_quads);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned key = keys[q].key[i];
                if ((mine + q) * 4 + i < n) counts += key > limit ? 1 : key == limit ? 0x10000 : 0;
            }
        }
        unsigned total;
        const unsigned before = sum_before(counts, warp_sums, total);
        unsigned larger = larger_before + (before & 0xffff), equal = equal_before + (before >> 16);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int position = (mine + q) * 4 + i;
                const bool is_larger = position < n && keys[q].key[i] > limit;
                const bool is_equal = position < n && keys[q].key[i] == limit;
                if (is_larger || (is_equal && equal < needed)) out[larger + min(equal, needed)] = position;
                larger += is_larger;
                equal += is_equal;
            }
        }
        larger_before += total & 0xffff;
        equal_before += total >> 16;
    }
}
