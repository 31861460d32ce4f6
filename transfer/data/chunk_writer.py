"""From "these tokens are computed" to "they are in decode's memory", for one prefill rank.

For every decode server that is paired, the writer knows its links (`links.py`): which layers and heads of which pool
this rank writes to which decode rank. A chunk becomes one job per link, on one sender thread per session of a decode
rank, and ends in exactly one `ChunkWritten`, after the last of its jobs.

Links that are staged (`staged_regions.py`) are no part of that: what goes over them is ordered part by part, as room
for it is granted, and each part ends in one `PartWritten` (`part_writer.py`). Of those links a chunk has the checksum
only.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ...configs.schema import PrefillConfig
from ..mooncake.infiniband import SYSFS
from ..mooncake.library import Transport
from ..mooncake.sockets import Region
from ..mooncake.transports import KvRoute, drop_unusable_rdma, possible_routes, resolve_transport
from ..plan.copy_regions import CopyRegion
from ..plan.copy_runs import CopyRuns, expand_runs, expand_token_runs
from ..plan.staged_regions import STAGED_KIND, StagedRegion, pair_regions, staged_regions
from ..protocol.checksum import add_sums, block_sum
from ..protocol.messages import Hello, InstanceId, Pool, Rank, TransferKey, Welcome
from .chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten
from .local_pool import LocalPool
from .part_writer import PartJob, PartWriter, StageBuffers
from .sender import PeerSender, PoolPair, RdmaSender, SendJob, SendResult

log = logging.getLogger(__name__)

NO_RUNS: Final = CopyRuns(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
MIB: Final = 1 << 20
GONE: Final = "the decode server is gone"
STALL_S: Final = 30.0
"""A sender that has work and makes no progress for this long is a problem to report."""


@dataclass(frozen=True, slots=True)
class _LinkPlan:
    """Where one link goes, before its sender has been started."""

    link: CopyRegion
    source: LocalPool
    pools: PoolPair
    routes: tuple[KvRoute, ...]


@dataclass(frozen=True, slots=True)
class _LinkRoute(_LinkPlan):
    """One link: from a pool of ours into a pool of a decode rank, and the thread that writes there.

    A staged link has nothing to plan: its KV goes through the decode rank's PartWriter.
    """

    sender: PeerSender
    staged: bool

    def plan(self, chunk: ChunkWrite) -> CopyRuns:
        """The copies of a chunk; raises PlanError."""
        if self.staged:
            return NO_RUNS
        expand = expand_token_runs if chunk.granularity == "token" else expand_runs
        return expand(
            self.source.layout,
            self.pools.destination.layout,
            chunk.source_pages,
            chunk.indices,
            chunk.token_start,
            chunk.token_end,
            self.link,
        )

    def checksum(self, chunk: ChunkWrite) -> int:
        """The sum of what this link writes."""
        start = chunk.token_start % self.source.layout.page_size
        end = start + chunk.token_end - chunk.token_start
        rows = self.source.memory.read_tokens(chunk.source_pages, start, end)
        return block_sum(rows, self.source.layout, self.link.layers, self.link.heads)


@dataclass(frozen=True, slots=True)
class _Route:
    """All links of this rank to one decode server."""

    decode_ranks: int
    senders: tuple[PeerSender, ...]
    links: tuple[_LinkRoute, ...]
    part_writers: dict[int, PartWriter]
    """By decode rank."""

    def close(self, sender: PeerSender) -> None:
        """End a sender and what feeds it."""
        for writer in self.part_writers.values():
            if writer.sender is sender:
                writer.close()
        sender.close()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LinkJob(SendJob):
    """The part of a chunk that goes over one link."""

    chunk: "_Chunk"
    route: _LinkRoute


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk in the hands of the senders."""

    order: ChunkWrite
    checksums: list[int]
    jobs: list[_LinkJob] = field(default_factory=list)
    results: list[SendResult] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, result: SendResult) -> bool:
        """Note the end of a job; whether it was the last one."""
        with self.lock:
            self.results.append(result)
            return len(self.results) == len(self.jobs)

    def add_checksum(self, decode_rank: int, checksum: int) -> None:
        with self.lock:
            self.checksums[decode_rank] = add_sums((self.checksums[decode_rank], checksum))

    @property
    def failed(self) -> bool:
        with self.lock:
            return any(not result.ok for result in self.results)

    def cancel(self) -> None:
        """Stop the jobs that have not ended; each still reports."""
        for job in self.jobs:
            job.route.sender.cancel_job(job)

    def written(self) -> ChunkWritten:
        failed = [result for result in self.results if not result.ok]
        causes = [result for result in failed if not result.cancelled] or failed
        return _written(
            self.order,
            reason=(causes[0].reason or "cancelled") if causes else None,
            late_writes=any(result.late_writes for result in self.results),
            writes=sum(result.writes for result in self.results),
            bytes_written=sum(result.bytes_written for result in self.results),
            checksums=tuple(self.checksums),
        )


