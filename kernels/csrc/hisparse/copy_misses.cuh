// The copying half of swap-in: warps of many blocks copy the misses of all batch rows in turn. Constants: ROW_BYTES,
// PAGE_SIZE, TOP_K.

#include "hisparse/copy_row.cuh"

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

// Copies the first count_of(t) misses of each batch row t, distributed over `blocks` thread blocks; this is number
// `block`. Warps take one miss after another from a counter, because some multiprocessors get rows from the host at
// twice the rate of others. `count_of` is called once per batch row, by one warp; `ends` has room for `batch` integers.
// The two `counters` are zero between calls. Returns true in the last block to finish, when no other block reads the
// counts any more.
template <typename CountOf>
__device__ __forceinline__ bool copy_misses_of_batch(const Pools& pools, const int* miss_sources, const int* miss_rows,
                                                     int batch, int block, int blocks, int* ends, int* counters,
                                                     CountOf count_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blocks * (blockDim.x / 32);
    if (warp == 0) {
        int before = 0;
        for (int first = 0; first < batch; first += 32) {
            const int sum = inclusive_warp_scan(first + lane < batch ? count_of(first + lane) : 0);
            if (first + lane < batch) ends[first + lane] = before + sum;  // end of its misses, counted over the batch
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
    const int misses = ends[batch - 1];
    int miss = warp * blocks + block;
    while (miss < misses) {
        int drawn = 0;
        if (lane == 0) drawn = atomicAdd(counters, 1);  // overlaps the copy of the row
        int low = 0, high = batch - 1;                  // the first batch row that ends beyond this miss
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > miss)
                high = middle;
            else
                low = middle + 1;
        }
        const long long entry = static_cast<long long>(low) * TOP_K + miss - (low > 0 ? ends[low - 1] : 0);
        copy_row(pools.destination(__ldcg(miss_rows + entry)), pools.source(__ldcg(miss_sources + entry)), lane);
        miss = warps + __shfl_sync(~0u, drawn, 0);
    }
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicInc(reinterpret_cast<unsigned*>(counters + 1), blocks - 1) == blocks - 1;
        if (last) counters[0] = 0;
    }
    __syncthreads();
    return last;
}
