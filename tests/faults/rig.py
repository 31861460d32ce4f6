"""A pair of servers with hooks and proxied links, which runs the cells of one configuration."""

import contextlib
import dataclasses
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tests.checkpoints import (
    GreedyTokens,
    TinyArchitecture,
    load_reference,
    make_checkpoint,
    make_dsa_checkpoint,
)
from tests.cluster.forkserver import HOOKS_VARIABLE, ROLE_VARIABLE
from tests.cluster.servers import HTTP, REPOSITORY, Cluster, Server, cluster, python_path, wait_until
from tests.faults.catalog import Cell, Config, Point, Side
from tests.faults.clients import BackgroundClient, StreamClient
from tests.faults.hooks import ANSWER_S, Hooks
from tests.faults.injections import INJECTIONS
from tests.faults.links import Link

NOTICED_S = 2.0
ANSWERED_S = 3.0
FREED_S = 5.0
"""The bounds that docs/reliability.md states: from the fault until it is noticed, from then until clients have their
answers, and from the end of the fault until all pages are free."""
LOADED = 4.0
"""Assertions allow this many times the bounds, because test machines are busy."""
RETRACTION_ATTEMPTS = 3
RETRACTION_S = 25.0
"""Limit for a retraction: on a busy machine, the requests that cause it take more than ten seconds."""
COMPILER_S = 60.0
"""Limit for a request with a grammar to be accepted: the first one after a restart starts the compiler."""
PRESSURE_TOKENS = 360
"""Output of a request that, with its prompt of 140 tokens, takes almost the whole pool of decode."""
PREFILL_TOKENS = 160
DECODE_TOKENS = 512
STARTED = Path(__file__).parent / "started"
"""Folder of the sitecustomize module that servers import when they start."""
COMMON = ("--page-size", "8", "--no-prefix-cache", "--shutdown-timeout-s", "3")
PREFILL = (*COMMON, "--kv-tokens", str(PREFILL_TOKENS), "--chunk-size", "32")
DECODE = (*COMMON, "--kv-tokens", str(DECODE_TOKENS), "--growth-tokens", "8", "--quarantine-s", "1.5")


@dataclasses.dataclass(frozen=True)
class Work:
    """A request and the tokens that transformers generates for it."""

    prompt: list[int]
    expected: Sequence[int]

    @property
    def new_tokens(self) -> int:
        return len(self.expected)


@dataclasses.dataclass(frozen=True)
class Result:
    """What happened in a cell. Times are in seconds; None where the cell has no such time."""

    outcome: str
    answered_s: float | None
    """From the fault to the end of the response."""
    noticed_s: float | None
    """From the fault until decode reports that it has lost its prefill server."""
    freed_s: float
    """From the end of the fault, or of the response if that is later, until all pages of both servers are free."""
    background_requests: int


