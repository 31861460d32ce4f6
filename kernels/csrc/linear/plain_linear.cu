// Linear layers with weights in 16 bits and few rows of x: see few_rows.cuh.

#include "linear/few_rows.cuh"
#include "linear/plain_format.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) plain_linear(
    const Bits* x, const Bits* values, const Bits* bias, Bits* out, long long rows, long long out_size,
    long long in_size
) {
    const Plain weights = {values, 0, static_cast<int>(in_size / kColumns)};
    few_rows(weights, {x, rows, out_size, in_size}, bias, out);
}
