"""All ranks of a server, as the leader uses them: processes, or for a single rank a thread of the leader.

The leader's engine loop does not compute, so it serves clients and detects lost ranks while a step hangs. Several ranks
wait for each other in every layer, so none of them may wait for the GIL of the leader: they are processes. A single
rank has no such problem, and as a process it would add the time of two messages to every step.
"""

import collections
import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
import zmq

from ...common.errors import PdserveError, StartupError
from ...common.logs import rate_limited
from ...common.words import OUT_OF_MEMORY
from ...configs.schema import AnyServerConfig
from ...models.layers.parallel import reserve
from ...models.loading.catalog import ModelSource
from ...transfer.control.curve import ClientGate, ClusterKeys
from ...transfer.control.unknown_peers import UnknownPeers
from ...transfer.control.wakeup import ConnectionMonitor, Wakeup
from ...transfer.data.chunks import PartScatter, PartWrite
from ..messages.ranks import (
    ComputeCommand,
    LeaderAlive,
    RankAlive,
    RankFailed,
    RankReady,
    RankReport,
    RunStep,
    StopRank,
    TransferCommand,
)
from ..shutdown import CUDA_STOP_S, STOP_S
from .page_tables import SentTables
from .process import RankProcess, leader_address, meeting_point
from .rank import RankEngine

log = logging.getLogger(__name__)

SILENCE_S: Final = 3.0
"""A rank that sends nothing for this long is lost: it hangs, or is stopped."""
STARTUP_SILENCE_S: Final = 60.0
"""The limit of silence while a rank loads: libraries and drivers may block all its threads for some time."""
TICK_S: Final = 0.25


class RankLostError(PdserveError):
    """A rank has failed, exited or become silent: the server cannot continue without it."""


class Ranks:
    """Starts the ranks of this machine, sends all ranks their commands in order and collects their reports.

    `on_report` is called on other threads. A lost rank is reported once, as RankFailed. `tell()` is for the engine
    thread only.
    """

    def __init__(
        self,
        config: AnyServerConfig,
        source: ModelSource,
        keys: ClusterKeys | None,
        on_report: Callable[[RankReport], None],
    ) -> None:
        self._config = config
        self._source = source
        self._on_report = on_report
        self._link: _LocalRank | _Hub
        self._reserved: socket.socket | None = None
        self._processes: list[RankProcess] = []
        self._closing = False
        self._lost = False
        self._on_gpu = False
        if config.world_size == 1:
            self._link = _LocalRank(config, source, self._report)
            return
        meet_at, self._reserved = _reserve_meeting_point(config)
        keys = keys or ClusterKeys.random()  # only ranks on several machines need a cluster key
        self._link = _Hub(config, meet_at, keys, self._report)
        for rank in config.local_ranks:
            process = RankProcess(config, rank, leader=self._link.address, meet_at=meet_at, keys=keys)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process,), name=f"watch-{rank}", daemon=True).start()

    def tell(self, command: ComputeCommand | TransferCommand, to: Sequence[int] | None = None) -> None:
        """Send a command to every rank, or to those of `to`."""
        self._link.tell(command, to)

    def problems(self) -> list[str]:
        """What is wrong with the transfers of the ranks, as text. Called from another thread."""
        return self._link.problems()

    def busy_seconds(self) -> dict[int, float]:
        """Time that each rank has spent on steps, as last reported."""
        return self._link.busy_seconds()

    def close(self) -> bool:
        """Stop all ranks; kill those that do not exit in time. False if a rank of this process is still in a step or
        stuck: then this process must not wait for its threads.

        If a rank is lost, others may hang in a collective with it, so the wait is short.
        """
        self._closing = True
        self.tell(StopRank())
        stop_s = CUDA_STOP_S if self._on_gpu and not self._lost else STOP_S
        deadline = time.monotonic() + stop_s
        ended = self._link.join(stop_s) if isinstance(self._link, _LocalRank) else True
        for process in self._processes:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                log.warning("rank %d has not exited; killing it", process.rank)
                process.kill()
                process.wait()
        if isinstance(self._link, _Hub):
            self._link.close()
        if self._reserved is not None:
            self._reserved.close()
        return ended

    def _report(self, report: RankReport) -> None:
        match report:
            case RankFailed() if self._closing:
                return
            case RankFailed():
                self._lost = True
            case RankReady(device=device):
                self._on_gpu = device != "cpu"
        self._on_report(report)

    def _watch(self, process: RankProcess) -> None:
        status = process.wait()
        cause = OUT_OF_MEMORY if status == -signal.SIGKILL else ""
        time.sleep(TICK_S)  # its own RankFailed, if any, comes first
        self._report(
            RankFailed(process.rank, f"rank {process.rank} (process {process.pid}) exited with status {status}{cause}")
        )


