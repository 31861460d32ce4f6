"""Launcher of csrc/attention/rope_decode.cu: decode attention of few sequences with few keys."""

import torch

from ..backends.nvrtc import float_bits, load_kernel, log2_scale_bits
from ..backends.occupancy import is_hopper_or_later, multiprocessors
from .attention_plan import WorkPlan

_CLUSTER, _WARPS, _KEYS, _HEADS = 8, 8, 16, 8
"""Constants of the kernel: thread blocks of a cluster; key warps; keys of a warp in a round; most heads of a group."""
_ALL_WARPS = _WARPS + 3
"""Key warps, and warps that normalise and rotate heads."""
_PAD = 32
"""Padding elements after a query in shared memory."""


def most_sequences(group: int, key_pages: torch.Tensor, dtype: torch.dtype) -> int:
    """The most sequences in such pages for which the kernel is used, with `group` query heads of `dtype` per KV head; 0
    if it does not support them. They occupy at most half of the GPU: with more sequences, the separate kernels were at
    least as fast (H200, 2 sequences of Qwen3-8B and 4 of Qwen3-30B-A3B).
    """
    device, (_, kv_heads, _, head_dim) = key_pages.device, key_pages.shape
    if not is_hopper_or_later(device) or dtype.itemsize != 2 or key_pages.dtype != dtype:
        return 0
    aligned = key_pages.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in key_pages.stride()[:3])
    if not aligned or head_dim not in (64, 128) or group > _HEADS:
        return 0
    return multiprocessors(device) // (2 * kv_heads * _CLUSTER)


def launch_rope_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: WorkPlan,
    out: torch.Tensor,
    *,
    scale: float,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    sinks: torch.Tensor | None,
) -> None:
    """Fill `out` [tokens, heads, D] and write the newest keys and values, for no more than `most_sequences`."""
    _, kv_heads, page_size, head_dim = key_pages.shape
    group = out.shape[1] // kv_heads
    page_stride, head_stride, token_stride, _ = key_pages.stride()
    shared_bytes = _shared_bytes(head_dim, group)
    norm = 0 if q_norm is None else 2 if q_norm.dtype == torch.float32 else 1
    constants = (
        ("D", head_dim),
        ("GROUP", group),
        ("PAGE", page_size),
        ("NORM", norm),
        ("SINKS", int(sinks is not None)),
        ("HALF", int(qkv.dtype == torch.float16)),
        ("WARPS", _ALL_WARPS),
        ("SHARED_BYTES", shared_bytes),
    )
    kernel = load_kernel("attention/rope_decode.cu", "rope_decode", qkv.device, constants, shared_bytes)
    q_norm, k_norm = (out if weight is None else weight for weight in (q_norm, k_norm))  # not read then
    kernel.launch(
        qkv.data_ptr(),
        cos.data_ptr(),
        signed_sin.data_ptr(),
        q_norm.data_ptr(),
        k_norm.data_ptr(),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        plan.pages.data_ptr(),
        plan.page_starts.data_ptr(),
        plan.row_starts.data_ptr(),
        plan.kv_lens.data_ptr(),
        (out if sinks is None else sinks).data_ptr(),
        out.data_ptr(),
        kv_heads,
        cos.stride(0),
        page_stride,
        head_stride,
        token_stride,
        plan.window or 0,
        float_bits(eps),
        log2_scale_bits(scale),
        blocks=len(plan.kv_lens) * kv_heads * _CLUSTER,
        threads=32 * _ALL_WARPS,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )


def _shared_bytes(head_dim: int, group: int) -> int:
    """The size of `Shared` in the kernel."""
    values = _WARPS * 2 * _KEYS * 2 * head_dim
    queries = _HEADS * 2 * (head_dim + _PAD)
    newest = 2 * 2 * head_dim
    softmaxes = (2 * _WARPS + 1) * _HEADS * 4
    received = group * head_dim // 4 * (16 + 8)  # from each block of the cluster, the results that this one stores
    return values + queries + newest + softmaxes + received
