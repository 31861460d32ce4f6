"""Numba kernel of ../layer_stack/layer_stack.py: one team of threads computes all layers, with barriers between steps.

Every thread normalises and packs all rows for itself, which takes less time than a barrier.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from collections.abc import Sequence

import torch

from ..attention.gather_plan import DecodeRows
from ..gguf.interleaved import TILE_COLUMNS
from ..layer_stack.layer_stack import LayerStack
from .interleaved_linear import linear_share, packed_bytes, products_bytes
from .interleaved_tiles import PACKED_BYTES, pack_row
from .openmp import fields, floats, kernel, kernel_function, longs, share, thread_number, wait_for_team
from .paged_decode import attend_share, attention_scratch
from .rms_norm import norm_row
from .rope_kv_write import rope_and_write

_INPUT_NORM, _MLP_NORM, _Q_NORM, _K_NORM = range(4)
_QKV, _O, _GATE_UP, _DOWN, _FIELDS = range(4, 21, 4)


@kernel_function
def _pack_rows(a, number, source, size, norm, own):
    """Pack rows [tokens, size] into this thread's memory, or their norms if there is a weight `norm`, for a matrix of
    the ggml type `number`.
    """
    normed = floats(own + a.normed_at, size)
    tiles = size // TILE_COLUMNS
    for token in range(a.tokens):
        row = source + 4 * token * size
        if norm:
            norm_row(floats(row, size), floats(norm, size), a.eps, normed, size)
            row = own + a.normed_at
        pack_row(number, row, tiles, own + a.packed_at + token * tiles * PACKED_BYTES)


@kernel_function
def _linear(a, matrix, in_size, out_size, own, out, add, gated):
    """This thread's outputs of a linear layer of packed rows."""
    blocks, number, row_bytes, bias = matrix[0], matrix[1], matrix[2], matrix[3]
    packed = own + a.packed_at
    linear_share(
        number, blocks, row_bytes, in_size, out_size, packed, a.tokens, own, bias, out, out_size, add, gated, False
    )
    wait_for_team()


@kernel(
    "hidden qkv query out gated layers cos signed_sin keys values layer_bytes page_ids offsets sinks rows firsts "
    "kv_lens page_starts pages scores bests totals sums own own_bytes packed_at normed_at "
    "layer_count tokens batch hidden_size mlp_size heads kv_heads head_dim page_size page_stride head_stride "
    "token_stride most_keys parts",
    "scale eps",
)
def _layer_stack(arguments):
    a = fields(arguments)
    table = longs(a.layers, (a.layer_count, _FIELDS))
    own = a.own + thread_number() * a.own_bytes
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    for index in range(a.layer_count):
        layer = table[index]
        keys, values = a.keys + index * a.layer_bytes, a.values + index * a.layer_bytes
        # all four matrices by one call of each function: every call is compiled for itself, which takes seconds
        for matrix in range(_QKV, _FIELDS, 4):
            x, in_size, norm, out, out_size = a.hidden, a.hidden_size, 0, a.hidden, a.hidden_size
            if matrix == _QKV:
                norm, out, out_size = layer[_INPUT_NORM], a.qkv, q_size + 2 * kv_size
            elif matrix == _O:
                x, in_size = a.out, q_size
            elif matrix == _GATE_UP:
                norm, out, out_size = layer[_MLP_NORM], a.gated, a.mlp_size
            else:
                x, in_size = a.gated, a.mlp_size
            _pack_rows(a, layer[matrix + 1], x, in_size, norm, own)
            _linear(a, layer[matrix:], in_size, out_size, own, out, out == a.hidden, matrix == _GATE_UP)
            if matrix == _QKV:
                first, last = share(a.tokens)
                for token in range(first, last):
                    rope_and_write(a, token, layer[_Q_NORM], layer[_K_NORM], keys, values)
                wait_for_team()
                attend_share(a, keys, values)
                wait_for_team()


def launch_layers(
    stack: LayerStack,
    hidden: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    pages: Sequence[tuple[torch.Tensor, ...]],
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    decode: DecodeRows,
) -> None:
    tokens, (keys, values), (cos, signed_sin) = hidden.shape[0], pages[0], angles
    _, kv_heads, page_size, head_dim = keys.shape
    page_stride, head_stride, token_stride, _ = keys.stride()
    threads, q_size = torch.get_num_threads(), stack.query_size
    heads = q_size // head_dim
    most_keys = -(-decode.longest // threads)
    _attention, addresses = attention_scratch(tokens, heads, kv_heads, head_dim, most_keys, threads)
    qkv = torch.empty(tokens, q_size + 2 * kv_heads * head_dim)
    query, attended, gated = (torch.empty(tokens, size) for size in (q_size, q_size, stack.mlp_size))
    widest = max(stack.hidden_size, q_size, stack.mlp_size)
    packed_at = 2 * products_bytes(tokens)
    normed_at = packed_at + tokens * packed_bytes(widest)
    own_bytes = normed_at + 4 * stack.hidden_size
    own = torch.empty(threads, own_bytes, dtype=torch.uint8)
    _layer_stack(
        hidden.data_ptr(),
        qkv.data_ptr(),
        query.data_ptr(),
        attended.data_ptr(),
        gated.data_ptr(),
        stack.table.data_ptr(),
        cos.data_ptr(),
        signed_sin.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        pages[1][0].data_ptr() - keys.data_ptr() if len(pages) > 1 else 0,
        page_ids.data_ptr(),
        offsets.data_ptr(),
        0,
        decode.rows.data_ptr(),
        decode.firsts.data_ptr(),
        decode.kv_lens.data_ptr(),
        decode.page_starts.data_ptr(),
        decode.pages.data_ptr(),
        *addresses,
        own.data_ptr(),
        own_bytes,
        packed_at,
        normed_at,
        len(stack.table),
        tokens,
        tokens,
        stack.hidden_size,
        stack.mlp_size,
        heads,
        kv_heads,
        head_dim,
        page_size,
        page_stride,
        head_stride,
        token_stride,
        most_keys,
        threads,
        stack.scale,
        stack.eps,
        threads=threads,
    )
