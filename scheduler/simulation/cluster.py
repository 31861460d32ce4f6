"""Simulates prefill and decode servers under a load, with the schedulers that real servers run.

Only time is a model (`step_times.py`): requests, pages, chunks, batches, prefix caches and the choice of prefill
servers are decided by the real code. HiSparse, staging rings and the KV store are not simulated.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from functools import partial

from ...common.sampling import SamplingParams, TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.page_hashes import pack_short_hashes, page_hashes
from ...memory.pages import PageAllocator
from ...transfer.control.events import LoadReported, MessageReceived, PeerClosed, PeerLost
from ...transfer.data.chunks import ChunkWrite, ChunkWritten
from ...transfer.protocol.messages import (
    Abort,
    AnyMessage,
    InstanceId,
    KvDestination,
)
from ..decode.placement.peers import PrefillPeer
from ..decode.requests.limits import DecodeLimits
from ..decode.rooms.batch import DecodeStep
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import SendToFrontend, SendToPeer
from ..messages.frontend import Failed, Finished, Submit, Tokens
from ..messages.ranks import CancelChunks, ChunkReport, CommandDone, CopyDone, CopyPage, DropPages, LoadPages, SavePages
from ..messages.step import StepResult
from ..prefill.limits import PrefillLimits
from ..prefill.request import PageSpace, PrefillRequest, PrefillStep
from ..prefill.scheduler import PrefillScheduler
from .clock import Clock, Cores, Event
from .step_times import StepTimes

HEARTBEAT_S = 0.4
"""How often servers report their load, as by default."""
LOST_AFTER_S = 1.8
"""After this time without a message a server is lost, as by default."""
TOKEN = TokenLogprob(1, None)


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """One server of each role. `cores` is what a step of either uses, if servers share a machine."""

    decode: DecodeLimits
    decode_pages: int
    prefill: PrefillLimits
    prefill_pages: int
    cores: int = 1


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to simulate; `output_tokens` are always generated. With `follows`, a client sends it when its previous
    request, the one at that index, has ended.
    """

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    follows: int | None = None


@dataclasses.dataclass
class Outcome:
    """What the client of a request sees. Times count from the start of the run."""

    at_s: float
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    ended_s: float | None = None
    timeline: dict[str, float] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str | None = None


class _Prefill:
    def __init__(self, number: int, settings: ServerSettings) -> None:
        self.instance = InstanceId(f"prefill {number}")
        self.scheduler = PrefillScheduler(settings.prefill, PageAllocator[KvPage](settings.prefill_pages))
        self.steps: collections.deque[PrefillStep] = collections.deque()
        self.computing = False
        self.step_started = self.busy_s = 0.0
        self.link_free_at = 0.0
        self.after_step: dict[int, list[Event]] = {}
        """Writes that wait for a step, by its command id."""
        self.cancelled: set[tuple[InstanceId, object]] = set()
        self.slowness = 1.0
        """Its steps take this many times as long."""
        self.dead = False


class _Decode:
    def __init__(self, number: int, settings: ServerSettings) -> None:
        self.instance = InstanceId(f"decode {number}")
        self.scheduler = DecodeScheduler(settings.decode, PageAllocator[KvPage](settings.decode_pages), ())
        self.commands: collections.deque[DecodeStep | CopyPage | SavePages | LoadPages] = collections.deque()
        """For the ranks, in order."""
        self.turns_at = 0.0
        """When its scheduler turns next without an event."""
        self.computing = False
        self.step_started = self.busy_s = 0.0


