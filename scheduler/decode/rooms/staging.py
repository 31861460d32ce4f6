"""The staged path on decode: grants regions of the staging rings, issues scatters, and tracks what has landed.

Pure: events in, effects out. Messages arrive once and in order (reliable_channel.py), but they may be about a transfer
that is closed here already.

Two rules keep memory safe.
- A region that may still be written has an owner. It is freed after the final message of its writer (StageArrived,
  StageStopped, or the end of the transfer's writer), and after a quarantine where late writes may land. A closed
  connection counts as a final message with late writes; silence does not count.
- Only scatters of our own ranks write the destination pages. A scatter holds the pages until it has ended, regardless
  of its writers.

Prefill servers of earlier versions repeat each message until it is answered: a repetition changes nothing, and
StageFree answers a message about a part that is not held.
"""

import collections
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant, pages_holding
from ....transfer.data.chunks import PartScatter
from ....transfer.plan.ring import Region, StagingRing
from ....transfer.plan.staged_regions import StagedRegion
from ....transfer.protocol.messages import (
    HeadSlice,
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)
from ...messages.effects import Effect, SendToPeer
from ..memory.holds import Holds

Source = tuple[int, int, HeadSlice]
"""A decode rank, a prefill rank that stages KV to it, and the layers and heads that it stages."""


@dataclass(frozen=True, slots=True)
class RankRing:
    """The staging ring of one rank. `cell_bytes` is one token in one head of one layer, all planes together."""

    ring: StagingRing[StagePart]
    cell_bytes: int


class _State(enum.Enum):
    QUEUED = enum.auto()
    """It waits for a free region of the ring."""
    GRANTED = enum.auto()
    """It has a region, which prefill may write, even after the transfer is closed."""
    SCATTERING = enum.auto()
    """Prefill has written the region; our rank copies it to the destination pages."""
    QUARANTINED = enum.auto()
    """Prefill has stopped without completing it; late writes may land in the region until `release_at`."""


@dataclass(slots=True)
class _Part:
    """A part that has a region or waits for one."""

    part: StagePart
    instance: InstanceId
    state: _State = _State.QUEUED
    region: Region | None = None
    release_at: float = math.inf
    pages: PageGrant[KvPage] | None = None
    """Held while they are SCATTERING."""


@dataclass(slots=True)
class _Transfer:
    """An open transfer. Its `grant` has the pages of the prompt from token 0 on."""

    instance: InstanceId
    token_start: int
    token_end: int
    grant: PageGrant[KvPage]
    next_token: dict[Source, int]
    """Where the next part begins, or later: a source requests its parts in the order of their tokens."""
    missing_tokens: int
    """Tokens that are not in their pages yet, summed over the sources."""

    def problem(self, part: StagePart) -> str | None:
        """Why this new part does not belong to the transfer, or None. Without this check, a peer could make us store an
        unlimited number of parts.
        """
        next_token = self.next_token.get(_source(part))
        if next_token is None:
            return f"rank {part.writer} does not write {part.block} to rank {part.destination}"
        if not next_token <= part.token_start < part.token_end <= self.token_end:
            return f"of tokens [{self.token_start}, {self.token_end}), those before {next_token} are requested already"
        return None


