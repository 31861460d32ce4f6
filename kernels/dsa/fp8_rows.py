"""Queries and keys of the indexer in fp8: the elements of a row in e4m3, and one float32 scale per row.

    scale  =  the smallest power of two with  max |x| <= 448 * scale         448 is the largest e4m3 number
    fp8    =  x / scale, rounded to e4m3

DeepSeek's own code uses the same scales. Division by a power of two is exact, so every implementation rounds the same
numbers. As in transformers, rows are not multiplied with a Hadamard matrix first. The product of two fp8 rows is the
product of their elements times both scales; only its sum is rounded.

Shapes: x [..., D]; fp8 [..., D]; scales [...]. Keys in pages are a view of fp8 [pages, page_size, D] and one of scales
[pages, page_size]: a page has the elements of all its keys, then their scales (memory/kv_pool.py).
"""

import torch

FP8 = torch.float8_e4m3fn
SMALLEST = 1e-4
"""Rows whose elements are all smaller get the scale of this number, which avoids subnormal scales."""
ROUND_UP = (1 << 21) - 1
"""Added to the bits of a float32, carries into the exponent if the mantissa is above 1.75, that of 448."""
EXPONENT = 0xFF << 23
EXPONENT_OF_448 = 8 << 23
TWICE_BIAS = 254 << 23
"""If s is a power of two, the bits of 1 / s are this number minus the bits of s."""


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 rows and their scales; see the module docstring."""
    largest = x.float().abs().amax(dim=-1).clamp_(min=SMALLEST)
    bits = ((largest.view(torch.int32) + ROUND_UP) & EXPONENT) - EXPONENT_OF_448
    scales = bits.view(torch.float32)
    return (x.float() / scales.unsqueeze(-1)).to(FP8), scales
