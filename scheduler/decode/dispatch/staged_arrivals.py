"""Staged transfers on decode: a ring per rank, what its parts are for, and when all of a transfer is in its pages.

Pure, and part of the scheduler's world: events in, effects out. `transfer/staging/receiver.py` knows one ring; this
knows all of them and the pages behind the transfers.
"""

import collections
import dataclasses
from collections.abc import Container, Iterable, Sequence

from ....transfer.data.chunks import PartScatter
from ....transfer.plan.staged_regions import StagedRegion, pages_holding
from ....transfer.protocol.messages import (
    HeadSlice,
    InstanceId,
    PrefillDone,
    StageArrived,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)
from ....transfer.staging.receiver import (
    BadRequest,
    PagesQuiet,
    Post,
    ReceiverEffect,
    ScatterPart,
    StageReceiver,
    TransferLanded,
)
from ...messages.effects import Effect, SendToPeer

Writers = dict[int, list[tuple[int, HeadSlice]]]
"""By decode rank: which prefill ranks stage which blocks to it."""


@dataclasses.dataclass(slots=True)
class _Staged:
    """A transfer under way. `pages` are those from token `token_start` on."""

    token_start: int
    pages: Sequence[int]
    ranks: tuple[int, ...]
    missing: set[int]
    """Ranks that lack a part."""
    done: PrefillDone | None = None
    """Prefill's word that it has written everything, while the last parts are scattered."""


class StagedArrivals:
    """All rings of a decode server. Transfers from peers that stage nothing leave no trace here.

    Pages of a transfer that was closed are still written while it is in `scattering`.
    """

    def __init__(
        self,
        receivers: Sequence[StageReceiver],
        page_size: int,
        counters: "collections.Counter[str]",
        effects: list[Effect],
    ) -> None:
        """One receiver per rank, or none at all. Appends to `effects`."""
        self._receivers = receivers
        self._page_size = page_size
        self._counters = counters
        self._effects = effects
        self._peers: dict[InstanceId, Writers] = {}
        self._open: dict[TransferKey, _Staged] = {}
        self._unquiet: dict[TransferKey, set[int]] = {}
        """Ranks that scatter parts of closed transfers."""

    @property
    def scattering(self) -> Container[TransferKey]:
        return self._unquiet.keys()

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        rings = [receiver.ring for receiver in self._receivers]
        return {
            "staging_ring_bytes": sum(ring.capacity_bytes for ring in rings),
            "staging_ring_bytes_granted": sum(ring.granted_bytes for ring in rings),
            "staging_parts_waiting": sum(ring.waiting for ring in rings),
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Every region belongs to a part; with nothing to do, there are none."""
        for receiver in self._receivers:
            receiver.check_integrity()
            assert not idle or receiver.idle, f"the server is idle, but not the staging ring of rank {receiver.rank}"

    # -- transfers ---------------------------------------------------------------------------------------------

    def peer_up(self, instance: InstanceId, links: Iterable[StagedRegion]) -> None:
        """A prefill server paired, which stages these links."""
        writers: Writers = {}
        for link in links:
            writers.setdefault(link.link.destination, []).append((link.link.source, link.block))
        if writers:
            self._peers[instance] = writers

    def open(
        self, key: TransferKey, instance: InstanceId, token_start: int, token_end: int, pages: Sequence[int]
    ) -> None:
        """Tokens [token_start, token_end) are asked of this peer, into these pages. Before it hears of it."""
        writers = self._peers.get(instance)
        if writers is None or token_start == token_end:
            return
        self._open[key] = _Staged(token_start, pages, tuple(writers), set(writers))
        for rank, blocks in writers.items():
            self._receivers[rank].open(key, instance, token_start, token_end, blocks)

    def close(self, key: TransferKey) -> None:
        """The transfer is over. Nothing more of it is scattered; what is being scattered shows in `scattering`."""
        staged = self._open.pop(key, None)
        if staged is None:
            return
        self._unquiet[key] = set(staged.ranks)
        for rank in staged.ranks:
            self._act(rank, self._receivers[rank].close(key))

    def hold(self, done: PrefillDone) -> bool:
        """Whether the end of a transfer has to wait for its last parts: scattered() returns it then."""
        staged = self._open.get(done.key)
        if staged is None or not staged.missing:
            return False
        staged.done = done
        return True

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        for receiver in self._receivers:
            self._act(receiver.rank, receiver.writer_stopped(key, now, late_writes=late_writes))

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        self._peers.pop(instance, None)
        for receiver in self._receivers:
            self._act(receiver.rank, receiver.peer_closed(instance, now))

    # -- parts -------------------------------------------------------------------------------------------------

    def receive(
        self, instance: InstanceId, message: StageRequest | StageArrived | StageStopped, now: float
    ) -> str | None:
        """A word of prefill about a part; what is wrong with the transfer that it belongs to, if anything."""
        rank = message.part.destination
        if not 0 <= rank < len(self._receivers):
            return f"staging of {message.part}: there is no rank {rank}"
        receiver = self._receivers[rank]
        match message:
            case StageRequest():
                effects = receiver.requested(instance, message)
            case StageArrived():
                effects = receiver.arrived(instance, message)
            case StageStopped():
                effects = receiver.stopped(instance, message, now)
        self._act(rank, effects)
        return next((effect.reason for effect in effects if isinstance(effect, BadRequest)), None)

    def scattered(self, rank: int, part: StagePart) -> PrefillDone | None:
        """A rank has scattered a part. The end of the transfer, when it has waited for this."""
        self._counters["staged_parts"] += 1
        self._act(rank, self._receivers[rank].scattered(part))
        staged = self._open.get(part.key)
        return staged.done if staged is not None and not staged.missing else None

    def due(self, now: float) -> None:
        for receiver in self._receivers:
            self._act(receiver.rank, receiver.due(now))

    def _act(self, rank: int, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case Post(instance=instance, message=message):
                    self._effects.append(SendToPeer(instance, message))
                case ScatterPart(part=part, region=region):
                    self._scatter(rank, part, region.offset)
                case TransferLanded(key=key):
                    self._open[key].missing.remove(rank)
                case PagesQuiet(key=key):
                    self._unquiet[key].remove(rank)
                    if not self._unquiet[key]:
                        del self._unquiet[key]
                case BadRequest():
                    pass  # receive() returns it

    def _scatter(self, rank: int, part: StagePart, offset: int) -> None:
        staged = self._open[part.key]
        start, end = part.token_start - staged.token_start, part.token_end - staged.token_start
        pages, first = pages_holding(staged.pages, self._page_size, start, end)
        size_bytes = self._receivers[rank].part_bytes(part)
        self._counters["staged_bytes"] += size_bytes
        self._effects.append(PartScatter(part, offset, size_bytes, pages, first))
