"""The staged path on prefill, without sockets, memory or clock: asks for regions, says when to write, has a last word.

Each method takes an event and returns what to do about it, in order: messages for decode, parts to write. The caller
sends, gathers and writes, and tells how that ended. Messages may be lost, repeated and reordered: what decode has not
answered is said again, and an answer that comes twice changes nothing.

Every part ends with a last word about its region, StageArrived or StageStopped, and decode frees no region without one:
so the last word is only said when nothing of the part is being written, and it is never followed by a write.
"""

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.copy_runs import PlanError
from ..protocol.messages import (
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)


@dataclass(frozen=True, slots=True)
class WritePart:
    """Gather the part and write it to `offset` of the destination's ring, once; then written() or failed()."""

    part: StagePart
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartFailed:
    """This part will never reach decode. Not said of parts of a transfer that was aborted here."""

    part: StagePart
    reason: str


@dataclass(frozen=True, slots=True)
class WriterStopped:
    """Nothing of this aborted transfer is being written or will be."""

    key: TransferKey
    late_writes: bool


StagingMessage = StageRequest | StageArrived | StageStopped
SenderEffect = StagingMessage | WritePart | PartFailed | WriterStopped


def split_tokens(token_start: int, token_end: int, *, token_bytes: int, limit_bytes: int) -> list[tuple[int, int]]:
    """Cut a chunk into the fewest parts of at most `limit_bytes`, of equal length but for one token.

    A part that fills the ring waits until nobody else has anything in it: give a fraction of the ring as the limit.
    """
    most = limit_bytes // token_bytes
    if most < 1:
        raise PlanError(f"one token takes {token_bytes} bytes, a part of the staging ring has {limit_bytes}")
    tokens = token_end - token_start
    parts = -(-tokens // most)
    cuts = [token_start + tokens * index // parts for index in range(parts + 1)] if parts else []
    return list(itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True)
class PeerRing:
    """The ring of one decode rank, as announced in its Hello."""

    epoch: int
    size_bytes: int


class _Sending(enum.Enum):
    REQUESTED = enum.auto()
    GRANTED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True)
class _Outgoing:
    """A part that decode has not called over yet. `repeat` is our last word, said again when no answer comes."""

    part: StagePart
    size_bytes: int
    repeat: StagingMessage
    said_at: float
    state: _Sending = _Sending.REQUESTED
    computed: bool = False
    grant: StageGrant | None = None


class StageSender:
    """All parts that prefill has under way to one decode instance, of any of its ranks to any of decode's.

    A new instance needs a new StageSender, and a part is requested once: a retry is the transfer's next generation.
    """

    def __init__(self, rings: Mapping[int, PeerRing], *, resend_after_s: float = 1.0) -> None:
        self._rings = dict(rings)
        self._resend_after_s = resend_after_s
        self._parts: dict[StagePart, _Outgoing] = {}
        self._stopping: set[TransferKey] = set()
        """Aborted transfers with writes under way."""

    @property
    def idle(self) -> bool:
        return not self._parts and not self._stopping

    def request(self, part: StagePart, size_bytes: int, now: float) -> list[SenderEffect]:
        """Ask for room. Early: the grant should be here by the time that the part is computed.

        Raises PlanError when the destination's ring can never hold it: split_tokens() comes first.
        """
        ring = self._rings.get(part.destination)
        if ring is None or size_bytes > ring.size_bytes:
            size = "no ring" if ring is None else f"a ring of {ring.size_bytes} bytes"
            raise PlanError(f"{part} has {size_bytes} bytes, decode rank {part.destination} has {size}")
        assert part.epoch == ring.epoch, f"{part} is for an earlier ring"
        assert part not in self._parts, f"{part} was requested before"
        message = StageRequest(part, size_bytes)
        self._parts[part] = _Outgoing(part, size_bytes, message, now)
        return [message]

    def computed(self, part: StagePart) -> list[SenderEffect]:
        """The part's KV is in the source pages (or will be, in stream order). Unknown parts have failed before."""
        outgoing = self._parts.get(part)
        if outgoing is None:
            return []
        outgoing.computed = True
        return self._start(outgoing)

    def granted(self, message: StageGrant, now: float) -> list[SenderEffect]:
        """A region for a part that waits for one. Of a part that is none of ours we say that it will not be written."""
        outgoing = self._parts.get(message.part)
        if outgoing is None:
            return [StageStopped(message.part)]
        if outgoing.state is not _Sending.REQUESTED:
            return []
        ring = self._rings[message.part.destination]
        if not 0 <= message.offset <= ring.size_bytes - outgoing.size_bytes:
            reason = f"decode granted offset {message.offset} of a ring of {ring.size_bytes} bytes"
            return [PartFailed(message.part, reason), *self._stop(outgoing, now)]
        outgoing.state, outgoing.grant = _Sending.GRANTED, message
        return self._start(outgoing)

    def written(self, part: StagePart, now: float) -> list[SenderEffect]:
        """Every byte of the part is in its region, and the source is not read any more."""
        outgoing = self._parts[part]
        assert outgoing.state is _Sending.WRITING, f"{part} was not being written"
        if part.key in self._stopping:
            return [*self._stop(outgoing, now), *self._check_stopped(part.key)]
        assert outgoing.grant is not None, "a part is written into its grant"
        outgoing.state = _Sending.WRITTEN
        return [self._say(outgoing, StageArrived(part, outgoing.grant.region), now)]

    def failed(self, part: StagePart, reason: str, now: float, *, late_writes: bool) -> list[SenderEffect]:
        """The write has ended before its end; with `late_writes`, bytes of it may still land."""
        outgoing = self._parts[part]
        assert outgoing.state is _Sending.WRITING, f"{part} was not being written"
        effects = self._stop(outgoing, now, late_writes=late_writes)
        if part.key not in self._stopping:
            return [PartFailed(part, reason), *effects]
        return [*effects, *self._check_stopped(part.key)]

    def freed(self, message: StageFree) -> list[SenderEffect]:
        """Decode is done with the part. While it is written that cannot be undone: the next word brings this again."""
        outgoing = self._parts.get(message.part)
        if outgoing is None or outgoing.state is _Sending.WRITING:
            return []
        del self._parts[message.part]
        if outgoing.state in (_Sending.REQUESTED, _Sending.GRANTED):
            return [PartFailed(message.part, "decode has given the transfer up")]
        return []

    def abort(self, key: TransferKey, now: float) -> list[SenderEffect]:
        """Start no more writes for this transfer. Answers WriterStopped once, when those under way have ended."""
        effects: list[SenderEffect] = []
        self._stopping.add(key)
        for outgoing in [outgoing for part, outgoing in self._parts.items() if part.key == key]:
            if outgoing.state in (_Sending.REQUESTED, _Sending.GRANTED):
                effects += self._stop(outgoing, now)
        return [*effects, *self._check_stopped(key)]

    def due(self, now: float) -> list[SenderEffect]:
        """What to say again, because decode has not answered it for long."""
        effects: list[SenderEffect] = []
        for outgoing in self._parts.values():
            silent = outgoing.state in (_Sending.GRANTED, _Sending.WRITING)
            if not silent and now - outgoing.said_at >= self._resend_after_s:
                effects.append(self._say(outgoing, outgoing.repeat, now))
        return effects

    def _start(self, outgoing: _Outgoing) -> list[SenderEffect]:
        if outgoing.state is not _Sending.GRANTED or not outgoing.computed:
            return []
        assert outgoing.grant is not None, "a granted part has its grant"
        outgoing.state = _Sending.WRITING
        return [WritePart(outgoing.part, outgoing.grant.offset, outgoing.size_bytes)]

    def _stop(self, outgoing: _Outgoing, now: float, *, late_writes: bool = False) -> list[SenderEffect]:
        outgoing.state = _Sending.STOPPED
        return [self._say(outgoing, StageStopped(outgoing.part, late_writes), now)]

    def _say(self, outgoing: _Outgoing, message: StagingMessage, now: float) -> StagingMessage:
        outgoing.repeat, outgoing.said_at = message, now
        return message

    def _check_stopped(self, key: TransferKey) -> list[SenderEffect]:
        """WriterStopped, once nothing is being written. Counts the late writes that decode may not have heard of."""
        outgoing = [outgoing for part, outgoing in self._parts.items() if part.key == key]
        if any(one.state is _Sending.WRITING for one in outgoing):
            return []
        self._stopping.remove(key)
        words = [one.repeat for one in outgoing]
        return [WriterStopped(key, any(isinstance(word, StageStopped) and word.late_writes for word in words))]
