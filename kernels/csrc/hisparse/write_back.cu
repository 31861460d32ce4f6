// Write-back of new rows; see kernels/hisparse/write_back.py. One warp per row, rows of all layers in one launch.
// Constants: ROW_BYTES, PAGE_SIZE, THREADS.

#include "hisparse/copy_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
write_back(const char* hot, long long hot_page_stride, long long hot_layer_stride, long long hot_token_stride,
           const int* hot_rows, long long hot_rows_stride, char* host, long long host_page_stride,
           long long host_layer_stride, long long host_token_stride, const int* host_rows, long long batch, long long layers) {
    const long long item = blockIdx.x * static_cast<long long>(THREADS / 32) + threadIdx.x / 32;
    const long long layer = item / batch, row = item % batch;
    if (layer >= layers) return;
    const int source = hot_rows[layer * hot_rows_stride + row], target = host_rows[row];
    if (target < 0) return;
    char* to = host + target / PAGE_SIZE * host_page_stride + layer * host_layer_stride +
               target % PAGE_SIZE * host_token_stride;
    const char* from = hot + source / PAGE_SIZE * hot_page_stride + layer * hot_layer_stride +
                       source % PAGE_SIZE * hot_token_stride;
    copy_row(to, from, threadIdx.x % 32);
}
