"""The simulator with time: a step takes as long as its tokens need, messages have a latency.

Memory contents are not tracked (`simulator.py` does that). These simulations measure waiting times.
"""

import heapq
import itertools
from collections.abc import Callable

from pdserve.common.arithmetic import ceil_div
from pdserve.common.sampling import SamplingParams
from pdserve.memory.page_hashes import pack_short_hashes, page_hashes
from pdserve.memory.pages import pages_for
from pdserve.scheduler.decode.memory.hot_buffers import HotLimits
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.rooms.batch import DecodeStep
from pdserve.scheduler.messages.effects import Effect, SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Failed, Finished, Submit, Tokens
from pdserve.scheduler.messages.ranks import ChunkReport, OpenHot, ResizeHot, WriteBackRows
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.transfer.control.events import LoadReported
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import InstanceId, KvDestination, PrefillDone, TransferKey
from tests.scheduler.simulation.simulator import DECODE, Server, Simulator, Write, prefill_results, sampled

LATENCY_S = 0.001
"""Latency of a message, and of a write."""
HEARTBEAT_S = 0.4
PAGE_SIZE = 16
VOCAB = 1000
OTHER = InstanceId("another decode server")


def decode_limits(**changes: object) -> DecodeLimits:
    """Limits like those of the default settings."""
    settings: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "max_running_requests": 32,
        "max_queued_requests": 256,
        "growth_tokens": 128,
        "retract_pages": 0,
        "queue_timeout_s": 600.0,
        "prefill_wait_s": 3.0,
        "prefill_timeout_s": 600.0,
        "request_timeout_s": 6000.0,
        "quarantine_s": 6.0,
        **changes,
    }
    return DecodeLimits(**settings)  # type: ignore[arg-type]  # by name


