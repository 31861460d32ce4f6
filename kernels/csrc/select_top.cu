// The k largest of each row of scores, by position: the second half of index_topk.py.
//
// One block has one row. Floats are mapped to unsigned integers of the same order, and the k-th largest is found digit
// by digit from the top (11, 11 and 10 bits): a histogram of the keys that share the digits known so far says which
// digit comes next. A last pass writes the positions of the larger keys, and of as many equal ones as are needed, in
// order. The row is read four times, from the L2 cache, where it was written just before.

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;  // two per thread
constexpr int kQuads = 4;    // float4 that a thread loads at a time
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

// scores [rows, stride], each row 16-byte aligned; visible [rows]; out [rows, k]. A block of 1024 threads per row.
extern "C" __global__ void __launch_bounds__(kThreads)
select_top(const float* scores, long long stride, const int* visible, long long k, int* out) {
    __shared__ unsigned histogram[kBins];
    __shared__ unsigned warp_sums[kWarps];
    __shared__ unsigned found_bin, found_needed, found_count;

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const int thread = threadIdx.x;
    const int n = visible[blockIdx.x];
    out += blockIdx.x * k;
    if (n <= k) {
        for (int i = thread; i < k; i += kThreads) out[i] = i < n ? i : -1;
        return;
    }
    scores += blockIdx.x * stride;
    const float4* quads = reinterpret_cast<const float4*>(scores);
    const int num_quads = (n + 3) / 4;

    unsigned known = 0;       // the digits of the k-th largest key that are known, zeros below them
    unsigned needed = static_cast<unsigned>(k);  // its rank among the keys that share them
    bool all_equal = false;   // whether all keys that share them are among the k largest
    int shift = 32;
    while (shift > 0 && !all_equal) {
        const int above = shift;
        shift = shift > 11 ? shift - 11 : 0;
        const unsigned mask = (1u << (above - shift)) - 1;
        for (int bin = thread; bin < kBins; bin += kThreads) histogram[bin] = 0;
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
                    const bool shares = above == 32 || (key ^ known) >> above == 0;
                    const bool exists = (start + q * kThreads) * 4 + i < n;
                    if (shares && exists) atomicAdd(&histogram[key >> shift & mask], 1u);
                }
            }
        }
        __syncthreads();
        // bins from the largest down, two per thread: [2 * thread, 2 * thread + 2)
        const unsigned first = histogram[kBins - 1 - 2 * thread], second = histogram[kBins - 2 - 2 * thread];
        unsigned total;
        const unsigned before = sum_before(first + second, warp_sums, total);
        if (before < needed && needed <= before + first + second) {
            const bool in_first = needed <= before + first;
            found_bin = kBins - 1 - 2 * thread - !in_first;
            found_needed = needed - before - (in_first ? 0 : first);
            found_count = in_first ? first : second;
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
