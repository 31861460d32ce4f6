"""One thread that writes KV to one decode rank: takes jobs in order, keeps a few writes in flight, never hangs.

The scheduling thread submits a SendJob and gets exactly one SendResult per job, from the sender's thread. Jobs to one
peer run one after the other, also those of different transfers: the network to the peer is the bottleneck.

Source pages may be reused after the results of all jobs of a transfer. After a failed write Mooncake may still read
them. So on any failure the engine is destroyed before the result is reported, and the next job gets a new engine. This
also drops bytes that our kernel has not delivered. Bytes in the network or in the peer's kernel may still land: the
result then has `late_writes`, and the peer must not reuse these destination pages for a while.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ...common.errors import StartupError
from ...common.stuck import STUCK_S
from ...kernels.backends.streams import use_own_stream
from ..mooncake.engine import SendEngine, WriteId, WritesPendingError, WriteState
from ..mooncake.library import Transport
from ..mooncake.sockets import PeerUnreachableError
from ..mooncake.transports import KvRoute, LocalTransport
from ..plan.copy_runs import CopyRuns, PlanError, check_bounds
from ..protocol.messages import TransferKey
from .pace import DELIVERY_LOOK_S, MOST_S, Pace, Progress
from .routed_engine import PoolPair, RoutedEngine

log = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
MAX_WINDOW: Final = 512
"""Writes in flight to one peer. Mooncake's queue fails permanently at 1,024 (sometimes only at 2,048)."""
MAX_WRITE_BYTES: Final = 4 << 20
"""Over TCP: Mooncake has several lanes, and a single write uses only one."""
MAX_DIRECT_WRITE_BYTES: Final = 256 << 20
"""Over CUDA IPC and RDMA, where each write has a fixed cost and does not delay others."""
STALL_BASE_S: Final = 1.0
STALL_BYTES_PER_S: Final = 200e6
"""Writes in flight are stalled if, for STALL_BASE_S plus the time of their bytes at this rate, none has ended and no
byte was delivered. The second term is there because the peer may be busy copying them. After a cancellation, writes
must end within that time, even if bytes still move. Over RDMA the limit is that of `pace.py`, but not longer than this
one after a cancellation: the peer may be dead, and others wait for its handshakes.
"""
NAP_MIN_S: Final = 0.00005
NAP_MAX_S: Final = 0.002


@dataclass(frozen=True, slots=True, eq=False)
class SendJob:
    """Copies of one transfer that belong together, such as a chunk.

    `runs` may be a function, which is called on the sender's thread because planning takes milliseconds; a PlanError
    fails the job. `ready` is called there before the first byte is read, and may wait (for example, for a CUDA event).
    `ended` is called there once, with the result, and should only pass it on. `pools` is one of the sender's PoolPairs.
    A job has no time limit while it makes progress.
    """

    key: TransferKey
    runs: CopyRuns | Callable[[], CopyRuns]
    pools: PoolPair
    ended: "Callable[[SendResult], object]"
    ready: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SendResult:
    """The result of a job. `ok`: all bytes are in the peer's memory. Otherwise `reason` is readable text."""

    ok: bool
    reason: str
    cancelled: bool
    late_writes: bool
    bytes_written: int
    writes: int
    job: SendJob
    transport: Transport


@dataclass(slots=True, eq=False)
class _Pending:
    """A job without a result, and its progress."""

    job: SendJob
    transport: Transport
    cancelled: bool = False
    started_at: float = 0.0
    total_bytes: int | None = None
    """None until the job is planned."""
    bytes_written: int = 0
    writes: int = 0
    in_flight: dict[WriteId, int] = field(default_factory=dict)
    """The bytes of each write that has not ended."""


class _SendError(Exception):
    """Ends a job, with the reason and whether bytes in flight may still land."""

    def __init__(self, reason: str, *, late_writes: bool) -> None:
        super().__init__(reason)
        self.late_writes = late_writes


