"""Writes computed chunks of one prefill rank into the memory of decode ranks.

For every paired decode server the writer has the copy regions of this rank (`copy_regions.py`): which layers and heads
of which pool it writes to which decode rank. A chunk becomes one job per region. Regions with the same routes share one
sender thread. A chunk ends in exactly one `ChunkWritten`, after its last job.

Latent rows for a HiSparse rank have two destinations, each with its own routes: its pool in host memory and its hot
pool on the GPU. A chunk is written to one of them.

Staged regions (`staged_regions.py`) are written separately. When decode has granted a region of the ring for a part,
the rank gets one PartWrite command, which ends in one `PartWritten` (`part_writer.py`). For staged regions, a chunk
write only computes the checksum.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from ...configs.schema import PrefillConfig
from ..mooncake.library import Transport
from ..mooncake.sockets import Region
from ..mooncake.transports import KvRoute, open_rdma, places, possible_routes, resolve_transport
from ..plan.copy_regions import CopyRegion
from ..plan.copy_runs import NO_RUNS, CopyRuns, expand_runs, expand_token_runs
from ..plan.staged_regions import STAGED_KIND, StagedRegion, pair_regions, staged_regions
from ..protocol.checksum import add_sums, block_sum
from ..protocol.messages import Hello, InstanceId, KvPath, TransferKey, Welcome
from .chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten, joined_bytes
from .local_pool import LocalPool
from .part_writer import PartWriter, StageBuffers
from .routed_engine import PoolPair
from .sender import PeerSender, SendJob, SendResult

log = logging.getLogger(__name__)

MIB: Final = 1 << 20
GONE: Final = "the decode server is gone"
SLOW_KV_S: Final = 30.0
"""A sender that waits this long for the KV of a step is reported by problems()."""


@dataclass(frozen=True, slots=True)
class _RegionPlan:
    """The source, destination and routes of one region.

    A staged region has no copies here: its KV goes through the PartWriter for the decode rank. `path` is set if the
    rows have two possible destinations (HiSparse): then there is a plan for each.
    """

    region: CopyRegion
    source: LocalPool
    pools: PoolPair
    routes: tuple[KvRoute, ...]
    staged: bool = False
    path: KvPath | None = None

    @property
    def name(self) -> str:
        """The name of the destination in logs and in /server_info."""
        kind = "+".join(self.source.layout.kind)
        return f"{kind} ({self.path})" if self.path == "device" else kind

    def takes(self, chunk: ChunkWrite) -> bool:
        """Whether this is a destination of the chunk."""
        return self.path is None or self.path == ("device" if chunk.hot_indices else "host")

    def runs(self, chunk: ChunkWrite) -> CopyRuns:
        """The copies of a chunk. Raises PlanError."""
        if self.staged:
            return NO_RUNS
        expand = expand_token_runs if chunk.granularity == "token" else expand_runs
        return expand(
            self.source.layout,
            self.pools.destination.layout,
            chunk.source_pages,
            chunk.hot_indices if self.path == "device" else chunk.indices,
            chunk.token_start,
            chunk.token_end,
            self.region,
        )

    def checksum(self, chunk: ChunkWrite) -> int:
        """The checksum of this region of a chunk."""
        start = chunk.token_start % self.source.layout.page_size
        end = start + chunk.token_end - chunk.token_start
        rows = self.source.memory.read_tokens(chunk.source_pages, start, end)
        return block_sum(rows, self.source.layout, self.region.layers, self.region.heads)


@dataclass(frozen=True, slots=True)
class _Route:
    """All regions from this rank to one decode server."""

    decode_ranks: int
    regions: list[_RegionPlan]
    senders: dict[tuple[KvRoute, ...], PeerSender]
    """By routes: one sender thread for the regions with the same ones."""
    part_writers: dict[int, PartWriter]
    """By decode rank."""

    def close(self, sender: PeerSender) -> None:
        """End a sender and its part writers."""
        for writer in self.part_writers.values():
            if writer.sender is sender:
                writer.close()
        sender.close()


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk that is being sent."""

    command: ChunkWrite
    on_written: Callable[[ChunkWritten], None]
    checksums: list[int]
    jobs: list[tuple[PeerSender, SendJob]] = field(default_factory=list)
    results: list[SendResult] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def job(self, plan: _RegionPlan, ready: Callable[[], None] | None) -> SendJob:
        """The copies for one region."""
        command = self.command

        def prepare() -> None:
            if ready is not None:
                ready()
            if command.verify:
                self.add_checksum(plan.region.destination, plan.checksum(command))

        return SendJob(command.key, partial(plan.runs, command), plan.pools, self.ended, prepare)

    def ended(self, result: SendResult) -> None:
        """Runs on a sender's thread: record the end of a job, and report the chunk after its last job."""
        with self.lock:
            self.results.append(result)
            last = len(self.results) == len(self.jobs)
        if last:
            self.on_written(self.written())
        elif not result.ok:
            self.cancel()

    def add_checksum(self, decode_rank: int, checksum: int) -> None:
        with self.lock:
            self.checksums[decode_rank] = add_sums((self.checksums[decode_rank], checksum))

    @property
    def failed(self) -> bool:
        with self.lock:
            return any(not result.ok for result in self.results)

    def cancel(self) -> None:
        """Cancel the jobs that have not ended; each still reports a result."""
        for sender, job in self.jobs:
            sender.cancel_job(job)

    def written(self) -> ChunkWritten:
        command = self.command
        failed = [result for result in self.results if not result.ok]
        causes = [result for result in failed if not result.cancelled] or failed
        return ChunkWritten(
            command.instance,
            command.key,
            command.token_start,
            command.token_end,
            ok=not failed,
            reason=causes[0].reason if causes else "",
            late_writes=any(result.late_writes for result in self.results),
            writes=sum(result.writes for result in self.results),
            bytes_written=sum(result.bytes_written for result in self.results),
            checksums=() if failed else tuple(self.checksums),
            transport_bytes=joined_bytes({result.transport: result.bytes_written} for result in self.results),
        )


