"""Whether a prefill and a decode server are compatible; checked at pairing, before any transfer.

Protocol version, model and its KV (planes, dtype, layers, heads) must agree. How a side shards and stores the KV
(tensor and pipeline parallelism, ranks, page size, pool size, kind of memory) may differ.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ..protocol.layout import KvLayout
from ..protocol.messages import Hello, Rank, Welcome
from .copy_regions import find_hole


def describe_versions(prefill: int, decode: int) -> str:
    """The error text for different protocol versions."""
    return f"protocol version differs: prefill speaks {prefill}, decode speaks {decode}"


def check_pair(hello: Hello, welcome: Welcome) -> str | None:
    """One sentence that names both values if the two must not pair; None if they are compatible.

    Only the first difference is reported; with different protocol versions nothing else is compared. Both sides compute
    the same sentence from the same two messages.
    """
    if welcome.protocol_version != hello.protocol_version:
        return describe_versions(welcome.protocol_version, hello.protocol_version)
    return (
        _describe_models(hello, welcome)
        or _describe_ranks("prefill", welcome.ranks)
        or _describe_ranks("decode", hello.ranks)
        or _describe_sessions(hello.ranks)
        or _describe_pools(welcome.ranks, hello.ranks)
    )


def share_gpu(ours: Sequence[Rank], theirs: Sequence[Rank]) -> bool:
    return bool({rank.gpu for rank in ours} & {rank.gpu for rank in theirs} - {""})


def share_device(ours: Sequence[Rank], theirs: Sequence[Rank]) -> bool:
    """Whether two servers compute on one GPU, or on the CPU of one machine with more threads than it has cores."""
    if share_gpu(ours, theirs):
        return True
    for machine in {rank.machine for rank in ours} & {rank.machine for rank in theirs}:
        ranks = [rank for rank in (*ours, *theirs) if rank.machine == machine]
        cores = {core for rank in ranks for core in rank.cpu_cores}
        if all(rank.cpu_cores for rank in ranks) and sum(rank.cpu_threads for rank in ranks) > len(cores):
            return True
    return False


def layouts_of(ranks: Sequence[Rank], kind: tuple[str, ...]) -> list[KvLayout]:
    """The layout of the pool of this kind, by rank. `check_pair` ensures that each rank has one."""
    return [pool.layout for rank in ranks for pool in rank.pools if pool.layout.kind == kind]


def _describe_models(hello: Hello, welcome: Welcome) -> str | None:
    prefill, decode = ({rank.checkpoint for rank in ranks} for ranks in (welcome.ranks, hello.ranks))
    if "" in prefill | decode or not (prefill and decode):  # an older server
        prefill, decode = {welcome.model_fingerprint}, {hello.model_fingerprint}
    if prefill == decode and len(decode) <= 1:
        return None
    return (
        f"models differ: prefill serves {welcome.model_name} ({', '.join(sorted(prefill))}), "
        f"decode serves {hello.model_name} ({', '.join(sorted(decode))})"
    )


def _describe_ranks(side: str, ranks: Sequence[Rank]) -> str | None:
    """What is wrong with one side, independent of the other."""
    numbers = [rank.rank for rank in ranks]
    if not ranks or numbers != list(range(len(ranks))):
        return f"{side} announces ranks {numbers}; they must be numbered from 0 without gaps"
    for rank in ranks:
        kinds = [pool.layout.kind for pool in rank.pools]
        if not kinds or len(set(kinds)) != len(kinds):
            return f"{side} rank {rank.rank} announces KV pools {_pools(rank)}; each rank has one of each kind"
        for pool in rank.pools:
            kv = pool.layout
            if min(kv.num_layers, kv.num_heads, kv.page_size, kv.num_pages, *(p.token_bytes for p in kv.planes)) < 1:
                return (
                    f"{side} rank {rank.rank} announces an impossible KV pool: layers {_range(kv.layers)}, heads "
                    f"{_range(kv.heads)}, {kv.num_pages} pages of {kv.page_size} tokens, {_planes(kv)}"
                )
            if (kv.num_pages, kv.page_size) != _pages_of(ranks[0]):
                num_pages, page_size = _pages_of(ranks[0])
                return (
                    f"{side} rank {rank.rank} has {kv.num_pages} pages of {kv.page_size} tokens for {_planes(kv)}, "
                    f"rank 0 has {num_pages} of {page_size}: all pools of a server share their pages"
                )
        if (problem := _describe_hot(side, rank)) is not None:
            return problem
        if _rows_of(rank) != _rows_of(ranks[0]):
            return f"KV pools differ inside {side}: rank 0 has {_pools(ranks[0])}, rank {rank.rank} has {_pools(rank)}"
    return None


def _describe_hot(side: str, rank: Rank) -> str | None:
    """What is wrong with the hot pool of a rank: it must have the rows of a pool in host memory."""
    if rank.hot is None:
        return None
    hot = rank.hot.layout
    hosts = [pool.layout for pool in rank.pools if pool.memory == "host" and pool.layout.kind == hot.kind]
    if hot.num_pages < 1 or not any(msgspec.structs.replace(hot, num_pages=kv.num_pages) == kv for kv in hosts):
        return (
            f"{side} rank {rank.rank} announces a hot pool of {hot.num_pages} pages of {hot.page_size} tokens, "
            f"{_planes(hot)}, layers {_range(hot.layers)}: no pool in host memory has such rows"
        )
    return None


def _pages_of(rank: Rank) -> tuple[int, int]:
    return rank.pools[0].layout.num_pages, rank.pools[0].layout.page_size


def _describe_sessions(decode: Sequence[Rank]) -> str | None:
    for rank in decode:
        if rank.session is None:
            return f"decode rank {rank.rank} of {len(decode)} announces no session for prefill to write to"
    return None


def _describe_pools(prefill: Sequence[Rank], decode: Sequence[Rank]) -> str | None:
    """The first difference between the KV of the two sides; each side is consistent."""
    if _rows_of(prefill[0]) != _rows_of(decode[0]):
        return f"KV pools differ: prefill has {_pools(prefill[0])}, decode has {_pools(decode[0])}"
    for pool in prefill[0].pools:
        kind = pool.layout.kind
        name = "+".join(kind)
        ours, theirs = layouts_of(prefill, kind), layouts_of(decode, kind)
        layers, their_layers = _span(kv.layers for kv in ours), _span(kv.layers for kv in theirs)
        if layers != their_layers:
            return f"layers of {name} differ: prefill holds {_range(layers)}, decode holds {_range(their_layers)}"
        heads, their_heads = _span(kv.heads for kv in ours), _span(kv.heads for kv in theirs)
        if heads != their_heads:
            return f"KV heads of {name} differ: prefill holds {_range(heads)}, decode holds {_range(their_heads)}"
        for side, layouts in (("prefill", ours), ("decode", theirs)):
            hole = find_hole(layouts, layers, heads)
            if hole is not None:
                return (
                    f"no rank of {side} holds layer {hole[0]}, head {hole[1]} of {name}; both sides must hold all of "
                    f"layers {_range(layers)}, heads {_range(heads)}"
                )
    return None


def _rows_of(rank: Rank) -> set[tuple[object, ...]]:
    """What all ranks of both sides must agree on: planes, their bytes and the dtype of each pool."""
    return {(pool.layout.planes, pool.layout.dtype) for pool in rank.pools}


def _span(ranges: Iterable[range]) -> range:
    """From the lowest to the highest member."""
    parts = list(ranges)
    return range(min(part.start for part in parts), max(part.stop for part in parts))


def _range(values: range) -> str:
    return f"[{values.start}, {values.stop})"


def _pools(rank: Rank) -> str:
    return ", ".join(f"{_planes(pool.layout)} ({pool.layout.dtype})" for pool in rank.pools) or "none"


def _planes(layout: KvLayout) -> str:
    return " + ".join(f"{plane.name} of {plane.token_bytes} B" for plane in layout.planes)
