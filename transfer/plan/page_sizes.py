"""The cost of different page sizes on prefill and decode: a warning at pairing, with the remedy. Pure."""

from collections.abc import Collection

import msgspec

from ..protocol.layout import KvLayout
from ..protocol.messages import Hello, Welcome
from .copy_regions import CopyRegion
from .copy_runs import expand_runs
from .pairing import layouts_of
from .staged_regions import pair_regions, staged_regions


def describe_page_sizes(hello: Hello, welcome: Welcome, chunk_tokens: int) -> str | None:
    """One sentence if a chunk takes more writes than with equal page sizes; else None.

    In a page, the tokens of one head are contiguous. If page sizes differ, a contiguous range on both sides is at most
    the tokens of one head. Staged regions are gathered into one write for any page size.
    """
    prefill, decode = welcome.ranks[0].pools[0].layout.page_size, hello.ranks[0].pools[0].layout.page_size
    staged = {each.region for each in staged_regions(hello, welcome)}
    if prefill == decode:
        return None
    writes = _count_writes(hello, welcome, chunk_tokens, staged, decode)
    equal = _count_writes(hello, welcome, chunk_tokens, staged, prefill)
    if writes <= equal:
        return None
    return (
        f"page sizes differ: {prefill} on prefill, {decode} on decode. A chunk of {chunk_tokens} tokens takes {writes} "
        f"writes instead of at most {equal}: give both servers the same --page-size, or dense models --staging on"
    )


def _count_writes(
    hello: Hello, welcome: Welcome, tokens: int, staged: Collection[CopyRegion], decode_page_size: int
) -> int:
    """Writes of a chunk over all direct regions, with this page size on decode and no adjacent pages."""
    writes = 0
    for pool in welcome.ranks[0].pools:
        kind = pool.layout.kind
        sources, destinations = layouts_of(welcome.ranks, kind), layouts_of(hello.ranks, kind)
        for region in pair_regions(hello, welcome, kind):
            if region not in staged:
                destination = msgspec.structs.replace(destinations[region.destination], page_size=decode_page_size)
                writes += _region_writes(sources[region.source], destination, tokens, region)
    return writes


def _region_writes(source: KvLayout, destination: KvLayout, tokens: int, region: CopyRegion) -> int:
    source_pages, destination_pages = (range(0, 2 * layout.pages_for(tokens), 2) for layout in (source, destination))
    return len(expand_runs(source, destination, source_pages, destination_pages, 0, tokens, region))
