"""The leader engine process of a server: `python -m pdserve.scheduler.leader`, started by the HTTP front.

The first line on stdin is `{"config": {...}, "front": "ipc://..."}`; end of file there means that the front has gone,
and ends this process. Threads: the engine loop (this one), the control plane, the front link, a sender per decode peer.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from typing import NoReturn

import torch

from ..configs.errors import StartupError
from ..configs.load import parse_config
from ..configs.logs import configure_logging
from ..configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ..memory.device import free_memory_bytes, resolve_device
from ..memory.kv_pool import KvPool
from ..memory.pages import PageAllocator
from ..memory.sizing import GIB, check_weights_fit, pool_pages
from ..models.catalog import locate_model
from ..models.fingerprint import fingerprint
from ..models.runner import ModelRunner, resolve_dtype
from ..transfer.control import Control
from ..transfer.curve import ClusterKeys
from ..transfer.decode_control import DecodeControl
from ..transfer.engine import ReceiveEngine
from ..transfer.layout import KvLayout, Plane
from ..transfer.messages import PROTOCOL_VERSION, Hello, InstanceId, Pool, Rank, Welcome
from ..transfer.pairing import check_pair
from ..transfer.prefill_control import PrefillControl
from ..transfer.session import Timing
from ..transfer.transports import describe_transport_mismatch, machine_id, open_nvlink_receiver
from .decode import DecodeScheduler
from .decode_loop import DecodeLoop
from .executor import Executor
from .front import ModelInfo, PeerStatus, Ready, StartupFailed, Status, Stop
from .front_link import FrontLink
from .intake import DecodeLimits
from .prefill import PrefillLimits, PrefillScheduler
from .prefill_loop import PrefillLoop

log = logging.getLogger(__name__)

CONTROL_STALL_S = 5.0
ORPHAN_GRACE_S = 3.0
STEP_BYTES = 2 * GIB
"""Left free on a GPU for activations and the workspace of libraries."""
PREFILL_POOL_CONTEXTS = 8
"""An automatic prefill pool holds this many prompts of full length: more would never be used at once."""


def main() -> int:
    """Serve until told to stop; the exit code is 0, or 2 when the configuration cannot work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's: it drains us
    introduction = json.loads(sys.stdin.buffer.readline())
    config = parse_config(introduction["config"])
    configure_logging(config.log_level, config.role)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_watch_front, args=(inbox,), name="front-watch", daemon=True).start()
    front = FrontLink(introduction["front"], inbox.put)
    try:
        Leader(config, front, inbox).serve()
    except StartupError as error:
        front.send(StartupFailed(str(error)))
        return 2
    finally:
        front.close()
    return 0


def _watch_front(inbox: "queue.SimpleQueue[object]") -> NoReturn:
    """End with the front: stop the loop, and leave anyway if it does not turn (a long step, a start-up)."""
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin: a thread blocked inside it is fatal at exit
        pass
    inbox.put(Stop(drain_s=0))
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