class Rig:
    """Servers of one configuration. Use as a context manager."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.config = config
        self.servers: dict[Side, Server] = {}
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._log_starts: dict[Side, int] = {}
        self.hooks: Hooks
        self.control: Link
        self.client: StreamClient
        self._pressure_clients: list[StreamClient] = []
        """Clients whose requests take the pages of the request under test."""
        self._model = _make_model(config, directory / "model")
        reference = load_reference(self._model)

        def work(length: int, new_tokens: int, first: int) -> Work:
            prompt = [(first + 7 * index) % 251 for index in range(length)]
            return Work(prompt, GreedyTokens(reference, prompt, new_tokens))

        self.request, self.filler, self._background = work(97, 24, 1), work(64, 40, 2), work(17, 8, 3)
        self._long = work(97, 100, 4)
        self._pressure = [index % 251 for index in range(140)]
        text = "a" * 24
        letters = Tokenizer.from_file(str(self._model / "tokenizer.json")).encode(text).ids
        self._constrained = Work(self.request.prompt, letters)
        """With a grammar that allows only these tokens."""
        self._grammars = (text + "(?:)" * number for number in itertools.count())
        """Regular expressions of the same text. Each is compiled, as no cache has it."""
        self.works = (self.request, self.filler, self._background, self._long)

    def __enter__(self) -> "Rig":
        with self._stack as stack:
            self.hooks = Hooks(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))))
            stack.callback(self.hooks.close)
            servers = stack.enter_context(cluster(self._directory))
            self._start(servers)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, servers: Cluster) -> None:
        config = self.config
        flags: Sequence[str] = (*DECODE, *config.decode_flags)
        if not config.local:
            prefill = servers.add("prefill", self._model, *PREFILL, *config.prefill_flags, env=self._env("prefill"))
            self.servers["prefill"] = prefill
            self.control = self._stack.enter_context(Link(lambda: ("127.0.0.1", prefill.bootstrap_port)))
            flags = (*flags, "--prefill", f"127.0.0.1:{self.control.port}")
        self.servers["decode"] = servers.add("decode", self._model, *flags, env=self._env("decode"))

    def _env(self, role: Side) -> dict[str, str]:
        """Variables with which the processes of a server install the hooks."""
        path = os.pathsep.join([str(STARTED), python_path(), str(REPOSITORY)])
        return {HOOKS_VARIABLE: str(self.hooks.path), ROLE_VARIABLE: role, "PYTHONPATH": path}

    # -- for injections ----------------------------------------------------------------------------------------

    def data_links(self) -> list[Link]:
        """The data links of the running decode ranks."""
        return [link for data in self.hooks.data_links[-self.config.decode_ranks :] for link in data.links]

    def rank_processes(self, side: Side) -> tuple[str, ...]:
        """The kind of process that the ranks of a server are in."""
        ranks = self.config.decode_ranks if side == "decode" else self.config.prefill_ranks
        return ("rank",) if ranks > 1 else ("leader",)

    def begin_log(self) -> None:
        """`log_since_start()` begins here."""
        self._log_starts = {side: len(server.log.read_text()) for side, server in self.servers.items()}

    def log_since_start(self, server: Server) -> str:
        """What a server has logged since `begin_log()`."""
        side: Side = "prefill" if server.role == "prefill" else "decode"
        return server.log.read_text()[self._log_starts[side] :]

    # -- cells -------------------------------------------------------------------------------------------------

    def run(self, cell: Cell) -> Result:
        """Run one cell. Raises AssertionError, with the reason, if a check fails."""
        for server in self.servers.values():
            if server.process is not None and server.process.poll() is not None:  # a failed cell has left it so
                server.start()
        self.wait_ready()
        self.begin_log()
        decode = self.servers["decode"]
        background = BackgroundClient(decode, self._background.prompt, list(self._background.expected))
        try:
            wait_until(lambda: bool(background.outcomes), 20, "the background client has a response")
            lost = self._peers_lost() if cell.fault.loses_peer else 0
            request = self._reach(cell)
            injection = INJECTIONS[cell.fault.name](self, cell.fault.side or "decode")
            next(injection)
            fired_at = time.monotonic()
            self._end_pressure()
            watch = LossWatch(self, lost) if cell.fault.loses_peer else None
            self._release()
            self._block_prefill("")
            with contextlib.suppress(StopIteration):
                next(injection)
                raise AssertionError("the injection has yielded twice")
            over_at = time.monotonic()
            outcome, tokens = self.client.outcome()
        finally:
            self._release()
            self._block_prefill("")
            background.stop()
            self._end_pressure()
        assert not background.wrong, background.wrong
        assert tokens == request.expected[: len(tokens)], f"wrong tokens: {tokens}"
        assert outcome != "200" or tokens == request.expected, f"only {len(tokens)} tokens"
        ends = cell.fault.ends | ({"left"} if self.client.left else set())
        assert outcome in ends, f"the request ended with {outcome}: {self.client.text()[-300:]}"
        if cell.fault.ends == {"200"}:
            assert set(background.outcomes) == {"200"}, f"requests of the background client: {background.outcomes}"
        noticed_s = watch.noticed_s(fired_at) if watch is not None else None
        answered_s = max(0.0, self.client.ended_at - fired_at) if outcome != "left" else None
        assert answered_s is None or answered_s - over_after(outcome, fired_at, over_at) < LOADED * (
            NOTICED_S + ANSWERED_S
        ), f"answered after {answered_s:.1f} s"
        freed_s = self.check_after(max(over_at, self.client.ended_at))
        return Result(outcome, answered_s, noticed_s, freed_s, len(background.outcomes))

    def _reach(self, cell: Cell) -> Work:
        """Send the request and wait until it is in the state of the cell, with the engine loop paused there."""
        decode, state = self.servers["decode"], cell.state
        if state.name == "closing":
            self._reach_closing(state.points[0])
            return self.request
        if state.name == "loading":
            decode.generate(self.request.prompt, 1)  # its KV is cached
        if state.name == "taken back":
            self._reach_taken_back(state.points[0])
            return self.request
        if state.name in ("saving", "saved", "restoring", "opening"):
            self._reach_retracted(state.points[0])
            return self._long
        for point in state.points:
            self._arm(point)
        work, extra = self.request, {}
        if state.grammar:
            work = self._constrained
            sampling = {"max_new_tokens": work.new_tokens, "temperature": 0, "regex": next(self._grammars)}
            extra = {"sampling_params": sampling}
        self.client = StreamClient(decode, work.prompt, work.new_tokens, **extra)
        for point in state.points:
            self.hooks.leader(point.side).expect("hit", point.state, COMPILER_S if state.grammar else ANSWER_S)
        return work

    def _reach_retracted(self, point: Point) -> None:
        """Two requests of a higher priority for each pool take the pages of the request, if all run at the same time.
        It is restored when they have left, and gets a hot buffer (HiSparse).
        """
        decode = self.servers["decode"]
        first = Point("decode", "saved") if point.state in ("restoring", "opening") else point
        for _ in range(RETRACTION_ATTEMPTS):
            self._arm(first)
            for _ in range(2 * self.config.decode_pools):
                pressure = StreamClient(decode, self._pressure, PRESSURE_TOKENS, priority=1)
                self._pressure_clients.append(pressure)
            self.client = StreamClient(decode, self._long.prompt, self._long.new_tokens)
            with contextlib.suppress(AssertionError):
                self.hooks.leader("decode").expect("hit", first.state, RETRACTION_S)
                if first is not point:
                    self._arm(point)
                    self._end_pressure()
                    self._release()
                    self.hooks.leader("decode").expect("hit", point.state)
                return
            for client in (self.client, *self._pressure_clients):
                client.leave()
                client.join()
            self._pressure_clients.clear()
        raise AssertionError("the request was not retracted")

    def _reach_closing(self, closing: Point) -> None:
        """The client leaves while a rank of prefill hangs in a step."""
        rank = next(self.hooks.find("prefill", *self.rank_processes("prefill")))
        rank.tell(block="rank")
        self._arm(Point("prefill", "waiting"))
        self.client = StreamClient(self.servers["decode"], self.request.prompt, self.request.new_tokens)
        leader = self.hooks.leader("prefill")
        leader.expect("hit", "waiting")
        self._arm(closing)
        self.client.leave()
        self._release()
        leader.expect("hit", "closing")
        rank.tell(block="")

    def _reach_taken_back(self, computing: Point) -> None:
        """Prefill hangs in a step, so decode takes the request back, and computes it. Prefill has not confirmed that it
        stops to write before the fault.
        """
        self._block_prefill("rank")
        self._arm(Point("prefill", "waiting"))
        self._arm(computing)
        self.client = StreamClient(self.servers["decode"], self.request.prompt, self.request.new_tokens)
        self.hooks.leader("prefill").expect("hit", "waiting")
        self._release()
        self.hooks.leader("decode").expect("hit", computing.state)

    def _block_prefill(self, thread: str) -> None:
        for rank in self.hooks.find("prefill", *self.rank_processes("prefill")):
            with contextlib.suppress(OSError):
                rank.post(block=thread)

    def _end_pressure(self) -> None:
        while self._pressure_clients:
            self._pressure_clients.pop().leave()

    def _arm(self, point: Point) -> None:
        self.hooks.leader(point.side).tell(arm=point.state, moment=point.moment, tokens=len(self.request.prompt))

    def _release(self) -> None:
        for side in self.servers:
            for leader in self.hooks.find(side, "leader"):
                with contextlib.suppress(OSError):
                    leader.post(release=True)

    def wait_ready(self) -> None:
        for side, server in self.servers.items():
            peers = self.config.decode_pools if side == "prefill" else 1
            server.wait_ready(peers=None if self.config.local else peers)

    def check_after(self, since: float = 0.0) -> float:
        """All pages become free, no counter shows an error, and the next request is served. Returns when all pages
        were free, in seconds after `since`.
        """
        freed_s = self._wait_free(since)
        for server in self.servers.values():
            self._check_counters(server)
        tokens = self.servers["decode"].generate(self.request.prompt, self.request.new_tokens)
        assert tokens == self.request.expected, f"the next request has other tokens: {tokens}"
        return freed_s

    def _wait_free(self, since: float) -> float:
        """Both servers are ready, and all their pages are free; returns when, in seconds after `since`."""
        self.wait_ready()
        for server in self.servers.values():
            wait_until(server.idle, LOADED * FREED_S, f"{server.role} idle: {server.info()['states']}")
        return max(0.0, time.monotonic() - since)

    def _check_counters(self, server: Server) -> None:
        info = server.settled_info()
        bad = {
            name: info["counters"][name]
            for name in ("integrity_errors", "checksum_errors", "event_errors", "effect_errors", "control_event_errors")
            if info["counters"].get(name)
        }
        assert not bad, f"{server.role}: {bad}"
        health = HTTP.get(f"{server.url}/health", timeout=10).json()
        assert health["reasons"] == [], f"{server.role}: {health['reasons']}"

    def _peers_lost(self) -> int:
        return int(self.servers["decode"].info()["counters"]["control_peers_lost"])


class LossWatch(threading.Thread):
    """Polls decode until it reports one more lost peer."""

    def __init__(self, rig: Rig, before: int) -> None:
        super().__init__(daemon=True)
        self._rig, self._before = rig, before
        self._noticed_at: float | None = None
        self.start()

    def run(self) -> None:
        ends_at = time.monotonic() + LOADED * NOTICED_S
        while time.monotonic() < ends_at:
            if self._rig._peers_lost() > self._before:
                self._noticed_at = time.monotonic()
                return
            time.sleep(0.02)

    def noticed_s(self, fired_at: float) -> float:
        self.join()
        assert self._noticed_at is not None, f"the loss was not noticed within {LOADED * NOTICED_S:g} s"
        return self._noticed_at - fired_at


def over_after(outcome: str, fired_at: float, over_at: float) -> float:
    """The part of a response time that the bound allows for the fault itself: a request that succeeds may have waited
    until the fault was over.
    """
    return max(0.0, over_at - fired_at) if outcome == "200" else 0.0


def _make_model(config: Config, directory: Path) -> Path:
    if config.model == "sparse":
        return make_dsa_checkpoint(directory, "glm_moe_dsa", index_topk=16, index_topk_pattern="FSSF")
    family: TinyArchitecture = "qwen3_moe" if config.model == "mixture" else "qwen3"
    return make_checkpoint(
        directory, family, num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=512
    )
