// Linear layers with fp8 weights and few rows of x: see few_rows.cuh.

#include "linear/few_rows.cuh"
#include "linear/fp8_format.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) fp8_linear(
    const Bits* x, const unsigned char* values, const float* scales, const Bits* bias, Bits* out, long long rows,
    long long out_size, long long in_size, long long row_group, long long scale_stride, long long scale_step
) {
    const int steps = static_cast<int>(in_size / kBlock);
    const Fp8Matrix weights = {values, scales, row_group, scale_stride, scale_step, 0, 0, steps};
    few_rows(weights, {x, rows, out_size, in_size}, bias, out);
}
