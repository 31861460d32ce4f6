"""Which copy regions of a pair go through a staging ring, and in what parts. Pure; both sides compute the same plan.

Without staging a head slice takes one write per page, layer and plane, because the two sides store different heads
next to each other. With staging, prefill gathers the slice into one buffer, writes it once into the ring of the decode
rank, and decode scatters it into its pages. Where both sides hold the same heads, a page is one write already, and
staging would only add copies.
"""

import itertools
from dataclasses import dataclass

import xxhash

from ...common.arithmetic import ceil_div
from ..protocol.layout import KvLayout
from ..protocol.messages import HeadSlice, Hello, StagePart, StageRing, TransferKey, Welcome, split_dp_instance
from .copy_regions import CopyRegion, plan_regions
from .pairing import layouts_of
from .ring import aligned

STAGED_KIND = ("k", "v")
"""Latent rows have a single head, which every rank holds: they have no head slices."""
MAX_PART_BYTES = 32 << 20
"""Upper limit of one write into a ring: large enough to hide the cost per part, small enough to afford two buffers."""


@dataclass(frozen=True, slots=True)
class StagedRegion:
    """A copy region whose KV goes through `ring` of its destination, in parts of at most `part_bytes`."""

    region: CopyRegion
    ring: StageRing
    token_bytes: int
    """Bytes of one token over all layers, planes and heads of the region; at most `part_bytes`."""
    part_bytes: int

    @property
    def block(self) -> HeadSlice:
        layers, heads = self.region.layers, self.region.heads
        return HeadSlice(layers.start, layers.stop, heads.start, heads.stop)

    def parts(self, key: TransferKey, token_start: int, token_end: int) -> list[StagePart]:
        """Cut these tokens into the fewest parts of at most `part_bytes`, of equal length but for one token."""
        tokens = token_end - token_start
        count = ceil_div(tokens, self.part_bytes // self.token_bytes)
        cuts = [token_start + tokens * index // count for index in range(count + 1)] if count else []
        source, destination = self.region.source, self.region.destination
        return [
            StagePart(self.ring.epoch, key, source, destination, self.block, start, end)
            for start, end in itertools.pairwise(cuts)
        ]


def pair_regions(hello: Hello, welcome: Welcome, kind: tuple[str, ...]) -> tuple[CopyRegion, ...]:
    """All copy regions of a pair for its pools of one kind. The pair must have passed `check_pair`."""
    prefill, decode = layouts_of(welcome.ranks, kind), layouts_of(hello.ranks, kind)
    return plan_regions(prefill, decode, first=_first_source(hello, welcome))


def staged_regions(hello: Hello, welcome: Welcome) -> tuple[StagedRegion, ...]:
    """The copy regions of a pair that are staged.

    `off` on either side disables staging; otherwise `on` on either side stages all dense KV, and `auto` on both stages
    the regions where the two ranks hold different heads.
    """
    settings = {rank.staging for rank in (*hello.ranks, *welcome.ranks)}
    prefill, decode = layouts_of(welcome.ranks, STAGED_KIND), layouts_of(hello.ranks, STAGED_KIND)
    if "off" in settings or not prefill:
        return ()
    wanted = [
        region
        for region in pair_regions(hello, welcome, STAGED_KIND)
        if "on" in settings or not prefill[region.source].heads == decode[region.destination].heads == region.heads
    ]
    staged = []
    for region in wanted:
        ring = hello.ranks[region.destination].ring
        token_bytes = len(region.layers) * len(region.heads) * cell_bytes(decode[region.destination])
        writers = sum(other.destination == region.destination for other in wanted)
        if ring is not None and aligned(token_bytes) <= ring.size_bytes:
            most = min(MAX_PART_BYTES, ring.size_bytes // (2 * writers))  # two parts of every writer fit at once
            staged.append(StagedRegion(region, ring, token_bytes, max(most, token_bytes)))
    return tuple(staged)


def cell_bytes(layout: KvLayout) -> int:
    """Bytes of one token in one head of one layer, all planes together."""
    return sum(plane.token_bytes for plane in layout.planes)


def _first_source(hello: Hello, welcome: Welcome) -> int:
    """The prefill rank at which `plan_regions` starts among replicas. All ranks must compute the same number.

    With at least as many decode ranks as prefill ranks, rank i writes to rank i. With fewer, the start depends on the
    decode instance: otherwise the same prefill ranks would serve all decode servers. Data-parallel ranks of a decode
    server start at consecutive prefill ranks.
    """
    if len(hello.ranks) >= len(welcome.ranks):
        return 0
    server, dp_rank = split_dp_instance(hello.instance)
    return (xxhash.xxh3_64_intdigest(server.encode()) + dp_rank) % len(welcome.ranks)
