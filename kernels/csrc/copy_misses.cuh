// The copying half of swap-in: warps of many blocks take the misses of all batch rows in turn. Constants: ROW_BYTES,
// PAGE_SIZE, TOP_K.

#include "copy_row.cuh"

// One layer of both pools.
struct Pools {
    const char* host;
    long long host_page_stride, host_token_stride;
    char* hot;
    long long hot_page_stride, hot_token_stride;

    __device__ const char* source(int row) const {
        return host + row / PAGE_SIZE * host_page_stride + row % PAGE_SIZE * host_token_stride;
    }
    __device__ char* destination(int row) const {
        return hot + row / PAGE_SIZE * hot_page_stride + row % PAGE_SIZE * hot_token_stride;
    }
};

__device__ __forceinline__ unsigned inclusive_warp_scan(unsigned value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned lower = __shfl_up_sync(~0u, value, distance);
        if (threadIdx.x % 32 >= distance) value += lower;
    }
    return value;
}

// Copy all but the first `skipped` misses of each batch row, shared among `blocks` blocks of which this is `block`.
// `count_of(t)` is called once per batch row by one warp. `ends` has room for `batch` integers.
template <typename CountOf>
__device__ __forceinline__ void copy_misses_of_batch(const Pools& pools, const int* miss_sources, const int* miss_rows,
                                                     int batch, int skipped, int block, int blocks, int* ends,
                                                     CountOf count_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (warp == 0) {
        int before = 0;
        for (int first = 0; first < batch; first += 32) {
            const int left = first + lane < batch ? count_of(first + lane) - skipped : 0;
            const int sum = inclusive_warp_scan(left > 0 ? left : 0);
            if (first + lane < batch) ends[first + lane] = before + sum;  // of its misses, counted through the batch
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
    const int misses = ends[batch - 1];
    for (int miss = warp * blocks + block; miss < misses; miss += blocks * warps) {
        int low = 0, high = batch - 1;  // the first batch row that ends beyond this miss
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > miss)
                high = middle;
            else
                low = middle + 1;
        }
        const int index = miss - (low > 0 ? ends[low - 1] : 0) + skipped;
        const long long entry = static_cast<long long>(low) * TOP_K + index;
        copy_row(pools.destination(__ldcg(miss_rows + entry)), pools.source(__ldcg(miss_sources + entry)), lane);
    }
}