class TimedSimulator(Simulator):
    """Prefill servers compute `tokens_per_s`, in steps of at least `least_step_s`; decode steps take `step_s`. Another
    decode server may load the first prefill server (`flood`).
    """

    def __init__(
        self,
        *,
        tokens_per_s: float,
        step_s: float = 0.01,
        least_step_s: float = 0.0,
        pool_tokens: int = 65536,
        prefill_tokens: int = 65536,
        limits: DecodeLimits | None = None,
        chunk_size: int = 512,
        prefill_page_size: int = PAGE_SIZE,
        max_queued: int = 256,
        endpoints: tuple[str, ...] = ("a:1",),
        reports: bool = True,
        hot: HotLimits | None = None,
    ) -> None:
        """Without `reports`, prefill servers report no window, like those of an older release."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turns = itertools.count()
        self._tokens_per_s = tokens_per_s
        self._step_s = step_s
        self._least_step_s = least_step_s
        self._stepping = False
        self._other_priority = 0
        self._computing: set[str] = set()
        self._after_step: dict[tuple[str, int], list[Callable[[], None]]] = {}
        """The ends of writes that wait for a step, by prefill server and command id."""
        self.busy_s = 0.0
        """Compute time of all prefill servers."""
        self.ended_at: dict[str, float] = {}
        """Time of the terminal message of each request."""
        self.timelines: dict[str, dict[str, float]] = {}
        self.most_at_prefill = 0
        """Most tokens of this decode server at one prefill server."""
        prefill = PrefillLimits(
            page_size=prefill_page_size,
            chunk_size=chunk_size,
            max_queued_requests=max_queued,
            context_length=1 << 20,
            vocab_size=VOCAB,
            steps_in_flight=2,
        )
        super().__init__(
            limits=limits or decode_limits(),
            pages=pool_tokens // PAGE_SIZE,
            prefill=prefill,
            prefill_pages=prefill_tokens // prefill_page_size,
            endpoints=endpoints,
            hot=hot,
        )
        if reports:
            self._report()

    def ask(
        self,
        rid: str,
        tokens: int,
        new: int = 1,
        *,
        priority: int = 0,
        endpoint: str | None = None,
        follows: str | None = None,
    ) -> None:
        """Submit a prompt that shares no prefix with any other."""
        prompt = _prompt(next(self._numbers), tokens)
        self.submit_prompt(rid, prompt, new, endpoint=endpoint, priority=priority, follows=follows)

    def submit_prompt(
        self,
        rid: str,
        prompt: tuple[int, ...],
        new: int,
        *,
        endpoint: str | None = None,
        priority: int = 0,
        follows: str | None = None,
    ) -> None:
        """Submit a prompt, with the hashes that the frontend would compute."""
        self.submitted.add(rid)
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        hashes = {size: pack_short_hashes(page_hashes(prompt, size)) for size in self.decode.peers.hashed_page_sizes}
        submit = Submit(rid, prompt, sampling, endpoint, priority=priority, follows=follows, page_hashes=hashes)
        self.decode.handle(submit, self.now)
        self.act()

    def flood(self, prompts: int, tokens: int, priority: int = 0) -> None:
        """Another decode server keeps `prompts` prompts at the first prefill server."""
        self._other_priority = priority
        server = next(iter(self.servers.values()))
        server.scheduler.peer_up(OTHER, PageSpace(1 << 20, PAGE_SIZE))
        for _ in range(prompts):
            self._send_other(server, tokens)

    def _send_other(self, server: Server, tokens: int) -> None:
        number = next(self._numbers)
        wanted = KvDestination(
            key=TransferKey(number, 1),
            rid=f"other {number}",
            sampling=SamplingParams(max_new_tokens=1),
            timeout_s=1e6,
            priority=self._other_priority,
        )
        pages = list(range(pages_for(tokens, PAGE_SIZE)))
        server.scheduler.receive(PrefillRequest(OTHER, wanted, _prompt(number, tokens), pages, self.now), self.now)

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self, until: Callable[[], object], *, most_s: float = 1000.0) -> None:
        """Let time pass until the condition holds."""
        self._turn_all()
        end = self.now + most_s
        while not until():
            time, _, event = heapq.heappop(self._events)
            assert time <= end, f"not within {most_s} s: {self.decode.state_counts()}"
            self.now = time
            event()
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._turn_all()

    def run_for(self, seconds: float) -> None:
        ended: list[bool] = []
        self.at(self.now + seconds, lambda: ended.append(True))
        self.run(lambda: ended)

    # -- inside ------------------------------------------------------------------------------------------------

    def _turn_all(self) -> None:
        self.decode_turn()
        while self.commands and not self._stepping:
            if isinstance(self.commands[0], DecodeStep):
                self._stepping = True
                self.at(self.now + self._seconds_of(self.commands[0]), self._end_step)
            else:
                self.rank_turn(eos=False)
        while self.copies:
            self.copy_turn()
        for server in list(self.servers.values()):
            server.scheduler.advance(self.now)
            while (step := server.scheduler.next_step(self.now)) is not None:
                server.steps.append(step)
            self._compute_next(server)
        self.act()

    def look_at_requests(self) -> None:
        """In every sixteenth turn: a simulation has thousands, and `simulator.py` looks in every turn."""
        if next(self._turns) % 16 == 0:
            super().look_at_requests()

    def _seconds_of(self, step: DecodeStep) -> float:
        """Prompt tokens take as long as on prefill, in addition to the decode step."""
        tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        return (self._step_s if step.rows else 0.0) + tokens / self._tokens_per_s

    def _compute_next(self, server: Server) -> None:
        if server.steps and server.instance not in self._computing:
            self._computing.add(server.instance)
            tokens = sum(chunk.end - chunk.start for chunk in server.steps[0].chunks)
            seconds = max(self._least_step_s, tokens / self._tokens_per_s)
            self.busy_s += seconds
            self.at(self.now + seconds, lambda: self._end_prefill_step(server))

    def _end_prefill_step(self, server: Server) -> None:
        self._computing.discard(server.instance)
        done = server.steps.popleft()
        for end_write in self._after_step.pop((server.instance, done.command_id), ()):
            self.at(self.now + LATENCY_S, end_write)
        server.scheduler.step_done(done.command_id, prefill_results(done), self.now)
        self.act()

    def _when_computed(self, server: Server, chunk: ChunkWrite, end_write: Callable[[], None]) -> None:
        """Call `end_write` when the chunk has been computed and sent."""
        if chunk.after is not None:
            self._after_step.setdefault((server.instance, chunk.after), []).append(end_write)
        else:
            self.at(self.now + LATENCY_S, end_write)

    def _end_step(self) -> None:
        self._stepping = False
        self.rank_turn(eos=False)

    def _report(self) -> None:
        for server in self.servers.values():
            self.decode.handle(LoadReported(server.instance, server.scheduler.load()), self.now)
            server.scheduler.handle(LoadReported(DECODE, self.decode.load()), self.now)
        self.at(self.now + HEARTBEAT_S, self._report)

    def _compute(self, step: DecodeStep, eos: bool) -> None:  # noqa: ARG002 (memory contents are not tracked)
        results = [sampled(50)] * len(step.rows)
        for chunk in step.chunks:
            alive = chunk.owner.prompt.local is chunk.owner
            results.append(sampled(*[50] * chunk.owner.prompt.samples) if chunk.last and alive else sampled())
        self.decode.step_done(step.command_id, results, self.now)

    def _open_hot(self, opened: OpenHot) -> None:
        if opened.copy is not None:
            self.copies.append(opened)

    def _load_hot(self, opened: OpenHot) -> None:
        pass

    def _resize_hot(self, buffer: ResizeHot) -> None:
        pass

    def _write_back(self, command: WriteBackRows) -> None:
        pass

    def _land(self, write: Write, *, intact: bool) -> None:
        pass

    def _check_source(self, server: Server, write: Write) -> None:
        """Long prompts: the memory of prefill servers is not simulated."""

    def _of_decode(self, effect: Effect) -> None:
        super()._of_decode(effect)
        if not isinstance(effect, SendToPeer):
            return
        for peer in self.decode.peers._peers.values():
            self.most_at_prefill = max(self.most_at_prefill, peer.window.own_tokens)
        if effect.instance in self.servers:
            server = self.servers[effect.instance]
            self.at(self.now + LATENCY_S, lambda: self._deliver_down(server))

    def _answer(self, effect: SendToFrontend) -> None:
        super()._answer(effect)
        if isinstance(effect.message, Tokens):
            return
        if isinstance(effect.message, Finished | Failed):
            self.ended_at[effect.message.rid] = self.now
        if isinstance(effect.message, Finished):
            self.timelines[effect.message.rid] = effect.message.timeline

    def _of_prefill(self, server: Server, effect: Effect) -> None:
        match effect:
            case SendToPeer(instance=instance, message=message) if instance == OTHER:
                if isinstance(message, PrefillDone):
                    self._send_other(server, message.prompt_tokens)
                return
            case ChunkWrite(instance=instance) if instance == OTHER:
                written = ChunkWritten(OTHER, effect.key, effect.token_start, effect.token_end, ok=True)
                self._when_computed(server, effect, lambda: server.scheduler.handle(ChunkReport(0, written), self.now))
                return
        super()._of_prefill(server, effect)
        if isinstance(effect, SendToPeer):
            self.at(self.now + LATENCY_S, lambda: self._deliver_up(server))
        elif isinstance(effect, ChunkWrite):
            write = server.writes[-1]
            self._when_computed(server, effect, lambda: self._end_write(server, ok=True, late=False, write=write))


def _prompt(number: int, tokens: int) -> tuple[int, ...]:
    """A unique prompt: the number in tokens, then filler."""
    head = tuple(number // VOCAB**power % VOCAB for power in range(3))
    return (head + tuple(range(VOCAB)) * ceil_div(max(0, tokens - 3), VOCAB))[:tokens]
