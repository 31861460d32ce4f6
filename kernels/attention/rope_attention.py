"""The attention of a layer from its fused projection: rope_kv_write.py, then paged_attention.py.

    query  =  rope_kv_write(qkv)        writes the keys and values of the batch into pages
    out    =  paged_attention(query)

On a Hopper GPU, one CUDA kernel computes both for few sequences that have one query and at most `FEW_KEYS` keys.
Otherwise there are three kernels, which take about 10 us; most of that time, each waits for the previous one.

Lower bound: that of paged_attention.py.
"""

import torch

from ..backends.dispatch import Impl
from .attention_plan import WorkPlan
from .paged_attention import AttentionPlan, check_attention, paged_attention
from .rope_decode_cuda import launch_rope_decode, most_sequences
from .rope_kv_write import check_rope, check_strides, rope_kv_write


def rope_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    sinks: torch.Tensor | None = None,
    live_rows: torch.Tensor | None = None,
    last_only: bool = False,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Attention of a batch [tokens, heads, D]; the arguments are those of `rope_kv_write` and `paged_attention`.
    `page_ids` and `offsets` must be the places of each sequence's last tokens in the pages of `plan`. No sequence may
    read keys or values that the same call writes for another one.
    """
    if not isinstance(plan, WorkPlan) or not _in_one_kernel(plan, key_pages, qkv, cos, signed_sin, q_norm, k_norm):
        query = rope_kv_write(
            qkv,
            cos,
            signed_sin,
            key_pages,
            value_pages,
            page_ids,
            offsets,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            live_rows=live_rows,
            impl=impl,
        )
        return paged_attention(query, key_pages, value_pages, plan, scale=scale, sinks=sinks, last_only=last_only)
    tokens, heads = check_rope(qkv, cos, signed_sin, key_pages, value_pages, page_ids, offsets, q_norm, k_norm)
    check_strides(cos, signed_sin, key_pages, value_pages)
    out = qkv.new_empty(tokens, heads, key_pages.shape[3])
    check_attention(out, key_pages, value_pages, plan, sinks)
    launch_rope_decode(
        qkv,
        cos,
        signed_sin,
        key_pages,
        value_pages,
        plan,
        out,
        scale=scale,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        sinks=sinks,
    )
    return out


def _in_one_kernel(plan: WorkPlan, key_pages: torch.Tensor, qkv: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether csrc/attention/rope_decode.cu computes this. It loads 16 bytes of `qkv` and `others` at a time."""
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in (qkv, *others))
    if not plan.few_keys or not aligned:
        return False
    _, kv_heads, _, head_dim = key_pages.shape
    group = qkv.shape[1] // head_dim // kv_heads - 2
    return len(qkv) <= most_sequences(group, key_pages, qkv.dtype)
