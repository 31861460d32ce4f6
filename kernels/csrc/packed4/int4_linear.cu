// Linear layers with 4-bit weights and few rows of x: see few_rows.cuh and int4_linear.py.

#include "linear/few_rows.cuh"
#if X_ROWS == 4
#include "packed4/byte_format.cuh"
#else
#include "packed4/format.cuh"
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS) int4_linear(
    const Bits* x, const unsigned char* packed, const Bits* scales, const Bits* zeros, const Bits* bias, Bits* out,
    long long rows, long long out_size, long long in_size, long long row_bytes, long long group_stride
) {
    const int steps = static_cast<int>(row_bytes / GROUP);
    const GroupScaled weights = {{packed, scales, zeros, row_bytes, group_stride, 0, 0, steps}};
    few_rows(weights, {x, rows, out_size, in_size}, bias, out);
}