class RankGroup:
    """The ranks of one scheduler: all ranks of a server or, with data-parallel attention, one of each stage. They have
    the same page ids.
    """

    def __init__(self, ranks: Ranks, numbers: Iterable[int]) -> None:
        self._ranks = ranks
        self.numbers = tuple(numbers)

    @property
    def size(self) -> int:
        return len(self.numbers)

    def tell(self, command: ComputeCommand | TransferCommand) -> None:
        """Send a command to all ranks of this scheduler. Commands that name a rank go to that rank only; peers count
        the ranks of each scheduler from 0, as those of a server of its own.
        """
        only = _only_for(command)
        self._ranks.tell(command, self.numbers if only is None else (self.numbers[only],))


class _LocalRank:
    """The only rank of a server: a thread of this process."""

    def __init__(self, config: AnyServerConfig, source: ModelSource, on_report: Callable[[RankReport], None]) -> None:
        self._config = config
        self._source = source
        self._on_report = on_report
        self._commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
        self._engine: RankEngine | None = None
        self._thread = threading.Thread(target=self._run, name="rank-0", daemon=True)
        self._thread.start()

    def tell(self, command: ComputeCommand | TransferCommand, _to: Sequence[int] | None) -> None:
        if isinstance(command, TransferCommand):
            assert self._engine is not None, "a command was sent before the rank was ready"
            self._engine.transfer(command)
        else:
            self._commands.put(command)

    def problems(self) -> list[str]:
        return list(self._engine.problems()) if self._engine is not None else []

    def busy_seconds(self) -> dict[int, float]:
        return {0: self._engine.busy_s} if self._engine is not None else {}

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = RankEngine(self._config, self._source, 0, meet_at=None, report=self._on_report)
            self._engine = engine
            engine.announce()
            engine.serve(self._commands)
            engine.close()
        except StartupError as error:
            self._on_report(RankFailed(0, str(error), startup=True))
        except Exception as error:
            log.exception("rank 0 failed")
            self._on_report(RankFailed(0, f"{type(error).__name__}: {error}"))


