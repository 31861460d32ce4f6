// Keeps the weights of the best tokens, as few as reach a given mass, and sets all others to 0: see keep_top_p.py.
//
// One thread block processes one row. The token at which the mass is reached is found digit by digit: a histogram of
// weights gives its bin, and the next histogram has only the tokens of that bin. The first digit divides the range of
// the logits evenly. The upper bits of the logits would not: hundreds of threads would add to the same few bins. The
// other digits are the bits of the logit (11, 11 and 10), so that the result is exact. Of tokens with equal logits, the
// lower ids are kept.

namespace {

typedef unsigned long long Mass;

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr unsigned kAll = 0xffffffffu;
static_assert(kThreads == 1024, "2048 bins, two per thread; 32 warps, one per lane");

struct Shared {
    Mass histogram[kBins];
    Mass warp_sums[kWarps];
    float warp_least[kWarps], warp_most[kWarps];
    Mass before;        // mass of all tokens that are better than those of the bin
    Mass equal_weight;  // weight of a token at which the mass is reached
    unsigned equal;     // number of such tokens
    int bin;
};

// A better logit has a smaller key; 0 and -0 have the same key.
__device__ unsigned key_of(float logit) {
    const int bits = __float_as_int(logit + 0.0f);
    return ~static_cast<unsigned>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u)));
}

// The first digit, which divides the range evenly: 0 for the best logit. It is monotonic in spite of rounding.
__device__ int even_bin(float logit, float best, float scale) {
    return min(static_cast<int>((best - logit) * scale), kBins - 1);
}

// Exclusive prefix sum over the threads of the block.
template <typename T>
__device__ T sum_before(T mine, T* warp_sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = __shfl_up_sync(kAll, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    T of_warps = warp_sums[lane];
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = __shfl_up_sync(kAll, of_warps, distance);
        if (lane >= distance) of_warps += other;
    }
    const T before = __shfl_sync(kAll, of_warps, warp > 0 ? warp - 1 : 0);
    __syncthreads();  // before the next call writes warp_sums
    return (warp > 0 ? before : 0) + sum - mine;
}

// The largest and the smallest logit among tokens with a weight.
__device__ void find_range(const float* logits, const Mass* weights, int n, Shared& shared, float& best, float& least) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    best = -3.4e38f;
    least = 3.4e38f;
    for (int i = threadIdx.x; i < n; i += kThreads) {
        if (weights[i] == 0) continue;
        best = fmaxf(best, logits[i]);
        least = fminf(least, logits[i]);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        best = fmaxf(best, __shfl_xor_sync(kAll, best, distance));
        least = fminf(least, __shfl_xor_sync(kAll, least, distance));
    }
    if (lane == 0) {
        shared.warp_most[warp] = best;
        shared.warp_least[warp] = least;
    }
    __syncthreads();
    best = shared.warp_most[lane];
    least = shared.warp_least[lane];
    for (int distance = 16; distance > 0; distance /= 2) {
        best = fmaxf(best, __shfl_xor_sync(kAll, best, distance));
        least = fminf(least, __shfl_xor_sync(kAll, least, distance));
    }
}

}  // namespace

// logits [rows, logits_stride], weights [rows, weights_stride], needed [rows]: above 0, at most a row's sum of weights.
extern "C" __global__ void __launch_bounds__(kThreads)
keep_top_p(const float* logits, long long logits_stride, Mass* weights, long long weights_stride, const Mass* needed,
           long long vocabulary) {
    __shared__ Shared shared;
    const int thread = threadIdx.x, n = static_cast<int>(vocabulary);
    logits += blockIdx.x * logits_stride;
    weights += blockIdx.x * weights_stride;
    const Mass wanted = needed[blockIdx.x];

    float best, least;
    find_range(logits, weights, n, shared, best, least);
    const float scale = best > least ? kBins / (best - least) : 0.0f;

    int even = 0;
    unsigned known = 0, known_bits = 0;
    Mass before = 0;
    for (int digit = 0; digit < 4; ++digit) {
        const int shift = digit == 1 ? 21 : digit == 2 ? 10 : 0;
        const unsigned mask = digit == 3 ? 1023 : 2047;
        for (int bin = thread; bin < kBins; bin += kThreads) shared.histogram[bin] = 0;
        if (thread == 0) {
            shared.bin = -1;
            shared.equal = 0;
        }
        __syncthreads();
        for (int i = thread; i < n; i += kThreads) {
            const float logit = logits[i];
            const int own = even_bin(logit, best, scale);
            if (digit == 0) {
                if (weights[i] != 0) atomicAdd(&shared.histogram[max(own, 0)], weights[i]);
            } else if (own == even) {
                const unsigned key = key_of(logit);
                if ((key & known_bits) == known) atomicAdd(&shared.histogram[key >> shift & mask], weights[i]);
            }
        }
        __syncthreads();
        const Mass better = shared.histogram[2 * thread], worse = shared.histogram[2 * thread + 1];
        const Mass until = before + sum_before(better + worse, shared.warp_sums);
        if (until < wanted && wanted <= until + better + worse) {
            const bool in_better = wanted <= until + better;
            shared.bin = 2 * thread + !in_better;
            shared.before = until + (in_better ? 0 : better);
        }
        __syncthreads();
        if (shared.bin < 0) return;  // logits are NaN
        before = shared.before;
        if (digit == 0) {
            even = shared.bin;
        } else {
            known |= static_cast<unsigned>(shared.bin) << shift;
            known_bits |= mask << shift;
        }
        __syncthreads();
    }

    // tokens with keys above `known` are dropped; those with this key all have the same weight
    unsigned equal = 0;
    for (int i = thread; i < n; i += kThreads) {
        const unsigned key = key_of(logits[i]);
        if (key > known) {
            weights[i] = 0;
        } else if (key == known) {
            shared.equal_weight = weights[i];
            ++equal;
        }
    }
    if (equal) atomicAdd(&shared.equal, equal);
    __syncthreads();
    const Mass weight = shared.equal_weight;
    const Mass kept = (wanted - before + weight - 1) / weight;
    if (kept >= shared.equal) return;

    // in the order of ids: a thread has adjacent tokens here
    const int share = (n + kThreads - 1) / kThreads, first = min(n, thread * share), last = min(n, first + share);
    unsigned mine = 0;
    for (int i = first; i < last; ++i) mine += key_of(logits[i]) == known;
    unsigned index = sum_before(mine, reinterpret_cast<unsigned*>(shared.warp_sums));
    for (int i = first; i < last; ++i) {
        if (key_of(logits[i]) == known && index++ >= kept) weights[i] = 0;
    }
}
