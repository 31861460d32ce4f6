"""The leader process of a server: `python -m pdserve.scheduler.engine.leader`, started by the frontend.

The first line on stdin is `{"config": {...}, "frontend": "ipc://..."}`. End of file on stdin means that the frontend
has exited; the leader exits too. Threads: the engine loop (main thread), the control threads, the frontend link, and
the hub to the rank processes. A single rank replaces the hub: it is a thread of this process, and on prefill it has a
sender thread for each decode rank.
"""

import itertools
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Container, Sequence
from typing import NoReturn

import msgspec

from ...common.errors import StartupError
from ...common.gc_tuning import keep_for_good
from ...common.logs import configure_logging, dropped_lines
from ...common.machine.loop_lag import LoopLag
from ...configs.load import parse_config
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...memory.hisparse.shared_pool import PoolOverlay
from ...memory.index_spaces import KvPage
from ...memory.pages import PageAllocator, most_visible_pages
from ...memory.sizing import GIB
from ...models.formats.gguf_file import forget_gguf
from ...models.loading.catalog import locate_model
from ...models.loading.fingerprint import fingerprints
from ...transfer.control.curve import ClusterKeys
from ...transfer.control.decode import UNPAIRED_S, DecodeControl
from ...transfer.control.peers import AnyControl
from ...transfer.control.prefill import PrefillControl
from ...transfer.control.session import Timing
from ...transfer.mooncake.library import prepare_environment
from ...transfer.mooncake.transports import describe_transport_mismatch
from ...transfer.plan.pairing import check_pair
from ...transfer.plan.ring import StagingRing
from ...transfer.plan.staged_regions import cell_bytes
from ...transfer.protocol.messages import PROTOCOL_VERSION, Hello, InstanceId, Rank, Welcome, dp_instance
from ..decode.memory.hot_buffers import HotLimits
from ..decode.requests.limits import DecodeLimits
from ..decode.rooms.staging import RankRing
from ..decode.scheduler import DecodeScheduler
from ..messages.frontend import ModelInfo, RankInfo, Ready, StartupFailed, Status, Stop
from ..messages.ranks import RankFailed, RankReady
from ..prefill.limits import PrefillLimits
from ..prefill.scheduler import PrefillScheduler
from ..ranks.builder import STEP_SETTING, step_tokens, uses_overlap
from ..ranks.group import RankGroup, RankLostError, Ranks
from ..store.kv_store import StoreLimits, root_of
from .control_status import close_all, control_counters, hashed_page_sizes, peer_status
from .decode_engine import DecodeEngine
from .frontend_link import FrontendLink
from .kv_events import MEDIUM_DEVICE, MEDIUM_HOST, MEDIUM_STORE, KvEventPublisher
from .loop import IDLE_WAIT_S, EngineLoop
from .prefill_engine import PrefillEngine
from .routing import DecodeRouter, PrefillRouter, ToEngine
from .watchdog import Watchdog

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the GIL while another waits for it. Python's default of 5 ms is a whole decode step."""
MISSING_RANKS_S = 15.0
"""Interval of the log line about ranks that are not ready."""
ORPHAN_GRACE_S = 3.0