class Leader:
    """Builds a server's engine from its configuration, in the order in which things can fail, and runs it."""

    def __init__(self, config: AnyServerConfig, front: FrontLink, inbox: "queue.SimpleQueue[object]") -> None:
        self._config = config
        self._front = front
        self._inbox = inbox
        self._instance = InstanceId(uuid.uuid4().hex[:16])
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._source = locate_model(config.model)
        self._device = resolve_device(config.device)
        self._fingerprint = fingerprint(self._source)
        self._executor = Executor(*self._load_model(), eos_token_ids=self._source.config.eos_token_ids)
        self._layout = _layout(self._executor.pool)
        self._keys = ClusterKeys(config.cluster_key.get_secret_value()) if config.cluster_key is not None else None
        self._timing = Timing(heartbeat_interval_s=config.heartbeat_interval_s, peer_timeout_s=config.peer_timeout_s)

    def serve(self) -> None:
        """Run until stopped."""
        match self._config:
            case DecodeConfig():
                self._serve_decode(self._config)
            case PrefillConfig():
                self._serve_prefill(self._config)

    def _load_model(self) -> tuple[ModelRunner, KvPool]:
        config, source = self._config, self._source
        dtype = resolve_dtype(config.dtype, source.config, self._device)
        started = time.monotonic()
        check_weights_fit(ModelRunner.weight_bytes(source, dtype), self._device)
        log.info("loading %s (%s) from %s", source.name, source.config.architecture, source.path)
        runner = ModelRunner.load(source, device=self._device, dtype=dtype)
        log.info("loaded in %.1f s: %s on %s", time.monotonic() - started, str(dtype)[6:], self._device)
        useful = source.config.context_length * (
            config.max_running_requests if isinstance(config, DecodeConfig) else PREFILL_POOL_CONTEXTS
        )
        pages = pool_pages(
            config,
            token_bytes=runner.kv_token_bytes,
            most_useful_tokens=useful,
            free_bytes=free_memory_bytes(self._device) - self._step_bytes(),
        )
        pool = runner.make_pool(pages, config.page_size)
        log.info(
            "KV pool: %d tokens in %d pages of %d, %.2f GiB",
            pages * config.page_size,
            pages,
            config.page_size,
            pool.size_bytes / GIB,
        )
        if isinstance(config, DecodeConfig) and config.cuda_graphs and self._device.type == "cuda":
            started = time.monotonic()
            context = min(source.config.context_length, pages * config.page_size)
            runner.capture_graphs(pool, max_batch=config.max_running_requests, max_context=context)
            log.info(
                "CUDA graphs for batches up to %d in %.1f s", config.max_running_requests, time.monotonic() - started
            )
        return runner, pool

    def _step_bytes(self) -> int:
        """Device memory that a step needs beside weights and KV: activations, logits and, on decode, its graphs."""
        if self._device.type != "cuda":
            return 0
        config, vocab_size = self._config, self._source.config.vocab_size
        rows = config.max_running_requests if isinstance(config, DecodeConfig) else config.chunk_size
        return STEP_BYTES + rows * vocab_size * 4 * 2

    def _serve_decode(self, config: DecodeConfig) -> None:
        pool = self._executor.pool
        receiver = ReceiveEngine(config.public_host)
        receiver.register(pool.base_address, pool.size_bytes)
        nvlink = open_nvlink_receiver(
            config.transport,
            config.public_host,
            pool.base_address,
            pool.size_bytes,
            on_gpu=self._device.type == "cuda",
        )
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            instance=self._instance,
            model_fingerprint=self._fingerprint,
            model_name=self._source.name,
            ranks=(self._rank(receiver.session, nvlink.session if nvlink is not None else None),),
        )
        limits = DecodeLimits(
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            growth_tokens=config.growth_tokens,
            retract_pages=int(config.retract_memory_gib * GIB) // self._layout.page_bytes,
            queue_timeout_s=config.queue_timeout_s,
            prefill_wait_s=config.prefill_wait_s,
            prefill_timeout_s=config.prefill_timeout_s,
            request_timeout_s=config.request_timeout_s,
            quarantine_s=config.quarantine_s,
            verify_kv=config.verify_kv,
            prefix_cache=config.prefix_cache,
        )
        scheduler = DecodeScheduler(limits, PageAllocator(pool.num_pages), self._source.config.eos_token_ids)
        control = DecodeControl(
            hello,
            check=lambda welcome: check_pair(hello, welcome),
            on_event=self._inbox.put,
            load=lambda: loop.load,
            keys=self._keys,
            timing=self._timing,
        )
        loop = DecodeLoop(
            scheduler, self._front, self._inbox, executor=self._executor, control=control, verify_kv=config.verify_kv
        )
        log.info("KV arrives at %s (tcp)%s", receiver.session, f", {nvlink.session} (nvlink)" if nvlink else "")
        for endpoint in config.prefill:
            control.connect(endpoint)
        try:
            self._run(loop, control)
        finally:
            control.close()
            receiver.close()
            if nvlink is not None:
                nvlink.close()

    def _serve_prefill(self, config: PrefillConfig) -> None:
        pool = self._executor.pool
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            instance=self._instance,
            model_fingerprint=self._fingerprint,
            model_name=self._source.name,
            ranks=(self._rank(None),),
        )
        limits = PrefillLimits(
            page_size=config.page_size,
            chunk_size=config.chunk_size,
            max_queued_requests=config.max_queued_requests,
            context_length=self._source.config.context_length,
            vocab_size=self._source.config.vocab_size,
            observe_timeout_s=config.observe_timeout_s,
            prefix_cache=config.prefix_cache,
        )
        scheduler = PrefillScheduler(limits, PageAllocator(pool.num_pages))
        control = PrefillControl(
            config.host,
            config.bootstrap_port,
            welcome,
            check=lambda hello: (
                check_pair(hello, welcome)
                or describe_transport_mismatch(config.transport, welcome.ranks[0], hello.ranks[0])
            ),
            on_event=self._inbox.put,
            load=lambda: loop.load,
            keys=self._keys,
            timing=self._timing,
        )
        loop = PrefillLoop(
            scheduler,
            self._front,
            self._inbox,
            executor=self._executor,
            control=control,
            layout=self._layout,
            send_window=config.send_window,
            transport=config.transport,
        )
        log.info("control port %s:%d", config.host, control.port)
        try:
            self._run(loop, control)
        finally:
            control.close()
            loop.close()

    def _run(self, loop: DecodeLoop | PrefillLoop, control: Control) -> None:
        def status() -> Status:
            problems = loop.problems()
            if control.progress_age_s() > CONTROL_STALL_S:
                problems.append(f"the control thread has not turned for {control.progress_age_s():.0f} s")
            snapshot = loop.snapshot
            return Status(
                gauges=dict(snapshot.gauges),
                counters={**snapshot.counters, **{f"control_{name}": n for name, n in control.stats().items()}},
                peers=tuple(
                    PeerStatus(peer.endpoint, peer.state, peer.instance, peer.detail, peer.round_trip_ms)
                    for peer in control.peers()
                ),
                states=dict(snapshot.states),
                loop_age_s=time.monotonic() - loop.turned_at,
                problems=tuple(problems),
            )

        control.start()
        self._front.start_status(status)
        self._front.send(self._ready())
        loop.run()

    def _ready(self) -> Ready:
        model, pool = self._source.config, self._executor.pool
        return Ready(
            model=ModelInfo(
                name=self._source.name,
                path=str(self._source.path),
                architecture=model.architecture,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                fingerprint=self._fingerprint,
                dtype=pool.dtype_name,
                device=str(self._device),
            ),
            instance=self._instance,
            page_size=pool.page_size,
            num_pages=pool.num_pages,
            max_total_tokens=min(model.context_length, pool.num_pages * pool.page_size),
        )

    def _rank(self, session: str | None, nvlink_session: str | None = None) -> Rank:
        pool = self._executor.pool
        pools = (Pool(self._layout, pool.base_address, pool.size_bytes),)
        return Rank(0, session, pools, machine_id(), nvlink_session)


def _layout(pool: KvPool) -> KvLayout:
    token_bytes = pool.head_token_bytes
    return KvLayout(
        planes=(Plane("k", token_bytes), Plane("v", token_bytes)),
        layer_start=0,
        layer_end=pool.num_layers,
        head_start=0,
        head_end=pool.num_heads,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        dtype=pool.dtype_name,
    )


if __name__ == "__main__":
    sys.exit(main())