class ChunkWriter:
    """Writes chunks of one prefill rank to decode servers. All methods return without waiting, close_all() excepted.

    `on_written` is called once per write(), and `on_part_written` once per write_part(): on a sender's thread or, if
    there is nothing to send, on the caller's. `on_routed` is called on a sender's thread, at pairing and after each
    change, with the transport of each pool and the reasons why others do not work. Callbacks should only pass the
    result on. `pools` are all pools of this rank, and stay alive until close_all(). `local_rank` is the index of this
    rank's GPU on its machine. Raises StartupError.
    """

    def __init__(
        self,
        rank: int,
        pools: Sequence[LocalPool],
        config: PrefillConfig,
        *,
        local_rank: int,
        on_written: Callable[[ChunkWritten], None],
        on_part_written: Callable[[PartWritten], None] = lambda _: None,
        on_routed: Callable[[InstanceId, dict[str, str], dict[str, str]], None] = lambda *_: None,
    ) -> None:
        self._rank = rank
        self._pools = {pool.layout.kind: pool for pool in pools}
        self._transport = open_rdma(
            resolve_transport(config, local_rank),
            [Region(pool.memory.base_address, pool.memory.registered_bytes) for pool in pools],
            places(pool.memory.on_gpu for pool in pools),
        )
        self._send_window = config.send_window
        self._on_written = on_written
        self._on_part_written = on_part_written
        self._on_routed = on_routed
        self._lock = threading.Lock()
        self._routes: dict[InstanceId, _Route] = {}
        self._unopened: dict[InstanceId, str] = {}
        """Paired decode servers that cannot be written to, with the reason."""
        self._closers: list[threading.Thread] = []

    def open(self, hello: Hello, welcome: Welcome) -> None:
        """Prepare writes to a decode server. The two messages must have passed `check_pair`.

        Opening twice only tries routes again that were dropped: a Hello may be repeated. If opening fails, for example
        because there is no memory for staging buffers, all writes to this server fail with that reason until it is
        opened again.
        """
        with self._lock:
            if hello.instance in self._routes:
                for sender in self._routes[hello.instance].senders.values():
                    sender.try_again()
                return
            try:
                self._routes[hello.instance] = self._make_route(hello, welcome)
                self._unopened.pop(hello.instance, None)
            except torch.OutOfMemoryError as error:
                self._unopened[hello.instance] = f"prefill rank {self._rank} has no memory for staging buffers: {error}"
            except Exception as error:
                log.exception("error while preparing KV writes to decode %s", hello.instance)
                self._unopened[hello.instance] = f"prefill rank {self._rank} cannot write to the server: {error!r}"
            if hello.instance in self._unopened:
                log.error("KV for decode %s cannot be sent: %s", hello.instance, self._unopened[hello.instance])

    def close(self, instance: InstanceId) -> None:
        """Stop writing to a decode server; running chunks are cancelled and report their end as usual."""
        with self._lock:
            route = self._routes.pop(instance, None)
            self._unopened.pop(instance, None)
            self._closers = [closer for closer in self._closers if closer.is_alive()]
            if route is None:
                return
            for sender in route.senders.values():  # on other threads: closing waits for the writes in flight
                closer = threading.Thread(target=route.close, args=(sender,), name=f"close-{sender.session}")
                closer.start()
                self._closers.append(closer)

    def close_all(self) -> None:
        """Stop writing to all servers, and wait until nothing is in flight and every chunk is reported."""
        for instance in list(self._routes):
            self.close(instance)
        for closer in self._closers:
            closer.join()

    def write(self, chunk: ChunkWrite, ready: Callable[[], None] | None = None) -> None:
        """Send a chunk. `ready` is called on senders' threads before KV is read, and may wait until it is computed.

        Errors are part of the chunk's result. After the first failure the rest of the chunk is cancelled.
        """
        with self._lock:
            route = self._routes.get(chunk.instance)
            if route is None:
                reason = self._unopened.get(chunk.instance, GONE)
                ended: ChunkWritten | None = ChunkWritten(
                    chunk.instance, chunk.key, chunk.token_start, chunk.token_end, ok=False, reason=reason
                )
            else:
                ended = self._submit(route, chunk, ready)
        if ended is not None:
            self._on_written(ended)

    def write_part(self, command: PartWrite) -> None:
        """Send a part into the region of the ring that was granted for it."""
        with self._lock:
            route = self._routes.get(command.instance)
            reason = self._unopened.get(command.instance, GONE)
        writer = route.part_writers.get(command.part.destination) if route is not None else None
        if writer is None:
            reason = f"no staged route to decode rank {command.part.destination}: {reason}"
            self._on_part_written(PartWritten(command.instance, command.part, ok=False, reason=reason))
        else:
            writer.write(command)

    def cancel(self, instance: InstanceId, key: TransferKey) -> None:
        """Cancel the chunks and parts of a transfer; each still reports its end."""
        with self._lock:
            route = self._routes.get(instance)
        if route is None:
            return
        for writer in route.part_writers.values():
            writer.cancel(key)
        for sender in route.senders.values():
            sender.cancel(key)

    def problems(self) -> list[str]:
        """One sentence for each sender that is stuck."""
        with self._lock:
            senders = [sender for route in self._routes.values() for sender in route.senders.values()]
        return [
            f"the sender to {sender.session} has made no progress for {stalled_s:.0f} s"
            for sender in senders
            if (stalled_s := sender.stalled_s()) > (SLOW_KV_S if sender.waits_for_kv else sender.stuck_s)
        ]

    def _submit(self, route: _Route, chunk: ChunkWrite, ready: Callable[[], None] | None) -> ChunkWritten | None:
        """Submit the jobs of a chunk. Returns the result if there is nothing to send."""
        pending = _Chunk(chunk, self._on_written, [0] * route.decode_ranks if chunk.verify else [])
        regions = [region for region in route.regions if region.takes(chunk) and (chunk.verify or not region.staged)]
        pending.jobs = [(route.senders[region.routes], pending.job(region, ready)) for region in regions]
        if not pending.jobs:
            return pending.written()
        for sender, job in pending.jobs:
            sender.submit(job)
        if pending.failed:  # a job failed before the last one was submitted
            pending.cancel()
        return None

    def _make_route(self, hello: Hello, welcome: Welcome) -> _Route:
        """Plan the regions to a decode server, and start a sender for each set of routes."""
        staged = [one for one in staged_regions(hello, welcome) if one.region.source == self._rank]
        buffers = self._make_buffers(staged)
        plans = list(self._plan_regions(hello, welcome, {one.region for one in staged}, buffers))
        by_routes: dict[tuple[KvRoute, ...], list[_RegionPlan]] = {}
        for plan in plans:
            by_routes.setdefault(plan.routes, []).append(plan)
        senders = {routes: self._start_sender(hello.instance, routes, same) for routes, same in by_routes.items()}
        writers: dict[int, PartWriter] = {}
        try:
            for plan in plans:
                rank, source = plan.region.destination, plan.source
                if plan.staged and rank not in writers:
                    writers[rank] = PartWriter(
                        source.memory.data,
                        source.layout,
                        buffers[rank],
                        senders[plan.routes],
                        on_written=self._on_part_written,
                    )
        except BaseException:
            for writer in writers.values():
                writer.close()
            for sender in senders.values():
                sender.close()
            raise
        return _Route(len(hello.ranks), plans, senders, writers)

    def _plan_regions(
        self, hello: Hello, welcome: Welcome, staged: set[CopyRegion], buffers: Mapping[int, StageBuffers]
    ) -> Iterator[_RegionPlan]:
        """The destinations of this rank's KV: pools of decode ranks or, for staged regions, their rings."""
        for kind, source in self._pools.items():
            ours = Region(source.memory.base_address, source.memory.registered_bytes)
            theirs = [pool for rank in hello.ranks for pool in rank.pools if pool.layout.kind == kind]
            direct = [PoolPair(ours, pool, source.memory.probe) for pool in theirs]
            for region in pair_regions(hello, welcome, kind):
                if region.source != self._rank:
                    continue
                rank = hello.ranks[region.destination]
                pools = buffers[rank.rank].pair if region in staged else direct[rank.rank]
                routes = partial(possible_routes, self._transport, rank, on_gpu=source.memory.on_gpu)
                hot = rank.hot if rank.hot is not None and rank.hot.layout.kind == kind else None
                path: KvPath | None = None if hot is None else "host"
                yield _RegionPlan(region, source, pools, routes(pools.destination), region in staged, path)
                if hot is not None:
                    yield _RegionPlan(
                        region, source, PoolPair(ours, hot, source.memory.probe), routes(hot), path="device"
                    )

    def _make_buffers(self, staged: Iterable[StagedRegion]) -> dict[int, StageBuffers]:
        """Gather buffers for each decode rank with staged regions."""
        largest: dict[int, StagedRegion] = {}
        for one in staged:
            other = largest.setdefault(one.region.destination, one)
            largest[one.region.destination] = max(one, other, key=lambda each: each.part_bytes)
        if not largest:
            return {}
        device = self._pools[STAGED_KIND].memory.data.device
        buffers = {rank: StageBuffers(one.part_bytes, one.ring, device) for rank, one in largest.items()}
        total = sum(len(buffer.data) for buffer in buffers.values())
        log.info("rank %d stages KV for decode ranks %s: %.1f MiB of buffers", self._rank, [*buffers], total / MIB)
        return buffers

    def _start_sender(
        self, instance: InstanceId, routes: tuple[KvRoute, ...], plans: Sequence[_RegionPlan]
    ) -> PeerSender:
        """One sender for the regions with the same routes."""
        kinds = {plan.name for plan in plans}

        def routed(transport: Transport, dropped: Mapping[Transport, str]) -> None:
            log.info("KV of rank %d for decode %s (%s) goes over %s", self._rank, instance, ", ".join(kinds), transport)
            self._on_routed(
                instance, dict.fromkeys(kinds, transport), {str(name): why for name, why in dropped.items()}
            )

        return PeerSender(
            routes,
            list({id(plan.pools): plan.pools for plan in plans}.values()),
            window=self._send_window,
            on_routed=routed,
            device=plans[0].source.memory.probe.device,
            local=self._transport,
        )