def main() -> int:
    """Serve until a Stop. Exit code: 0, 2 for a configuration that cannot work, 1 for a lost rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C and sends Stop
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    introduction = json.loads(sys.stdin.buffer.readline())
    config = parse_config(introduction["config"])
    configure_logging(config.log_level, config.role, config.log_format)
    prepare_environment(config.ib_gid_index)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    frontend = FrontendLink(introduction["frontend"], inbox.put)
    threading.Thread(target=_watch_frontend, args=(inbox, frontend), name="frontend-watch", daemon=True).start()
    status, all_ended = 0, False
    try:
        all_ended = Leader(config, frontend, inbox).serve()
    except StartupError as error:
        frontend.send(StartupFailed(str(error)))
        status = 2
    except RankLostError as error:
        log.error("shutting down: %s", error)
        status = 1
    finally:
        frontend.close()
    if not all_ended:
        logging.shutdown()
        os._exit(status)  # a normal exit would wait for the rank of this process, which may be in a long step
    return status


def _watch_frontend(inbox: "queue.SimpleQueue[object]", frontend: FrontendLink) -> NoReturn:
    """Exit when the frontend exits: stop the loop, and end the process if the loop does not stop in time (long step,
    start-up).
    """
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin: a thread blocked inside it is fatal at exit
        pass
    frontend.lost()
    inbox.put(Stop(drain_s=0))
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


class Leader:
    """Builds the engines of a server from its configuration and runs them. Parts that can fail are built first."""

    def __init__(self, config: AnyServerConfig, frontend: FrontendLink, inbox: "queue.SimpleQueue[object]") -> None:
        self._config = config
        self._frontend = frontend
        self._inbox = inbox
        self._instance = InstanceId(uuid.uuid4().hex[:16])
        self._source = locate_model(config.model, config.load_format)
        self._fingerprints = fingerprints(self._source, config.load_format)
        self._keys = (
            ClusterKeys.derive(config.cluster_key.get_secret_value()) if config.cluster_key is not None else None
        )
        self._timing = Timing(heartbeat_interval_s=config.heartbeat_interval_s, peer_timeout_s=config.peer_timeout_s)
        self._ranks = Ranks(config, self._source, self._keys, inbox.put)
        self._ready: list[RankReady] = []
        self._events: KvEventPublisher | None = None

    def serve(self) -> bool:
        """Run until a Stop. Returns whether all ranks have ended."""
        try:
            self._ready = self._await_ranks()
            if self._config.kv_events_port is not None:
                self._events = KvEventPublisher(
                    self._config.host, self._config.kv_events_port, self._config.kv_events_topic
                )
            match self._config:
                case DecodeConfig():
                    self._serve_decode(self._config)
                case PrefillConfig():
                    self._serve_prefill(self._config)
        finally:
            if self._events is not None:
                self._events.close()
            all_ended = self._ranks.close()
        return all_ended

    def _await_ranks(self) -> list[RankReady]:
        """Wait until all ranks are ready. Before Ready is sent, the inbox has only their reports and maybe a Stop."""
        ready: dict[int, RankReady] = {}
        while len(ready) < self._config.world_size:
            match self._next_report(ready):
                case RankReady() as report:
                    ready[report.rank] = report
                case RankFailed(rank=rank, reason=reason, startup=startup):
                    sentence = reason if self._config.world_size == 1 else f"rank {rank}: {reason}"
                    raise StartupError(sentence) if startup else RankLostError(sentence)
                case Stop():
                    raise StartupError("stopped before all ranks were ready")
        return [ready[rank] for rank in sorted(ready)]

    def _next_report(self, ready: Container[int]) -> object:
        while True:
            try:
                return self._inbox.get(timeout=MISSING_RANKS_S)
            except queue.Empty:
                missing = [rank for rank in range(self._config.world_size) if rank not in ready]
                log.info("waiting until rank %s has loaded", ", ".join(map(str, missing)))

    @property
    def _peer_infos(self) -> tuple[Rank, ...]:
        checkpoint = self._fingerprints.model
        return tuple(msgspec.structs.replace(report.peer_info, checkpoint=checkpoint) for report in self._ready)

    def _ranks_of(self, engine: int) -> tuple[Rank, ...]:
        """The ranks of an engine: all, or with data-parallel attention one of each stage. Peers see each engine as a
        server of its own.
        """
        return self._peer_infos[engine :: self._config.dp_size]

    def _introduction_of(self, instance: InstanceId, engine: int) -> tuple[int, InstanceId, str, str, tuple[Rank, ...]]:
        """The first fields of Hello and Welcome."""
        fingerprint, name = self._fingerprints.protocol3, self._source.name
        return PROTOCOL_VERSION, instance, fingerprint, name, self._ranks_of(engine)

    def _rank_group(self, engine: int) -> RankGroup:
        return RankGroup(self._ranks, range(engine, self._config.world_size, self._config.dp_size))

    def _serve_decode(self, config: DecodeConfig) -> None:
        limits = DecodeLimits.of(
            config,
            max_running_requests=self._step_limit,
            retract_pages=int(config.retract_memory_gib * GIB) // self._page_bytes,
            overlap=uses_overlap(config),
            max_step_tokens=self._step_tokens(config),
            on_gpu=self._ready[0].device != "cpu",
            window=self._source.config.page_window,
        )
        engines = [self._decode_engine(config, limits, number) for number in range(config.dp_size)]
        controls = [engine.control for engine in engines]
        router = DecodeRouter([engine.scheduler for engine in engines])
        loop = EngineLoop(engines, router, self._frontend, self._inbox, self._ranks)
        for report in self._ready:
            sessions = ", ".join(f"{session} ({name})" for name, session in _sessions(report.peer_info).items())
            log.info("rank %d receives KV at %s", report.rank, sessions)
        for control in controls:
            for endpoint in config.prefill:
                control.connect(endpoint)
        beside = f", beside requests with {limits.describe_gap_limit()}" if limits.local_prefill != "never" else ""
        log.info("prompts are computed here: %s (local_prefill)%s", limits.local_prefill, beside)
        self._run(loop, controls)

    def _decode_engine(self, config: DecodeConfig, limits: DecodeLimits, number: int) -> DecodeEngine:
        """An engine with its own connections to prefill servers. Each engine is one decode server to them, so they need
        no support for data-parallel attention.
        """
        single = config.dp_size == 1
        instance = self._instance if single else dp_instance(self._instance, number)
        hello = Hello(*self._introduction_of(instance, number), enable_hisparse=config.enable_hisparse)
        scheduler = DecodeScheduler(
            limits,
            PageAllocator[KvPage](self._num_pages),
            self._source.config.eos_token_ids,
            self._hot_limits(config),
            self._rank_rings(number),
            self._store_limits(),
        )
        self._publish_events(scheduler, number)
        control = DecodeControl(
            hello,
            check=lambda welcome: check_pair(hello, welcome),
            on_event=self._inbox.put if single else lambda event: self._inbox.put(ToEngine(number, event)),
            load=lambda: engine.load,
            keys=self._keys,
            timing=self._timing,
            allowed_hosts=config.allowed_bootstrap_hosts,
            unpaired_s=max(UNPAIRED_S, config.prefill_wait_s),
        )
        engine = DecodeEngine(scheduler, self._rank_group(number), control=control, hello=hello)
        return engine

    def _publish_events(self, scheduler: DecodeScheduler | PrefillScheduler, dp_rank: int) -> None:
        """Publish the changes of a prefix cache and what is put into the KV store, if KV events are on."""
        if self._events is not None:
            hisparse = isinstance(self._config, DecodeConfig) and self._config.enable_hisparse
            medium, page_size = MEDIUM_HOST if hisparse else MEDIUM_DEVICE, self._config.page_size
            scheduler.cache.listen(self._events.events_of(dp_rank, page_size, medium))
            if scheduler.kv_store is not None:
                scheduler.kv_store.stored.listen(self._events.events_of(dp_rank, page_size, MEDIUM_STORE))

    def _hot_limits(self, config: DecodeConfig) -> HotLimits | None:
        first = self._ready[0]
        if first.hot_pages is None or first.hot_rows is None:
            return None
        overlay = PoolOverlay.agreed([_overlay(report.peer_info) for report in self._ready])
        own_pages = min(report.hot_pages or 0 for report in self._ready) - overlay.covered
        return HotLimits(own_pages, config.page_size, first.hot_rows, slots=self._step_limit, overlay=overlay)

    def _store_limits(self) -> StoreLimits | None:
        config = self._config
        if config.kv_store is None:
            return None
        return StoreLimits(
            root_of(self._fingerprints.model),
            config.page_size,
            ranks=config.world_size // config.dp_size,
            timeout_s=config.kv_store_timeout_ms / 1000,
            lookup_timeout_s=config.kv_store_lookup_timeout_ms / 1000,
        )

    def _rank_rings(self, engine: int) -> list[RankRing]:
        """The staging ring of each rank of an engine; empty where staging is off."""
        return [
            RankRing(StagingRing(rank.ring.size_bytes), cell_bytes(rank.pools[0].layout))
            for rank in self._ranks_of(engine)
            if rank.ring is not None
        ]

    def _serve_prefill(self, config: PrefillConfig) -> None:
        # data-parallel ranks are equal, and one of them writes the KV of a prompt
        welcome = Welcome(*self._introduction_of(self._instance, 0), enable_hisparse=True)
        limits = PrefillLimits.of(
            config,
            chunk_size=self._step_limit,
            context_length=self._source.config.context_length,
            vocab_size=self._source.config.vocab_size,
            on_gpu=self._ready[0].device != "cpu",
            window=self._source.config.page_window,
        )
        control = PrefillControl(
            config.host,
            config.bootstrap_port,
            welcome,
            check=lambda hello: check_pair(hello, welcome) or self._describe_transports(config, hello),
            on_event=self._inbox.put,
            load=lambda: loop.load,
            keys=self._keys,
            timing=self._timing,
        )
        engines = [
            PrefillEngine(
                PrefillScheduler(limits, PageAllocator[KvPage](self._num_pages), number, self._store_limits()),
                self._rank_group(number),
                control=control,
                welcome=welcome,
            )
            for number in range(config.dp_size)
        ]
        for number, engine in enumerate(engines):
            self._publish_events(engine.scheduler, number)
        router = PrefillRouter([engine.scheduler for engine in engines])
        loop = EngineLoop(engines, router, self._frontend, self._inbox, self._ranks)
        log.info("control port %s:%d", config.url_host, control.port)
        self._run(loop, [control])

    def _describe_transports(self, config: PrefillConfig, hello: Hello) -> str | None:
        """Why the configured transport cannot connect a pair of ranks, if so."""
        pairs = itertools.product(self._peer_infos, hello.ranks)
        problems = (describe_transport_mismatch(config.transport, ours, theirs) for ours, theirs in pairs)
        return next(filter(None, problems), None)

    def _run(self, loop: EngineLoop[DecodeEngine] | EngineLoop[PrefillEngine], controls: Sequence[AnyControl]) -> None:
        watchdog = Watchdog(loop, controls)
        # an idle loop sleeps for IDLE_WAIT_S
        lag = LoopLag(lambda: time.monotonic() - loop.turned_at - IDLE_WAIT_S)

        def status() -> Status:
            snapshot = loop.snapshot
            return Status(
                gauges={**snapshot.gauges, "loop_lag_seconds": lag.longest_s()},
                counters={**snapshot.counters, **control_counters(controls), "log_lines_dropped": dropped_lines()},
                peers=peer_status(controls, loop.engines),
                states=dict(snapshot.states),
                taken_at=snapshot.taken_at,
                loop_age_s=time.monotonic() - loop.turned_at,
                step_age_s=loop.step_age_s(),
                problems=(*watchdog.problems(), *loop.problems()),
                dp_ranks=snapshot.dp_ranks,
                hashed_page_sizes=hashed_page_sizes(loop.engines),
                kv_store_problem=loop.kv_store_problem(),
            )

        forget_gguf()
        keep_for_good()
        try:
            for control in controls:
                control.start()
            self._frontend.start_status(status)
            self._frontend.send(self._introduction())
            lag.start()
            try:
                loop.run()
            finally:
                lag.close()
        finally:
            close_all(controls)

    def _introduction(self) -> Ready:
        model, first = self._source.config, self._ready[0]
        return Ready(
            model=ModelInfo(
                name=self._source.name,
                path=str(self._source.path),
                architecture=model.architecture,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                fingerprint=self._fingerprints.model,
                dtype=first.dtype,
                device=first.device,
            ),
            instance=self._instance,
            page_size=self._config.page_size,
            num_pages=self._num_pages,
            max_total_tokens=self._max_total_tokens,
            ranks=tuple(_rank_info(report) for report in self._ready),
            chosen=self._chosen(),
        )

    @property
    def _max_total_tokens(self) -> int:
        """The longest sequence that fits the pool. With a sliding window, a sequence on decode holds only the pages
        that it sees, so its length may be that of the model's context.
        """
        model, page_size = self._source.config, self._config.page_size
        visible = most_visible_pages(model.page_window, page_size)
        if isinstance(self._config, DecodeConfig) and visible <= self._num_pages:
            return model.context_length
        return min(model.context_length, self._num_pages * page_size)

    def _chosen(self) -> dict[str, int]:
        chosen = {STEP_SETTING[self._config.role]: self._step_limit}
        if isinstance(self._config, DecodeConfig):
            chosen["max_step_tokens"] = self._step_tokens(self._config)
        return chosen

    def _step_tokens(self, config: DecodeConfig) -> int:
        return step_tokens(config, on_gpu=self._ready[0].device != "cpu")

    @property
    def _step_limit(self) -> int:
        """The largest step, in prompt tokens (prefill) or requests (decode)."""
        return min(report.step_limit for report in self._ready)

    @property
    def _num_pages(self) -> int:
        return self._ready[0].num_pages

    @property
    def _page_bytes(self) -> int:
        """Size of a page on the rank where it is largest."""
        return max(sum(pool.layout.page_bytes for pool in rank.pools) for rank in self._peer_infos)


def _sessions(rank: Rank) -> dict[str, str]:
    """The sessions at which a decode rank receives KV, by transport."""
    sessions = {"rdma": rank.rdma_session, "nvlink": rank.nvlink_session, "tcp": rank.session}
    return {transport: session for transport, session in sessions.items() if session is not None}


def _overlay(rank: Rank) -> PoolOverlay:
    """How index keys and hot pages of a rank share memory. A hot page is as large as a page in host memory."""
    latent, keys = (pool.layout for pool in rank.pools)
    return PoolOverlay.of(keys.num_pages, kv_page_bytes=keys.page_bytes, hot_page_bytes=latent.page_bytes)


def _rank_info(report: RankReady) -> RankInfo:
    layout = report.peer_info.pools[0].layout
    return RankInfo(
        rank=report.rank,
        device=report.device,
        layers=(layout.layer_start, layout.layer_end),
        kv_heads=(layout.head_start, layout.head_end),
        transports=tuple(_sessions(report.peer_info)),
        weight_bytes=report.weight_bytes,
        device_kv_bytes=report.device_kv_bytes,
        host_kv_bytes=report.host_kv_bytes,
    )


if __name__ == "__main__":
    sys.exit(main())