class Cluster:
    """`prefills` and `decodes` servers of the same settings. A router gives requests to decode servers in turn."""

    def __init__(
        self,
        settings: ServerSettings,
        times: StepTimes,
        *,
        prefills: int,
        decodes: int,
        cores: int | None = None,
        one_gpu: bool = False,
        hashes: bool = False,
    ) -> None:
        """With `cores`, all servers share a machine with that many cores; with `one_gpu`, a GPU. With `hashes`, prompts
        share prefixes, and decode servers compare them with what prefill servers have cached.
        """
        cores = 1 if one_gpu else cores
        self._settings = settings
        self._times = times
        self._hashes = hashes
        self._clock = Clock()
        self._cores = Cores(self._clock, cores, times)
        self._prefills = [_Prefill(number, settings) for number in range(prefills)]
        self._decodes = [_Decode(number, settings) for number in range(decodes)]
        self._open = 0
        self._outcomes: dict[str, Outcome] = {}
        self._after: dict[str, Event] = {}
        """What follows the end of a request."""
        for prefill in self._prefills:
            for decode in self._decodes:
                space = PageSpace(settings.decode_pages, settings.decode.page_size)
                prefill.scheduler.peer_up(decode.instance, space)
                peer = PrefillPeer(
                    prefill.instance,
                    {f"{prefill.instance}:1"},
                    capacity=settings.prefill_pages * settings.prefill.page_size,
                    shares_device=cores is not None and 2 * settings.cores > cores,
                    shares_gpu=one_gpu,
                )
                decode.scheduler.peer_up(peer)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Simulate until every request has ended."""
        self._open = len(arrivals)
        for number, arrival in enumerate(arrivals):
            self._outcomes[str(number)] = Outcome(arrival.at_s, prompt_tokens=len(arrival.prompt))
            if arrival.follows is None:
                self._clock.at(arrival.at_s, partial(self._submit, number, arrival))
            else:
                self._after[str(arrival.follows)] = partial(self._submit, number, arrival)
        self._heartbeat()
        while self._open and self._clock.run_next():
            pass
        return list(self._outcomes.values())

    def slow_down(self, number: int, at_s: float, slowness: float) -> None:
        """From `at_s` on, steps of this prefill server take `slowness` times as long. Call before `run`."""

        def change() -> None:
            self._prefills[number].slowness = slowness

        self._clock.at(at_s, change)

    def kill(self, number: int, at_s: float) -> None:
        """This prefill server dies at `at_s`; decode servers notice it by its silence. Call before `run`."""
        server = self._prefills[number]

        def die() -> None:
            server.dead = True
            self._clock.after(LOST_AFTER_S, lose)

        def lose() -> None:
            for decode in self._decodes:
                for event in (PeerLost(server.instance, "silent"), PeerClosed(server.instance)):
                    decode.scheduler.handle(event, self._clock.now)
                self._turn_decode(decode)

        self._clock.at(at_s, die)

    def counters(self) -> collections.Counter[str]:
        """Of all decode servers together."""
        found: collections.Counter[str] = collections.Counter()
        for decode in self._decodes:
            found.update(decode.scheduler.counters)
        return found

    def busy(self) -> tuple[float, float]:
        """The share of the time in which a prefill server, and a decode server, computed."""
        seconds = max(self._clock.now, 1e-9)
        return (
            sum(server.busy_s for server in self._prefills) / seconds / max(1, len(self._prefills)),
            sum(server.busy_s for server in self._decodes) / seconds / len(self._decodes),
        )

    def _submit(self, number: int, arrival: Arrival) -> None:
        self._outcomes[str(number)].at_s = self._clock.now
        decode = self._decodes[number % len(self._decodes)]
        sizes = decode.scheduler.peers.hashed_page_sizes if self._hashes else ()
        hashes = {size: pack_short_hashes(page_hashes(arrival.prompt, size)) for size in sizes}
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens, ignore_eos=True)
        decode.scheduler.handle(Submit(str(number), arrival.prompt, sampling, page_hashes=hashes), self._clock.now)
        self._turn_decode(decode)

    def _heartbeat(self) -> None:
        for prefill in self._prefills:
            for decode in self._decodes if not prefill.dead else ():
                decode.scheduler.handle(LoadReported(prefill.instance, prefill.scheduler.load()), self._clock.now)
                prefill.scheduler.handle(LoadReported(decode.instance, decode.scheduler.load()), self._clock.now)
        for prefill in self._prefills:
            self._turn_prefill(prefill)
        for decode in self._decodes:
            self._turn_decode(decode)
        self._clock.after(HEARTBEAT_S, self._heartbeat)

    # -- decode ------------------------------------------------------------------------------------------------

    def _turn_decode(self, server: _Decode) -> None:
        now = self._clock.now
        server.scheduler.advance(now)
        self._perform_decode(server)
        while (step := server.scheduler.next_step(now)) is not None:
            self._perform_decode(server)
            server.commands.append(step)
        self._perform_decode(server)
        self._run_commands(server)
        pause_s = server.scheduler.pause_s
        if 0 < pause_s < math.inf and now + pause_s > server.turns_at:
            server.turns_at = now + pause_s
            self._clock.at(server.turns_at, partial(self._turn_decode, server))

    def _perform_decode(self, server: _Decode) -> None:
        for effect in server.scheduler.take_effects():
            match effect:
                case SendToPeer(instance=instance):
                    target = next(prefill for prefill in self._prefills if prefill.instance == instance)
                    self._clock.after(self._times.message_s, partial(self._receive_at_prefill, server, target, effect))
                case SendToFrontend(message=message):
                    self._respond(message)
                case CopyPage() | SavePages() | LoadPages():
                    server.commands.append(effect)
                case DropPages():
                    pass
                case other:
                    raise TypeError(f"not simulated: {other!r}")

    def _run_commands(self, server: _Decode) -> None:
        """The ranks take their commands in order; only steps take time."""
        while server.commands and not server.computing:
            match server.commands[0]:
                case DecodeStep() as step:
                    contexts = [row.position + 1 for row in step.rows]
                    seconds = self._times.decode_s(contexts, ((chunk.start, chunk.end) for chunk in step.chunks))
                    server.computing, server.step_started = True, self._clock.now
                    self._cores.run("decode", seconds, self._settings.cores, lambda: self._end_decode_step(server))
                    return
                case CopyPage(command_id=command_id):
                    server.commands.popleft()
                    server.scheduler.handle(CommandDone(0, command_id), self._clock.now)
                case SavePages(copy=copy) | LoadPages(copy=copy):
                    server.commands.popleft()
                    server.scheduler.handle(CopyDone(0, copy, 0.0), self._clock.now)
            self._perform_decode(server)

    def _end_decode_step(self, server: _Decode) -> None:
        step = server.commands.popleft()
        assert isinstance(step, DecodeStep), "the ranks run commands in order"
        server.computing = False
        server.busy_s += self._clock.now - server.step_started
        results = [StepResult((TOKEN,), ())] * len(step.rows)
        for chunk in step.chunks:
            ends = chunk.last and chunk.owner.prompt.local is chunk.owner
            results.append(StepResult((TOKEN,) * chunk.owner.prompt.samples if ends else (), ()))
        server.scheduler.step_done(step.command_id, results, self._clock.now)
        self._turn_decode(server)

    def _respond(self, message: object) -> None:
        now = self._clock.now
        match message:
            case Tokens(rid=rid, token_ids=tokens):
                self._outcomes[rid].token_times_s += [now] * len(tokens)
            case Finished(rid=rid, timeline=timeline, cached_tokens=cached):
                outcome = self._outcomes[rid]
                outcome.timeline, outcome.cached_tokens = timeline, cached
                self._end(rid)
            case Failed(rid=rid, status=status, code=code):
                self._outcomes[rid].failure = f"{status} {code}"
                self._end(rid)
            case _:
                pass

    def _end(self, rid: str) -> None:
        self._outcomes[rid].ended_s = self._clock.now
        self._open -= 1
        if (following := self._after.pop(rid, None)) is not None:
            self._clock.after(0.0, following)

    def _receive_at_decode(self, source: _Prefill, target: _Decode, message: AnyMessage) -> None:
        target.scheduler.handle(MessageReceived(source.instance, message, ()), self._clock.now)
        self._turn_decode(target)

    # -- prefill -----------------------------------------------------------------------------------------------

    def _turn_prefill(self, server: _Prefill) -> None:
        now = self._clock.now
        if server.dead:
            return
        server.scheduler.advance(now)
        self._perform_prefill(server)
        while (step := server.scheduler.next_step(now)) is not None:
            server.steps.append(step)
        self._perform_prefill(server)
        if server.steps and not server.computing:
            server.computing, server.step_started = True, now
            seconds = self._times.prefill_s((chunk.start, chunk.end) for chunk in server.steps[0].chunks)
            seconds *= server.slowness
            self._cores.run("prefill", seconds, self._settings.cores, lambda: self._end_prefill_step(server))

    def _perform_prefill(self, server: _Prefill) -> None:
        for effect in server.scheduler.take_effects():
            match effect:
                case SendToPeer(instance=instance, message=message):
                    target = next(decode for decode in self._decodes if decode.instance == instance)
                    self._clock.after(self._times.message_s, partial(self._receive_at_decode, server, target, message))
                case ChunkWrite(after=None):
                    self._write(server, effect)
                case ChunkWrite(after=int(command_id)):
                    server.after_step.setdefault(command_id, []).append(partial(self._write, server, effect))
                case CancelChunks(instance=instance, key=key):
                    server.cancelled.add((instance, key))
                case SendToFrontend():
                    pass
                case other:
                    raise TypeError(f"not simulated: {other!r}")

    def _end_prefill_step(self, server: _Prefill) -> None:
        if server.dead:
            return
        step = server.steps.popleft()
        server.computing = False
        server.busy_s += self._clock.now - server.step_started
        for write in server.after_step.pop(step.command_id, ()):
            write()
        results = [StepResult((TOKEN,) if chunk.last else (), ()) for chunk in step.chunks]
        server.scheduler.step_done(step.command_id, results, self._clock.now)
        self._turn_prefill(server)

    def _write(self, server: _Prefill, chunk: ChunkWrite) -> None:
        """Write a chunk after those that the server has begun to write."""
        now, tokens = self._clock.now, chunk.token_end - chunk.token_start
        server.link_free_at = max(now, server.link_free_at) + tokens * self._times.kv_token_s

        def end() -> None:
            if server.dead:
                return
            ok = (chunk.instance, chunk.key) not in server.cancelled
            written = ChunkWritten(
                chunk.instance, chunk.key, chunk.token_start, chunk.token_end, ok=ok, reason="" if ok else "cancelled"
            )
            server.scheduler.handle(ChunkReport(0, written), self._clock.now)
            self._turn_prefill(server)

        self._clock.at(server.link_free_at + self._times.write_s, end)

    def _receive_at_prefill(self, source: _Decode, target: _Prefill, effect: SendToPeer) -> None:
        if target.dead:
            return
        match effect.message:
            case KvDestination() as destination:
                now = self._clock.now
                request = PrefillRequest.received(source.instance, destination, effect.arrays, now)
                target.scheduler.receive(request, now)
            case Abort() as abort:
                target.scheduler.handle(MessageReceived(source.instance, abort, ()), self._clock.now)
            case other:
                raise TypeError(f"not simulated: {other!r}")
        self._turn_prefill(target)
