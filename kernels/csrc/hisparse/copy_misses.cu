// Fetches the rows of a plan for one more layer; see kernels/hisparse/swap_in.py.
//
// Constants: ROW_BYTES, PAGE_SIZE, TOP_K, THREADS.

#include "hisparse/copy_misses.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
copy_misses(const int* miss_sources, const int* miss_rows, const int* miss_counts, int* counters, long long batch,
            const char* host, long long host_page_stride, long long host_token_stride, char* hot,
            long long hot_page_stride, long long hot_token_stride) {
    extern __shared__ int ends[];
    const Pools pools{host, host_page_stride, host_token_stride, hot, hot_page_stride, hot_token_stride};
    copy_misses_of_batch(pools, miss_sources, miss_rows, static_cast<int>(batch), blockIdx.x, gridDim.x, ends, counters,
                         [=](int row) { return miss_counts[row]; });
}