class _WriteError(_SendError):
    """A write was refused, has failed or does not end, because of the transport or the peer."""


class PeerSender:
    """Writes from our pools into those of one rank of a peer. A peer that restarts needs a new PeerSender.

    `routes` are tried in this order at start, before the first job: a route is used if a probe of every pool succeeds
    over it (`routed_engine.py`). `on_routed` (the transport in use, and why others are not) is called on the sender's
    thread. Owns a thread and an engine; close() ends both.
    """

    def __init__(
        self,
        routes: Sequence[KvRoute],
        pools: Sequence[PoolPair],
        *,
        window: int,
        on_routed: Callable[[Transport, Mapping[Transport, str]], None] = lambda *_: None,
        device: torch.device = _CPU,
        local: LocalTransport | None = None,
    ) -> None:
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"window must be 1 to {MAX_WINDOW}, got {window}")
        self._routed = RoutedEngine(
            routes, pools, local or LocalTransport("auto", "127.0.0.1"), on_routed, self._route_returned
        )
        self._window = window
        self._pace = Pace()
        self._device = device
        self._changed = threading.Condition()
        self._queue: deque[_Pending] = deque()
        self._unreported: set[_Pending] = set()
        self._closing = False
        self._progress_at = time.monotonic()
        self.waits_for_kv = False
        """Whether the active job waits for its KV. May be read from another thread."""
        self._thread = threading.Thread(target=self._work, name=f"send-{self.session}", daemon=True)
        self._thread.start()
        # A daemon thread inside Mooncake at interpreter exit aborts the process.
        atexit.register(self.close)

    @property
    def session(self) -> str:
        """The address of the peer over the route in use. May be read from another thread."""
        return self._routed.session

    def submit(self, job: SendJob) -> None:
        """Queue a job. Raises PlanError, and queues nothing, if `runs` is a plan with a copy outside either pool."""
        if isinstance(job.runs, CopyRuns):
            self._check_bounds(job, job.runs)
        with self._changed:
            if self._closing:
                raise RuntimeError(f"the sender to {self.session} is closed")
            if not self._unreported:
                self._progress_at = time.monotonic()
            pending = _Pending(job, self._routed.transport)
            self._unreported.add(pending)
            self._queue.append(pending)
            self._changed.notify_all()

    def try_again(self) -> None:
        """Try a better route that was dropped: the peer has introduced itself again."""
        self._routed.try_again()

    def cancel(self, key: TransferKey) -> None:
        """Stop the jobs of a transfer: issue no more writes, wait for those in flight, then report each job as usual.
        Jobs submitted later are not affected.
        """
        self._cancel(lambda job: job.key == key)

    def cancel_job(self, job: SendJob) -> None:
        """Stop one job, as cancel() stops all jobs of a transfer."""
        self._cancel(lambda other: other is job)

    def stalled_s(self) -> float:
        """Time since the last progress; 0 without jobs."""
        with self._changed:
            return time.monotonic() - self._progress_at if self._unreported else 0.0

    @property
    def stuck_s(self) -> float:
        """After this time without progress the thread is stuck: it would have given up a silent peer long before."""
        if self._routed.transport == "rdma":
            return STUCK_S + MOST_S
        return STUCK_S + self._window * MAX_WRITE_BYTES / STALL_BYTES_PER_S

    def close(self) -> None:
        """Cancel everything, wait for what is in flight, report every job, end the thread. May be called twice.

        Bounded by a stall of the active job (about a second), unless a `ready` of the caller hangs.
        """
        with self._changed:
            self._closing = True
            for pending in self._unreported:
                pending.cancelled = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _cancel(self, wanted: Callable[[SendJob], bool]) -> None:
        with self._changed:
            for pending in self._unreported:
                pending.cancelled |= wanted(pending.job)

    def _work(self) -> None:
        use_own_stream(self._device)
        try:
            self._routed.open()
        except (PeerUnreachableError, StartupError) as error:  # the first job tries again and reports it
            log.debug("no connection to %s yet: %s", self.session, error)
        except Exception:
            log.exception("error while connecting to %s", self.session)
        while (pending := self._take()) is not None:
            self._progress_at = pending.started_at = time.monotonic()
            reason: str | None = None
            late_writes = False
            unreachable = False
            failed_write = False
            try:
                self._send(pending)
            except _SendError as failure:
                reason, late_writes = str(failure), failure.late_writes
                failed_write = isinstance(failure, _WriteError)
            except (PeerUnreachableError, StartupError) as error:  # the latter: no RDMA engine for our own memory
                reason, unreachable = str(error), True
            except Exception as error:
                log.exception("error while sending to %s", self.session)
                reason, late_writes = f"internal error: {error!r}", bool(pending.writes)
            if reason is not None:
                self._end_writes()
                if failed_write:
                    self._routed.drop_failed_route(reason)
            self._finish(pending, reason, late_writes)
            if unreachable and reason is not None:
                # All queued jobs are for the same peer: another attempt would take a second per job.
                self._fail_queued(reason)
        self._routed.end()

    def _end_writes(self) -> None:
        """Destroy the engine. As long as writes do not end, the active job has no result, so its source pages stay as
        they are; queued jobs fail, and stalled_s() grows until this server is unhealthy.
        """
        while True:
            try:
                self._routed.close()
                return
            except WritesPendingError as error:
                log.error("%s: the pages that they read stay reserved", error)
                self._fail_queued(str(error))

    def _fail_queued(self, reason: str) -> None:
        with self._changed:
            waiting = list(self._queue)
            self._queue.clear()
        for pending in waiting:
            self._finish(pending, reason, False)

    def _route_returned(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> _Pending | None:
        """The next job to send; None when closed and empty. Reports cancelled jobs."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._closing or self._routed.has_returned, self._routed.look_s
                )
                idle = not self._queue and not self._closing
                cancelled = [pending for pending in self._queue if pending.cancelled]
                for pending in cancelled:
                    self._queue.remove(pending)
                if not cancelled and not idle:
                    return self._queue.popleft() if self._queue else None
            if idle:
                self._look()
            for pending in cancelled:
                self._finish(pending, None, False)

    def _look(self) -> None:
        """Change the route while there is nothing to send, if necessary. If no route works, the next job reports it."""
        try:
            self._routed.look()
        except (PeerUnreachableError, StartupError) as error:
            log.debug("no connection to %s at present: %s", self.session, error)
        except Exception:
            log.exception("error while connecting to %s", self.session)

    def _send(self, pending: _Pending) -> None:
        """Write all of a job. Returns early, with nothing in flight, when it is cancelled; raises when it fails."""
        job = pending.job
        runs = self._planned(job)
        pending.total_bytes = runs.total_bytes
        if job.ready is not None:
            self.waits_for_kv = True
            try:
                job.ready()
            except Exception as error:
                raise _SendError(f"the KV did not become ready: {error!r}", late_writes=False) from error
            finally:
                self._progress_at = time.monotonic()
                self.waits_for_kv = False
        if pending.cancelled:
            return
        if len(runs):
            engine = self._routed.open()
            pending.transport = self._routed.transport
            pieces = runs.split(MAX_WRITE_BYTES if pending.transport == "tcp" else MAX_DIRECT_WRITE_BYTES)
            self._write(pending, pieces, engine)

    def _write(self, pending: _Pending, pieces: CopyRuns, engine: SendEngine) -> None:
        """Keep a window of writes in flight until all have ended; after a cancellation, until those in flight have."""
        pools = pending.job.pools
        waiting = zip(
            (pieces.source + pools.source.addr).tolist(),
            (pieces.destination + pools.destination.base_address).tolist(),
            pieces.length.tolist(),
            strict=True,
        )
        left = len(pieces)
        in_flight = pending.in_flight
        nap_s = NAP_MIN_S
        progress = Progress(engine)
        ended_at = time.monotonic()
        while left or in_flight:
            if pending.cancelled:
                left = 0
            while left and len(in_flight) < self._window:
                source, destination, size_bytes = next(waiting)
                write = engine.submit(source, destination, size_bytes)
                if write is None:
                    raise _WriteError(f"decode {self.session} is gone", late_writes=bool(pending.writes))
                in_flight[write] = size_bytes
                pending.writes += 1
                left -= 1
            before = pending.bytes_written
            ended = self._collect(pending, engine)
            if ended:
                last_end, ended_at = ended_at, time.monotonic()
                self._pace.add(pending.bytes_written - before, ended_at - last_end)
            if progress.look(ended=ended, cancelled=pending.cancelled):
                self._progress_at = time.monotonic()
            self._check_progress(pending, progress.still_s)
            if not ended and progress.still_s > DELIVERY_LOOK_S and (problem := self._routed.problem()) is not None:
                raise _WriteError(f"decode {self.session} cannot be reached: {problem}", late_writes=True)
            if ended:
                nap_s = NAP_MIN_S
            else:
                time.sleep(nap_s)
                nap_s = min(1.5 * nap_s, NAP_MAX_S)

    def _planned(self, job: SendJob) -> CopyRuns:
        if isinstance(job.runs, CopyRuns):
            return job.runs
        try:
            runs = job.runs()
            self._check_bounds(job, runs)
        except PlanError as error:
            raise _SendError(str(error), late_writes=False) from error
        return runs

    def _check_bounds(self, job: SendJob, runs: CopyRuns) -> None:
        check_bounds(runs, job.pools.source.length, job.pools.destination.size_bytes)

    def _collect(self, pending: _Pending, engine: SendEngine) -> bool:
        """Remove the finished writes from `in_flight`. Returns whether there were any."""
        finished = False
        for write, size_bytes in list(pending.in_flight.items()):
            state = engine.poll(write)
            if state is WriteState.PENDING:
                continue
            del pending.in_flight[write]
            if state is WriteState.FAILED:
                raise _WriteError(
                    f"write of {size_bytes} bytes to decode {self.session} failed after "
                    f"{time.monotonic() - pending.started_at:.2f} s",
                    late_writes=True,
                )
            pending.bytes_written += size_bytes
            finished = True
        return finished

    def _check_progress(self, pending: _Pending, still_s: float) -> None:
        """Raise if there is no progress for too long or, after a cancellation, if writes in flight do not end."""
        if still_s <= STALL_BASE_S or not pending.in_flight:
            return
        in_flight_bytes = sum(pending.in_flight.values())
        limit_s = STALL_BASE_S + in_flight_bytes / STALL_BYTES_PER_S
        if self._routed.transport == "rdma":
            paced_s = self._pace.stalled_after_s(max(pending.in_flight.values()))
            limit_s = min(limit_s, paced_s) if pending.cancelled else paced_s
        if still_s > limit_s:
            what = "have not ended" if pending.cancelled else "have made no progress"
            error = _SendError if pending.cancelled else _WriteError
            raise error(
                f"decode {self.session} stopped receiving: {in_flight_bytes} bytes in flight {what} for "
                f"{still_s:.2f} s",
                late_writes=True,
            )

    def _finish(self, pending: _Pending, reason: str | None, late_writes: bool) -> None:
        """Report a job. A job that was cancelled and is not complete counts as cancelled, not as failed."""
        complete = reason is None and pending.bytes_written == pending.total_bytes
        cancelled = pending.cancelled and not complete
        result = SendResult(
            ok=complete,
            reason=reason or ("cancelled" if cancelled else ""),
            cancelled=cancelled,
            late_writes=late_writes,
            bytes_written=pending.bytes_written,
            writes=pending.writes,
            job=pending.job,
            transport=pending.transport,
        )
        with self._changed:
            self._unreported.remove(pending)
        try:
            pending.job.ended(result)
        except Exception:
            log.exception("error while reporting a job of the sender to %s", self.session)
