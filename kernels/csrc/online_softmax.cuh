// Online softmax of scores that come in blocks, in the layout of warpgroup products (hopper.cuh): a thread has two
// rows.
//
// A weight is exp2(score - reference). The largest score of a block becomes the reference only if it exceeds the old
// one by more than kGrowth (in powers of two), which is rare after the first blocks. Then earlier sums are scaled down.

constexpr float kLowest = -1e30f;  // below every score, but finite
constexpr float kGrowth = 8.0f;
constexpr unsigned kAll = 0xffffffffu;

// The state of a thread's two rows; N is the number of the thread's scores in a block, of both rows together.
template <int N>
struct Softmax {
    float reference[2] = {kLowest, kLowest};
    float sum[2] = {0.0f, 0.0f};  // of the weights of this thread

    // Replaces scores by weights. `shrink` gets the factors of earlier sums; returns whether a reference changed in
    // this warp.
    __device__ __forceinline__ bool weigh(float (&scores)[N], float scale, float (&shrink)[2]) {
        bool changes = false;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float most = max(scores[2 * row], scores[2 * row + 1]);
#pragma unroll
            for (int i = 4; i < N; i += 4) most = max(most, max(scores[i + 2 * row], scores[i + 2 * row + 1]));
            most = max(most, __shfl_xor_sync(kAll, most, 1));
            most = max(most, __shfl_xor_sync(kAll, most, 2)) * scale;
            const float old = reference[row];
            if (most > old + kGrowth) {
                reference[row] = most;
                changes = true;
            }
            shrink[row] = exp2_approximate(old - reference[row]);
            sum[row] *= shrink[row];
#pragma unroll
            for (int i = 2 * row; i < N; i += i % 2 ? 3 : 1) {
                scores[i] = exp2_approximate(fmaf(scores[i], scale, -reference[row]));
                sum[row] += scores[i];
            }
        }
        return __any_sync(kAll, changes);
    }
};