class ChunkWriter:
    """Writes chunks of one prefill rank to decode servers. All methods return without waiting, close_all() excepted.

    `on_written` is called once per write(), and `on_part_written` once per write_part(): on a sender's thread or, when
    there is nothing to send, on the caller's. `on_routed` is called on a sender's thread with how KV of each pool goes
    to a decode server, and which transports do not work and why: at pairing, and whenever that changes. They should
    hand the result over and return. `pools` are all pools of this rank, and stay alive until close_all(). `local_rank`
    is the index of this rank's GPU on its machine. Raises StartupError.
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
        sysfs: Path = SYSFS,
    ) -> None:
        self._rank = rank
        self._pools = {pool.layout.kind: pool for pool in pools}
        self._transport = drop_unusable_rdma(
            resolve_transport(config, local_rank, sysfs=sysfs),
            [Region(pool.memory.base_address, pool.memory.registered_bytes) for pool in pools],
        )
        self._send_window = config.send_window
        self._on_written = on_written
        self._on_part_written = on_part_written
        self._on_routed = on_routed
        self._lock = threading.Lock()
        self._routes: dict[InstanceId, _Route] = {}
        self._unopened: dict[InstanceId, str] = {}
        """Why nothing can be written to a decode server that is paired."""
        self._closers: list[threading.Thread] = []

    def open(self, hello: Hello, welcome: Welcome) -> None:
        """Get ready to write to a decode server. `check_pair` has found nothing wrong with these two messages.

        Opening what is open changes nothing: a Hello may come again. Where it fails, for want of memory for staging
        buffers, say, everything that is to be written there fails with the reason, until it is opened again.
        """
        with self._lock:
            if hello.instance in self._routes:
                return
            try:
                self._routes[hello.instance] = self._make_route(hello, welcome)
                self._unopened.pop(hello.instance, None)
            except torch.OutOfMemoryError as error:
                self._unopened[hello.instance] = f"prefill rank {self._rank} has no memory for staging buffers: {error}"
            except Exception as error:
                log.exception("opening the way to decode %s", hello.instance)
                self._unopened[hello.instance] = f"prefill rank {self._rank} cannot write to the server: {error!r}"
            if hello.instance in self._unopened:
                log.error("KV for decode %s cannot be sent: %s", hello.instance, self._unopened[hello.instance])

    def close(self, instance: InstanceId) -> None:
        """Stop writing to a decode server; chunks under way are cancelled and report their end as usual."""
        with self._lock:
            route = self._routes.pop(instance, None)
            self._unopened.pop(instance, None)
            self._closers = [closer for closer in self._closers if closer.is_alive()]
            if route is None:
                return
            for sender in route.senders:  # closing waits for the writes in flight: not on this thread
                closer = threading.Thread(target=route.close, args=(sender,), name=f"close-{sender.session}")
                closer.start()
                self._closers.append(closer)

    def close_all(self) -> None:
        """Stop writing to everybody, and wait until nothing is in flight and every chunk has been reported."""
        for instance in list(self._routes):
            self.close(instance)
        for closer in self._closers:
            closer.join()

    def write(self, chunk: ChunkWrite, ready: Callable[[], None] | None = None) -> None:
        """Send a chunk. `ready` is called on senders' threads before KV is read, and may wait for it to be computed.

        What goes wrong becomes the chunk's result. On the first failure the rest of the chunk is cancelled.
        """
        with self._lock:
            route = self._routes.get(chunk.instance)
            if route is None:
                ended: ChunkWritten | None = _written(chunk, reason=self._unopened.get(chunk.instance, GONE))
            else:
                ended = self._submit(route, chunk, ready)
        if ended is not None:
            self._on_written(ended)

    def write_part(self, order: PartWrite) -> None:
        """Send a part over a staged link, into the room that was granted for it."""
        with self._lock:
            route = self._routes.get(order.instance)
            reason = self._unopened.get(order.instance, GONE)
        writer = route.part_writers.get(order.part.destination) if route is not None else None
        if writer is None:
            reason = f"nothing is staged for decode rank {order.part.destination}: {reason}"
            self._on_part_written(PartWritten(order.instance, order.part, ok=False, reason=reason))
        else:
            writer.write(order)

    def cancel(self, instance: InstanceId, key: TransferKey) -> None:
        """Stop the chunks and parts of a transfer; each still reports its end."""
        with self._lock:
            route = self._routes.get(instance)
        if route is None:
            return
        for writer in route.part_writers.values():
            writer.cancel(key)
        for sender in route.senders:
            sender.cancel(key)

    def problems(self) -> list[str]:
        """One sentence for each sender that is stuck."""
        with self._lock:
            senders = [sender for route in self._routes.values() for sender in route.senders]
        return [
            f"the sender to {sender.session} has made no progress for {stalled_s:.0f} s"
            for sender in senders
            if (stalled_s := sender.stalled_s()) > STALL_S
        ]

    def _submit(self, route: _Route, chunk: ChunkWrite, ready: Callable[[], None] | None) -> ChunkWritten | None:
        """Hand a chunk to its senders; its end, when there is nothing for them to do."""
        pending = _Chunk(chunk, [0] * route.decode_ranks if chunk.verify else [])
        links = [link for link in route.links if chunk.verify or not link.staged]
        pending.jobs = [_link_job(pending, link, ready) for link in links]
        if not pending.jobs:
            return pending.written()
        for job in pending.jobs:
            job.route.sender.submit(job)
        if pending.failed:  # before the last of them could be cancelled
            pending.cancel()
        return None

    def _take_result(self, result: SendResult) -> None:
        """A sender's thread: note the end of a job, and report the chunk after its last one."""
        job = result.job
        if isinstance(job, PartJob):
            job.ended(result)
            return
        assert isinstance(job, _LinkJob), f"not a part of a chunk: {job!r}"
        chunk = job.chunk
        if chunk.add(result):
            self._on_written(chunk.written())
        elif not result.ok:
            chunk.cancel()

    def _make_route(self, hello: Hello, welcome: Welcome) -> _Route:
        """Plan the links to a decode server, and start a sender for each session they go to."""
        staged = {one.region: one for one in staged_regions(hello, welcome) if one.region.source == self._rank}
        buffers = self._make_buffers(staged.values())
        plans = list(self._plan_links(hello, welcome, {link: buffers[link.destination] for link in staged}))
        by_routes: dict[tuple[KvRoute, ...], list[_LinkPlan]] = {}
        for plan in plans:
            by_routes.setdefault(plan.routes, []).append(plan)
        senders = {routes: self._start_sender(hello.instance, routes, same) for routes, same in by_routes.items()}
        writers: dict[int, PartWriter] = {}
        try:
            for plan in plans:
                rank = plan.link.destination
                if plan.link in staged and rank not in writers:
                    writers[rank] = self._start_part_writer(plan, buffers[rank], senders[plan.routes])
        except BaseException:
            for writer in writers.values():
                writer.close()
            for sender in senders.values():
                sender.close()
            raise
        links = (
            _LinkRoute(plan.link, plan.source, plan.pools, plan.routes, senders[plan.routes], plan.link in staged)
            for plan in plans
        )
        return _Route(len(hello.ranks), tuple(senders.values()), tuple(links), writers)

    def _plan_links(
        self, hello: Hello, welcome: Welcome, staged: Mapping[CopyRegion, StageBuffers]
    ) -> Iterator[_LinkPlan]:
        """Where this rank's KV goes: into pools of decode ranks or, for the links with buffers, into their rings."""
        for kind, source in self._pools.items():
            ours = Region(source.memory.base_address, source.memory.registered_bytes)
            direct = [PoolPair(ours, _pool_of(rank, kind), source.memory.probe) for rank in hello.ranks]
            for link in pair_regions(hello, welcome, kind):
                if link.source != self._rank:
                    continue
                pools = staged[link].pair if link in staged else direct[link.destination]
                routes = possible_routes(
                    self._transport,
                    hello.ranks[link.destination],
                    pools.destination,
                    on_gpu=source.memory.on_gpu,
                )
                yield _LinkPlan(link, source, pools, routes)

    def _make_buffers(self, staged: Iterable[StagedRegion]) -> dict[int, StageBuffers]:
        """Room to gather parts in, for each decode rank that they go to."""
        largest: dict[int, StagedRegion] = {}
        for one in staged:
            other = largest.setdefault(one.region.destination, one)
            largest[one.region.destination] = max(one, other, key=lambda link: link.part_bytes)
        if not largest:
            return {}
        data = self._pools[STAGED_KIND].data
        assert data is not None, "KV is staged from a pool whose tensor was not given"
        buffers = {rank: StageBuffers(one.part_bytes, one.ring, data.device) for rank, one in largest.items()}
        total = sum(len(buffer.data) for buffer in buffers.values())
        log.info("KV of rank %d is staged to decode ranks %s: %.1f MiB of buffers", self._rank, [*buffers], total / MIB)
        return buffers

    def _start_part_writer(self, plan: _LinkPlan, buffers: StageBuffers, sender: PeerSender) -> PartWriter:
        assert plan.source.data is not None, "buffers were made for it"
        return PartWriter(
            plan.source.data,
            plan.source.layout,
            buffers,
            sender,
            on_written=self._on_part_written,
        )

    def _start_sender(
        self, instance: InstanceId, routes: tuple[KvRoute, ...], plans: Sequence[_LinkPlan]
    ) -> PeerSender:
        """One for links that can take the same routes."""
        kinds = {"+".join(plan.source.layout.kind) for plan in plans}

        def routed(transport: Transport, dropped: Mapping[Transport, str]) -> None:
            log.info("KV of rank %d for decode %s (%s) goes over %s", self._rank, instance, ", ".join(kinds), transport)
            self._on_routed(
                instance, dict.fromkeys(kinds, transport), {str(name): why for name, why in dropped.items()}
            )

        return PeerSender(
            routes,
            list({id(plan.pools): plan.pools for plan in plans}.values()),
            window=self._send_window,
            on_result=self._take_result,
            on_routed=routed,
            device=plans[0].source.memory.probe.device,
            rdma=RdmaSender(self._transport.host, self._transport.rdma_devices, self._transport.gid_index),
        )


def _link_job(chunk: _Chunk, route: _LinkRoute, ready: Callable[[], None] | None) -> _LinkJob:
    order = chunk.order

    def prepare() -> None:
        if ready is not None:
            ready()
        if order.verify:
            chunk.add_checksum(route.link.destination, route.checksum(order))

    return _LinkJob(
        key=order.key,
        runs=partial(route.plan, order),
        ready=prepare,
        pools=route.pools,
        chunk=chunk,
        route=route,
    )


def _pool_of(rank: Rank, kind: tuple[str, ...]) -> Pool:
    return next(pool for pool in rank.pools if pool.layout.kind == kind)


def _written(
    chunk: ChunkWrite,
    *,
    reason: str | None,
    late_writes: bool = False,
    writes: int = 0,
    bytes_written: int = 0,
    checksums: tuple[int, ...] = (),
) -> ChunkWritten:
    """The end of a chunk; without a reason it is a good one."""
    return ChunkWritten(
        instance=chunk.instance,
        key=chunk.key,
        token_start=chunk.token_start,
        token_end=chunk.token_end,
        ok=reason is None,
        reason=reason or "",
        late_writes=late_writes,
        writes=writes,
        bytes_written=bytes_written,
        checksums=checksums if reason is None else (),
    )