class _Hub:
    """The socket to the rank processes, with its own thread."""

    def __init__(
        self,
        config: AnyServerConfig,
        meet_at: tuple[str, int],
        keys: ClusterKeys,
        on_report: Callable[[RankReport], None],
    ) -> None:
        self._on_report = on_report
        self._outbox: queue.SimpleQueue[tuple[Sequence[int] | None, bytes] | None] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankReport)
        self._tables: dict[Sequence[int] | None, SentTables] = collections.defaultdict(SentTables)
        """By the ranks that they are sent to; None is for all."""
        self._heard: dict[int, float] = {}
        """When each rank last sent something."""
        self._checked_at = time.monotonic()
        """Time of the last check for silent ranks."""
        self._ready: set[int] = set()
        self._lost: set[int] = set()
        self._alive: dict[int, RankAlive] = {}
        """The latest heartbeat of each rank."""
        self._ranks = {b"rank-%d" % rank: rank for rank in range(config.world_size)}
        """By routing id."""
        self._noise = rate_limited(log)
        self._unknown_peers = UnknownPeers(
            None, partial(self._noise.warning, "a connection to the ranks' port was closed: %s")
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._wakeup = Wakeup(self._context)
        self._gate = ClientGate(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._gate.protect(self._socket)
        self._monitor = ConnectionMonitor(self._context, self._socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        if config.dist_init_addr is None:
            self.address = f"tcp://{meet_at[0]}:{self._socket.bind_to_random_port(f'tcp://{meet_at[0]}')}"
        else:
            self.address = leader_address(meet_at)
            try:
                self._socket.bind(self.address)
            except zmq.ZMQError as error:
                raise StartupError(f"dist_init_addr: cannot bind {self.address} for the ranks: {error}") from None
        self._unknown_peers.port = int(self.address.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="rank-hub", daemon=True)
        self._thread.start()

    def tell(self, command: ComputeCommand | TransferCommand, to: Sequence[int] | None) -> None:
        """Send to every rank, or to those of `to`. All steps of a rank are sent with the same `to`, in order: page
        tables need that.
        """
        message = self._tables[to].pack(command) if isinstance(command, RunStep) else command
        self._outbox.put((to, self._encoder.encode(message)))
        self._wakeup.ring()

    def problems(self) -> list[str]:
        return [problem for alive in list(self._alive.values()) for problem in alive.problems]

    def busy_seconds(self) -> dict[int, float]:
        return {rank: alive.busy_s for rank, alive in sorted(self._alive.items())}

    def close(self) -> None:
        self._outbox.put(None)
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()
        self._gate.close()
        self._context.term()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the link to the ranks failed")
            self._on_report(RankFailed(0, f"the link to the ranks failed: {type(error).__name__}: {error}"))
        finally:
            self._monitor.close()
            self._socket.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.receiver, zmq.POLLIN)
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        tick_at = 0.0
        too_many_peers = False
        while True:
            ready = dict(poller.poll(0 if too_many_peers else int(TICK_S * 1000)))
            if self._gate.socket in ready:
                self._gate.answer_all()
            if self._monitor.socket in ready:
                self._read_connections()
            too_many_peers = self._unknown_peers.cut_excess()
            if self._wakeup.receiver in ready:
                self._wakeup.drain()
            if not self._flush():
                break
            while self._socket in ready and self._socket.poll(0):
                self._receive(self._socket.recv_multipart(copy=False))
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_S
                self._send(None, self._encoder.encode(LeaderAlive()))
                self._check_silence()
                self._unknown_peers.enforce_limits()

    def _read_connections(self) -> None:
        while (event := self._monitor.read()) is not None:
            match event:
                case (zmq.EVENT_ACCEPTED, fd):
                    self._unknown_peers.accepted(fd)
                case (_, fd):
                    self._unknown_peers.closed(fd)

    def _flush(self) -> bool:
        """Send everything queued; False after close()."""
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                return False
            self._send(*message)

    def _send(self, to: Sequence[int] | None, message: bytes) -> None:
        for identity in self._ranks if to is None else [b"rank-%d" % rank for rank in to]:
            self._socket.send_multipart((identity, message))  # dropped if the rank is not connected

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity, *payloads = frames
        rank = self._ranks.get(identity.bytes)
        if rank is None or len(payloads) != 1:
            self._noise.warning("ignoring a message of %r: it is not a rank report", identity.bytes[:64])
            return
        if rank not in self._heard:
            self._read_connections()  # the event of its accept comes first
            self._unknown_peers.introduced(int(identity.get(zmq.SRCFD)))
        try:
            report = self._decoder.decode(payloads[0].buffer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._on_report(RankFailed(rank, f"the link to rank {rank} failed: {error}"))
            return
        self._heard[report.rank] = time.monotonic()
        if isinstance(report, RankReady):
            self._ready.add(report.rank)
        if isinstance(report, RankAlive):
            self._alive[report.rank] = report
        else:
            self._on_report(report)

    def _check_silence(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > SILENCE_S / 2:
            # This process was stopped or starved. Messages of ranks may still be in the kernel's buffers.
            log.info("the link to the ranks did not run for %.1f s", now - self._checked_at)
            self._heard = dict.fromkeys(self._heard, now)
        self._checked_at = now
        for rank, heard in self._heard.items():
            limit_s = SILENCE_S if rank in self._ready else STARTUP_SILENCE_S
            if now - heard > limit_s and rank not in self._lost:
                self._lost.add(rank)
                self._on_report(RankFailed(rank, f"rank {rank} has sent nothing for {now - heard:.1f} s"))


def _only_for(command: ComputeCommand | TransferCommand) -> int | None:
    """The rank that a command is for, as peers count the ranks of its scheduler; None for all ranks."""
    match command:
        case PartWrite(part=part):
            return part.writer
        case PartScatter(part=part):
            return part.destination
        case _:
            return None


def _reserve_meeting_point(config: AnyServerConfig) -> tuple[tuple[str, int], socket.socket]:
    """The address at which the other ranks find rank 0, and a socket that keeps its port until rank 0 listens there."""
    host, port = meeting_point(config) if config.dist_init_addr is not None else ("127.0.0.1", 0)
    try:
        reserved = reserve(host, port)
    except OSError as error:
        raise StartupError(f"dist_init_addr: cannot listen on {host}:{port} for the ranks: {error}") from None
    return (host, reserved.getsockname()[1]), reserved