class StagedArrivals:
    """All staging rings of a decode server. Transfers from prefill servers without staging are not tracked here."""

    def __init__(
        self,
        rings: Sequence[RankRing],
        page_size: int,
        quarantine_s: float,
        counters: "collections.Counter[str]",
        effects: list[Effect],
        holds: Holds,
    ) -> None:
        """One ring per rank, or none at all. Appends to `effects`. Pages are held in `holds`."""
        self._rings = rings
        self._page_size = page_size
        self._quarantine_s = quarantine_s
        self._counters = counters
        self._effects = effects
        self._holds = holds
        self._sources: dict[InstanceId, list[Source]] = {}
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._parts: dict[StagePart, _Part] = {}

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        rings = [one.ring for one in self._rings]
        return {
            "staging_ring_bytes": sum(ring.capacity_bytes for ring in rings),
            "staging_ring_bytes_granted": sum(ring.granted_bytes for ring in rings),
            "staging_parts_waiting": sum(ring.waiting for ring in rings),
        }

    @property
    def idle(self) -> bool:
        """No part is granted, scattered or in quarantine."""
        return not self._parts

    def check_integrity(self, *, idle: bool) -> None:
        """Every region and every queued request belongs to one part, in the right state; with `idle`, none exists."""
        assert not idle or not self._transfers, f"the server is idle, but staging expects parts of {[*self._transfers]}"
        assert not idle or not self._parts, f"the server is idle, but its staging rings hold {[*self._parts]}"
        for rank, one in enumerate(self._rings):
            one.ring.check_integrity()
            regions = [held.region for part, held in self._parts.items() if part.destination == rank]
            assert regions.count(None) == one.ring.waiting
            assert sum(region.size_bytes for region in regions if region is not None) == one.ring.granted_bytes
        for held in self._parts.values():
            assert (held.region is None) == (held.state is _State.QUEUED), held
            assert (held.release_at < math.inf) == (held.state is _State.QUARANTINED), held

    # -- transfers ---------------------------------------------------------------------------------------------

    def peer_up(self, instance: InstanceId, regions: Iterable[StagedRegion]) -> None:
        """A prefill server paired; it stages these regions."""
        sources = [(one.region.destination, one.region.source, one.block) for one in regions]
        if sources:
            self._sources[instance] = sources

    def open(
        self, key: TransferKey, instance: InstanceId, token_start: int, token_end: int, grant: PageGrant[KvPage]
    ) -> None:
        """Expect tokens [token_start, token_end) from this peer. Call before the transfer is sent to the peer."""
        sources = self._sources.get(instance)
        if sources is None or token_start == token_end:
            return
        assert key not in self._transfers, f"transfer {key} is already open"
        missing_tokens = (token_end - token_start) * len(sources)
        next_token = dict.fromkeys(sources, token_start)
        self._transfers[key] = _Transfer(instance, token_start, token_end, grant, next_token, missing_tokens)

    def close(self, key: TransferKey) -> None:
        """The transfer has ended or failed: issue no new scatters. Running ones hold its pages.

        Regions that the writer may still write stay in use until it has stopped. Unknown keys are ignored.
        """
        if self._transfers.pop(key, None) is not None:
            for held in self._parts_of(key):
                if held.state is _State.QUEUED:
                    self._release(held)
            self._grant(range(len(self._rings)))

    def misses(self, key: TransferKey) -> bool:
        """Whether parts of a transfer are not in their pages yet."""
        transfer = self._transfers.get(key)
        return transfer is not None and transfer.missing_tokens > 0

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """No prefill rank writes this transfer any more (AbortAck, TransferFailed)."""
        self._stop(self._parts_of(key), late_writes, now)

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection of this peer is closed: only what the network still holds may land."""
        self._sources.pop(instance, None)
        self._stop([held for held in self._parts.values() if held.instance == instance], True, now)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: bytes that its kernel has received are still to be written."""
        for held in self._parts.values():
            if held.state is _State.QUARANTINED:
                held.release_at = min(held.release_at + absent_s, now + self._quarantine_s)

    # -- parts -------------------------------------------------------------------------------------------------

    def receive(
        self, instance: InstanceId, message: StageRequest | StageArrived | StageStopped, now: float
    ) -> str | None:
        """A message of prefill about a part. Returns the reason if its transfer has to fail."""
        part = message.part
        held = self._parts.get(part)
        if held is not None and held.instance != instance:
            return None
        transfer = self._transfers.get(part.key)
        match message:
            case StageRequest() if held is None and transfer is not None and transfer.instance == instance:
                problem = transfer.problem(part) or self._size_problem(message)
                if problem is not None:
                    return f"staging of {part}: {problem}"
                transfer.next_token[_source(part)] = part.token_end
                self._parts[part] = _Part(part, instance)
                self._rings[part.destination].ring.request(part, message.size_bytes)
                self._grant([part.destination])
            case StageStopped(late_writes=late_writes) if held is not None:
                self._stop([held], late_writes, now)
            case StageArrived() if held is not None and held.state is _State.GRANTED and held.region is not None:
                if transfer is None:
                    self._free(held)
                    self._grant([part.destination])
                else:
                    held.state, held.pages = _State.SCATTERING, self._holds.hold(transfer.grant)
                    self._scatter(transfer, part, held.region.offset)
            case _ if held is None:
                self._effects.append(SendToPeer(instance, StageFree(part)))
        return None

    def scattered(self, part: StagePart) -> None:
        """The rank has scattered a part: it is in its pages."""
        held = self._parts[part]
        assert held.pages is not None, f"{part} was not being scattered"
        self._holds.release(held.pages)
        self._counters["staged_parts"] += 1
        self._free(held)
        self._grant([part.destination])
        if (transfer := self._transfers.get(part.key)) is not None:
            transfer.missing_tokens -= part.tokens

    def due(self, now: float) -> None:
        """Free the regions whose quarantine has passed."""
        for held in [held for held in self._parts.values() if held.release_at <= now]:
            self._free(held)
        self._grant(range(len(self._rings)))

    def _size_problem(self, message: StageRequest) -> str | None:
        size_bytes, capacity_bytes = self._size(message.part), self._rings[message.part.destination].ring.capacity_bytes
        if message.size_bytes != size_bytes:
            return f"it requests {message.size_bytes} bytes, these tokens have {size_bytes}"
        if size_bytes > capacity_bytes:
            return f"it has {size_bytes} bytes, the ring has {capacity_bytes}"
        return None

    def _size(self, part: StagePart) -> int:
        return part.tokens * part.block.cells * self._rings[part.destination].cell_bytes

    def _scatter(self, transfer: _Transfer, part: StagePart, offset: int) -> None:
        pages, first = pages_holding(transfer.grant.pages, self._page_size, part.token_start, part.token_end)
        size_bytes = self._size(part)
        self._counters["staged_bytes"] += size_bytes
        self._effects.append(PartScatter(part, offset, size_bytes, pages, first))

    def _stop(self, parts: Iterable[_Part], late_writes: bool, now: float) -> None:
        """The writers of these parts have stopped. Only the first report counts, because a later one may not mention
        late writes.
        """
        for held in parts:
            if held.state is _State.QUEUED or (held.state is _State.GRANTED and not late_writes):
                self._free(held)
            elif held.state is _State.GRANTED:
                held.state, held.release_at = _State.QUARANTINED, now + self._quarantine_s
        self._grant(range(len(self._rings)))

    def _free(self, held: _Part) -> None:
        """Remove a part and send StageFree. The caller then grants what became free, once."""
        self._release(held)
        self._effects.append(SendToPeer(held.instance, StageFree(held.part)))

    def _release(self, held: _Part) -> None:
        del self._parts[held.part]
        ring = self._rings[held.part.destination].ring
        if held.region is None:
            ring.withdraw(held.part)
        else:
            ring.free(held.region.position)

    def _grant(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for part, region in self._rings[rank].ring.grant():
                held = self._parts[part]
                held.state, held.region = _State.GRANTED, region
                self._effects.append(SendToPeer(held.instance, StageGrant(part, region.position, region.offset)))

    def _parts_of(self, key: TransferKey) -> list[_Part]:
        return [held for part, held in self._parts.items() if part.key == key]


def _source(part: StagePart) -> Source:
    return part.destination, part.writer, part.block
