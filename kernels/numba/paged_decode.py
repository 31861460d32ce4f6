"""Numba kernel of ../attention/paged_attention.py for sequences of one query: keys are split into one part per thread.

A part stores, per query head, its largest score, the sum of its weights relative to that, and the weighted sum of its
values. After a barrier the parts are combined.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import numpy as np
import torch

from ..attention.gather_plan import DecodeRows
from .openmp import (
    exp,
    fields,
    floats,
    kernel,
    kernel_function,
    longs,
    share,
    slice_of,
    threads_for,
    wait_for_team,
)

_SCORE_ELEMENTS = 16
"""Cost of one score and its value, in elements of simpler operations (`threads_for`)."""


@kernel_function
def _score(query, keys, scale, scores, start):
    """scores[:, start:] = scale * query . keys, for the query heads of one KV head and keys of one page."""
    group, dim = query.shape
    for token in range(len(keys)):
        for member in range(group):
            total = np.float32(0)
            for i in range(dim):
                total += query[member, i] * keys[token, i]
            scores[member, start + token] = scale * total


@kernel_function
def _to_weights(scores, count):
    """Replace scores by weights relative to the largest score; returns that score and the sum of the weights."""
    best = np.float32(-np.inf)
    for i in range(count):
        best = max(best, scores[i])
    total = np.float32(0)
    for i in range(count):
        weight = exp(scores[i] - best)
        scores[i] = weight
        total += weight
    return best, total


@kernel_function
def _add_values(weights, start, values, sums):
    """sums += weights[:, start:] . values, for the query heads of one KV head and values of one page."""
    group, dim = sums.shape
    for token in range(len(values)):
        for member in range(group):
            weight = weights[member, start + token]
            for i in range(dim):
                sums[member, i] += weight * values[token, i]


@kernel_function
def _attend(a, keys_at, values_at, part, sequence, kv_head):
    """One part of the keys of a sequence, for the query heads of one KV head, in the pages at these addresses."""
    heads, dim, page_size = a.heads, a.head_dim, a.page_size
    group, slots = heads // a.kv_heads, a.batch * heads
    slot = part * slots + sequence * heads + kv_head * group
    row = longs(a.rows, a.batch)[sequence]
    query = floats(a.query + 4 * (row * heads + kv_head * group) * dim, (group, dim))
    scores = floats(a.scores + 4 * part * group * a.most_keys, (group, a.most_keys))
    bests, totals = floats(a.bests + 4 * slot, group), floats(a.totals + 4 * slot, group)
    sums = floats(a.sums + 4 * slot * dim, (group, dim))
    scale = np.float32(a.scale)
    first_seen = longs(a.firsts, a.batch)[sequence]
    first, last = slice_of(longs(a.kv_lens, a.batch)[sequence] - first_seen, part, a.parts)
    first, last = first_seen + first, first_seen + last
    used_pages = range(first // page_size, -(-last // page_size))
    pages = longs(a.pages + 8 * longs(a.page_starts, a.batch)[sequence], used_pages.stop)

    for index in used_pages:
        start, end = max(first, index * page_size), min(last, (index + 1) * page_size)
        at = pages[index] * a.page_stride + kv_head * a.head_stride + start % page_size * a.token_stride
        keys = floats(keys_at + 4 * at, (end - start, a.token_stride))
        _score(query, keys, scale, scores, start - first)
    for member in range(group):
        bests[member], totals[member] = _to_weights(scores[member], last - first)
        for i in range(dim):
            sums[member, i] = 0
    for index in used_pages:
        start, end = max(first, index * page_size), min(last, (index + 1) * page_size)
        at = pages[index] * a.page_stride + kv_head * a.head_stride + start % page_size * a.token_stride
        values = floats(values_at + 4 * at, (end - start, a.token_stride))
        _add_values(scores, start - first, values, sums)


@kernel_function
def _join(a, slot):
    """Combine the parts of one query head."""
    heads, dim, slots = a.heads, a.head_dim, a.batch * a.heads
    bests, totals = floats(a.bests, (a.parts, slots)), floats(a.totals, (a.parts, slots))
    sums = floats(a.sums, (a.parts, slots, dim))
    best, total = np.float32(-np.inf), np.float32(0)
    if a.sinks:
        best, total = floats(a.sinks, heads)[slot % heads], np.float32(1)
    for part in range(a.parts):
        if a.sinks and bests[part, slot] > best:
            total *= exp(best - bests[part, slot])
        best = max(best, bests[part, slot])
    for part in range(a.parts):
        total += exp(bests[part, slot] - best) * totals[part, slot]
    row = longs(a.rows, a.batch)[slot // heads]
    out = floats(a.out + 4 * (row * heads + slot % heads) * dim, dim)
    for part in range(a.parts):
        share_of_part = exp(bests[part, slot] - best) / total
        for i in range(dim):
            out[i] = (out[i] if part else 0) + share_of_part * sums[part, slot, i]


@kernel_function
def attend_share(a, keys, values):
    """In a kernel: attention over the pages at these addresses. `a` has the other fields of the kernel below."""
    first, last = share(a.parts)
    for part in range(first, last):
        for sequence in range(a.batch):
            for kv_head in range(a.kv_heads):
                _attend(a, keys, values, part, sequence, kv_head)
    wait_for_team()
    first, last = share(a.batch * a.heads)
    for slot in range(first, last):
        _join(a, slot)


@kernel(
    "query keys values out sinks rows firsts kv_lens page_starts pages scores bests totals sums "
    "batch heads kv_heads head_dim page_size page_stride head_stride token_stride most_keys parts",
    "scale",
)
def _paged_decode(arguments):
    a = fields(arguments)
    attend_share(a, a.keys, a.values)


def attention_scratch(
    batch: int, heads: int, kv_heads: int, head_dim: int, most_keys: int, parts: int
) -> tuple[torch.Tensor, list[int]]:
    """Memory of an attention call, and the addresses in it for scores, bests, totals and sums."""
    slots = batch * heads
    sizes = (heads // kv_heads * most_keys, slots, slots, slots * head_dim)
    scratch = torch.empty(parts * sum(sizes), dtype=torch.float32)
    return scratch, [scratch.data_ptr() + 4 * parts * sum(sizes[:at]) for at in range(4)]


def launch_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    decode: DecodeRows,
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    _, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    page_stride, head_stride, token_stride, _ = key_pages.stride()
    batch, longest = len(decode.rows), decode.longest
    parts = threads_for(batch * longest * heads * _SCORE_ELEMENTS)
    most_keys = -(-longest // parts)
    _scratch, addresses = attention_scratch(batch, heads, kv_heads, head_dim, most_keys, parts)
    _paged_decode(
        query.data_ptr(),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        decode.rows.data_ptr(),
        decode.firsts.data_ptr(),
        decode.kv_lens.data_ptr(),
        decode.page_starts.data_ptr(),
        decode.pages.data_ptr(),
        *addresses,
        batch,
        heads,
        kv_heads,
        head_dim,
        page_size,
        page_stride,
        head_stride,
        token_stride,
        most_keys,
        parts,
        scale,
        threads=parts,
    )
