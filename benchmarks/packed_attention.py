"""Sparse attention over packed latent rows on one GPU: fused, and with rows unpacked into a workspace first.

    python -m benchmarks.packed_attention [--heads 16] [--batch 1 8 32 64] [--tiles]

DeepSeek-V3.2's geometry; 16 heads are those of one rank of eight. Both forms are first compared with the reference.
Times are GPU time per call in a CUDA graph over the layers of a page-major pool, more layers than the caches hold.
`read` is the time to read the selected packed rows once, at the copy rate measured in the same run. `--tiles` times the
fused form with other tiles.
"""

import argparse
import functools

import torch
import triton

from benchmarks.dsa_kernels import LATENT_DIM, PAGE_SIZE, SCALE, TOP_K, VALUE_DIM, graph_us, num_layers, random_rows
from benchmarks.gpu_timing import DEVICE, copy_rate
from pdserve.kernels.mla.packed_rows import pack_rows_reference, packed_bytes
from pdserve.kernels.packed_mla.packed_attention import sparse_mla_packed

CONTEXT = 32768
ROW_BYTES = packed_bytes(VALUE_DIM, LATENT_DIM - VALUE_DIM)
TILES = [(64, 8, 2), (64, 8, 1), (64, 4, 1), (64, 4, 2), (128, 8, 1)]
"""Rows, warps, and programs of a multiprocessor. The tile in use is among them."""
LARGEST_ERROR = 6e-3
"""Relative, of bfloat16: that of sparse_mla in dsa_kernels.py."""

attend = functools.partial(sparse_mla_packed, scale=SCALE, value_dim=VALUE_DIM)


def packed_pool(num_tokens: int, layers: int) -> torch.Tensor:
    """[pages, layers, page_size, bytes]: the same random rows in all layers."""
    rows = torch.randn(num_tokens // 64, LATENT_DIM, device=DEVICE)
    packed = pack_rows_reference(rows, VALUE_DIM).repeat(64, 1).view(-1, 1, PAGE_SIZE, ROW_BYTES)
    return packed.expand(-1, layers, -1, -1).contiguous()


def random_query(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, LATENT_DIM, device=DEVICE).to(torch.bfloat16)


def check(heads: int) -> None:
    pool = packed_pool(CONTEXT, 2)[:, 1]
    for tokens in (1, 8, 32):
        query, rows = random_query(tokens, heads), random_rows(tokens, CONTEXT)
        rows[:, ::7] = -1
        expected = attend(query.float(), pool, rows, impl="reference")
        for fused in (False, True):
            found = attend(query, pool, rows, fused=fused).float()
            error = float((found - expected).norm() / expected.norm())
            print(f"{tokens} tokens, {'fused' if fused else 'unpacked'}: relative error {error:.4f}")
            if not error < LARGEST_ERROR:
                raise SystemExit(f"differs from the reference by more than bfloat16 explains ({LARGEST_ERROR})")


def time_us(tokens: int, heads: int, *, fused: bool) -> float:
    layers = num_layers(tokens * TOP_K * ROW_BYTES)
    pool, query = packed_pool(tokens * CONTEXT, layers), random_query(tokens, heads)
    rows = [random_rows(tokens, tokens * CONTEXT) for _ in range(layers)]
    calls = [lambda layer=layer: attend(query, pool[:, layer], rows[layer], fused=fused) for layer in range(layers)]
    return graph_us(calls)


def compare_tiles(heads: int, batches: list[int]) -> None:
    from pdserve.kernels.packed_mla import packed_attention_triton

    limit = min(most for most in packed_attention_triton.TILES if heads <= most or most == 64)
    for rows, warps, programs in TILES:
        packed_attention_triton.TILES[limit] = packed_attention_triton.PackedTile(limit, rows, warps, programs)
        for batch in batches:
            try:
                found = f"{time_us(batch, heads, fused=True):.1f} us"
            except triton.runtime.errors.OutOfResources as error:
                found = str(error)
            print(f"{rows:4} rows  {warps} warps  {programs} programs  batch {batch:3}  {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tiles", action="store_true", help="compare tiles of the fused form")
    options = parser.parse_args()
    check(options.heads)
    if options.tiles:
        compare_tiles(options.heads, options.batch)
        return
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copies at {rate / 1e12:.2f} TB/s; {options.heads} heads")
    print("batch  unpacked us  fused us  read us")
    for batch in options.batch:
        unpacked, fused = (time_us(batch, options.heads, fused=fused) for fused in (False, True))
        read = batch * TOP_K * ROW_BYTES / rate * 1e6
        print(f"{batch:5}  {unpacked:11.1f}  {fused:8.1f}  {read:7.1f}", flush=True)


if __name__ == "__main__":
    main()
