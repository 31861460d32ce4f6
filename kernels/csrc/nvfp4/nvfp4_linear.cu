// Linear layers with NVFP4 weights and few rows of x: see few_rows.cuh and nvfp4.py.

#include "linear/few_rows.cuh"
#include "nvfp4/nvfp4_format.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) nvfp4_linear(
    const Bits* x, const unsigned char* packed, const unsigned char* scales, const float* factors, const Bits* bias,
    Bits* out, long long rows, long long out_size, long long in_size, long long row_bytes, long long scale_stride
) {
    const int steps = static_cast<int>(2 * row_bytes / STEP);
    const Nvfp4 weights = {packed, scales, factors, row_bytes, scale_stride, steps};
    few_rows(weights, {x, rows, out_size, in_size}, bias, out);
}
