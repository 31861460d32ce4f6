"""Which links of a pair are staged, and in what parts. Pure; both sides come to the same answer.

A head slice is one write per page, layer and plane when it goes directly, because the two sides keep different heads
next to each other. Staged, it is gathered into one piece, written once into the ring of the decode rank, and scattered
into its pages there. Where both sides hold the same heads a page is one write already, and staging would only copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from ..protocol.layout import KvLayout
from ..protocol.messages import HeadSlice, Hello, StageRing, Welcome
from .copy_regions import CopyRegion, plan_links
from .pairing import layouts_of
from .ring import ALIGNMENT

STAGED_KIND = ("k", "v")
"""Latent rows have a single head, which every rank holds: no slice of them exists."""
MAX_PART_BYTES = 32 << 20
"""Most that one write into a ring carries: enough to hide what a part costs, little enough to have two buffers of."""


@dataclass(frozen=True, slots=True)
class StagedRegion:
    """A link whose KV goes through `ring` of its destination, in parts of at most `part_bytes`."""

    link: CopyRegion
    ring: StageRing
    token_bytes: int
    """Of one token, over all layers, planes and heads of the link."""
    part_bytes: int

    @property
    def block(self) -> HeadSlice:
        layers, heads = self.link.layers, self.link.heads
        return HeadSlice(layers.start, layers.stop, heads.start, heads.stop)


def pair_regions(hello: Hello, welcome: Welcome, kind: tuple[str, ...]) -> tuple[CopyRegion, ...]:
    """All links of a pair for its pools of one kind. `check_pair` has found nothing wrong with these two."""
    return plan_links(layouts_of(welcome.ranks, kind), layouts_of(hello.ranks, kind), first=_first_turn(hello, welcome))


def staged_regions(hello: Hello, welcome: Welcome) -> tuple[StagedRegion, ...]:
    """The links of a pair that are staged. `off` on either side is off; `on` on either side stages all dense KV."""
    settings = {rank.staging for rank in (*hello.ranks, *welcome.ranks)}
    prefill, decode = layouts_of(welcome.ranks, STAGED_KIND), layouts_of(hello.ranks, STAGED_KIND)
    if "off" in settings or not prefill:
        return ()
    wanted = [
        link
        for link in pair_regions(hello, welcome, STAGED_KIND)
        if "on" in settings or not prefill[link.source].heads == decode[link.destination].heads == link.heads
    ]
    staged = []
    for link in wanted:
        ring = hello.ranks[link.destination].ring
        token_bytes = len(link.layers) * len(link.heads) * cell_bytes(decode[link.destination])
        writers = sum(other.destination == link.destination for other in wanted)
        if ring is not None and _rounded(token_bytes) <= ring.size_bytes:
            most = min(MAX_PART_BYTES, ring.size_bytes // (2 * writers))  # so that everybody has one, and one to come
            staged.append(StagedRegion(link, ring, token_bytes, max(most, token_bytes)))
    return tuple(staged)


def cell_bytes(layout: KvLayout) -> int:
    """What one token takes in one head of one layer, all planes together."""
    return sum(plane.token_bytes for plane in layout.planes)


def pages_holding(pages: Sequence[int], page_size: int, token_start: int, token_end: int) -> tuple[list[int], int]:
    """Of a sequence's pages, those that hold these tokens, and where in the first of them they start."""
    first = token_start // page_size
    return list(pages[first : -(-token_end // page_size)]), token_start - first * page_size


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _first_turn(hello: Hello, welcome: Welcome) -> int:
    """Where `plan_links` starts among replicas. All ranks must come to the same number.

    With as many decode ranks as there are prefill ranks, rank i writes to rank i; fewer would all be served by the same
    ranks.
    """
    if len(hello.ranks) >= len(welcome.ranks):
        return 0
    return xxhash.xxh3_64_intdigest(hello.instance.encode()) % len(welcome.ranks)
