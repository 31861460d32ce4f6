"""The engine that writes to one rank of a peer, over the first of its routes that works."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...common.errors import StartupError
from ...kernels.backends.streams import use_own_stream
from ..mooncake.engine import PREFLIGHT_TIMEOUT_S, SendEngine, WritesPendingError
from ..mooncake.infiniband import port_problem
from ..mooncake.library import Transport
from ..mooncake.sockets import PeerUnreachableError, Region, describe_engine
from ..mooncake.transports import REMEDIES, KvRoute, LocalTransport
from ..protocol.messages import Pool
from .probe import probe

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""How long after a trial a dropped RDMA route is tried again. A trial takes at most three seconds."""
TRUSTED_S: Final = 60.0
MOST_TRIALS: Final = 64
"""A route that fails within TRUSTED_S after it was used again passes trials, which are small, but not KV: a switch may
drop large packets. From then on it has to pass twice as many trials in a row as the last time.
"""
LOOK_S: Final = 1.0
"""After a port was down, also for a moment, Mooncake does not use it for half a minute. The next request should not be
the first to notice.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PoolPair:
    """Our memory and a pool of the peer; offsets of copies count from the start of each. `probe` is local memory to
    test a transport with; without it the pool is not probed.
    """

    source: Region
    destination: Pool
    probe: torch.Tensor | None = None


class RoutedEngine:
    """Opens an engine when needed. Used by one thread, but `transport` and `session` may be read by others.

    A route that does not work, or fails later, is dropped if another route works. A dropped RDMA route is tried again,
    on a thread of its own: at most RETRY_S apart while our port is active, and at once by try_again(). When it works
    (for longer if it failed soon after its last return), `on_returned` is called on that thread, and the next open()
    changes to it. `on_routed` is called with the transport in use, and with the reasons why others are not used.
    """

    def __init__(
        self,
        routes: Sequence[KvRoute],
        pools: Sequence[PoolPair],
        local: LocalTransport,
        on_routed: Callable[[Transport, Mapping[Transport, str]], None],
        on_returned: Callable[[], None] = lambda: None,
    ) -> None:
        self._routes = tuple(routes)
        self._used = 0
        self._pools = pools
        self._local = local
        self._on_routed = on_routed
        self._on_returned = on_returned
        self._dropped: dict[Transport, str] = {}
        self._engine: SendEngine | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        """A dropped route is to be tried now."""
        self._ended = False
        self._retrier: threading.Thread | None = None
        self._returned: SendEngine | None = None
        """An engine of the first route, which works again."""
        self._returned_at = -math.inf
        self._trials = 1
        """How many trials in a row it must pass."""

    @property
    def transport(self) -> Transport:
        return self._routes[self._used].transport

    @property
    def session(self) -> str:
        return self._routes[self._used].session

    @property
    def has_returned(self) -> bool:
        """Whether open() would change to a route that works again."""
        return self._returned is not None

    @property
    def look_s(self) -> float | None:
        """How often look() is needed, besides after `on_returned`; None for never."""
        return LOOK_S if self.transport == "rdma" else None

    def look(self) -> None:
        """Change the route if open() would, while nothing is sent. Raises what open() raises."""
        if self.has_returned or (self._engine is not None and self.problem() is not None):
            self.open()

    def open(self) -> SendEngine:
        """The engine of the first route that works. If none works, raises the error of the last one. No route is
        dropped then, because the cause is the peer (it is gone), not a transport.
        """
        self._take_returned()
        if self._engine is not None and (down := self.problem()) is not None:
            self.close()
            if self._used + 1 < len(self._routes):
                self._drop_routes(self._used + 1, down)
        problem = ""
        for index in range(self._used, len(self._routes)):
            if self._engine is not None:
                break
            try:
                self._engine = self._try_route(self._routes[index])
            except (PeerUnreachableError, StartupError) as error:
                if index + 1 == len(self._routes):
                    raise
                problem = problem or str(error)
            else:
                self._drop_routes(index, problem)
                self._on_routed(self.transport, self._dropped)
        assert self._engine is not None, "a sender has at least one route"
        return self._engine

    def problem(self) -> str | None:
        """Why the route in use cannot work at the moment, as far as this machine knows."""
        return port_problem(self._local.rdma_devices) if self.transport == "rdma" else None

    def _try_route(self, route: KvRoute) -> SendEngine:
        """An engine whose probes of all pools succeeded. Raises PeerUnreachableError and StartupError."""
        if route.transport == "rdma" and (down := port_problem(self._local.rdma_devices)) is not None:
            raise PeerUnreachableError(down)
        sources = {pair.source for pair in self._pools}
        targets = {Region(pair.destination.base_address, pair.destination.size_bytes) for pair in self._pools}
        engine = SendEngine(
            route.session,
            sorted(targets, key=lambda region: region.addr),
            transport=route.transport,
            rdma=self._local.rdma if route.transport == "rdma" else None,
            sources=sorted(sources, key=lambda region: region.addr),
        )
        try:
            for pair in self._pools:
                problem = probe(engine, pair.probe, pair.destination) if pair.probe is not None else None
                if problem is not None:
                    raise PeerUnreachableError(f"decode {route.session} cannot be written to: {problem}")
        except BaseException:
            _destroy(engine)
            raise
        return engine

    def drop_failed_route(self, reason: str) -> None:
        """After a failed write: if the next route reaches the peer, the transport was at fault, and later jobs use that
        route.
        """
        if self._used + 1 < len(self._routes):
            with contextlib.suppress(PeerUnreachableError):
                describe_engine(self._routes[self._used + 1].session, PREFLIGHT_TIMEOUT_S)
                if self.problem() is None:
                    soon = time.monotonic() < self._returned_at + TRUSTED_S
                    self._trials = min(2 * self._trials, MOST_TRIALS) if soon else 1
                self._drop_routes(self._used + 1, reason)

    def _drop_routes(self, used: int, reason: str) -> None:
        """Use route `used` from now on, and none before it."""
        for route in self._routes[self._used : used]:
            self._dropped[route.transport] = reason
            log.warning(
                "KV for decode %s goes over %s from now on, because %s does not work: %s. %s",
                self._routes[used].session,
                self._routes[used].transport,
                route.transport,
                reason,
                REMEDIES.get(route.transport, ""),
            )
        self._used = used
        if used and self._routes[0].transport == "rdma" and self._local.rdma is not None and self._retrier is None:
            self._wanted.clear()  # the peer may have introduced itself again long before
            self._retrier = threading.Thread(target=self._retry, name=f"retry-{self._routes[0].session}", daemon=True)
            self._retrier.start()

    def try_again(self) -> None:
        """Try a dropped RDMA route now, because the peer has introduced itself again. May be called by any thread."""
        self._wanted.set()

    def _retry(self) -> None:
        """Try the first route until it works again or end() is called."""
        for pair in self._pools[:1]:
            if pair.probe is not None:
                use_own_stream(pair.probe.device)
        passed = 0
        while True:
            self._wanted.wait(RETRY_S)
            self._wanted.clear()
            if self._ended:
                return
            try:
                engine = self._try_route(self._routes[0])
            except (PeerUnreachableError, StartupError) as error:
                log.debug("%s to %s still does not work: %s", self._routes[0].transport, self.session, error)
                passed = 0
                continue
            except Exception:
                log.exception("error while trying %s again", self._routes[0].session)
                continue
            passed += 1
            if passed < self._trials:
                _destroy(engine)
                continue
            with self._lock:
                self._returned, self._retrier = engine, None
            self._on_returned()
            return

    def _take_returned(self) -> None:
        with self._lock:
            engine, self._returned = self._returned, None
        if engine is None:
            return
        self.close()
        self._engine, self._used, self._dropped, self._returned_at = engine, 0, {}, time.monotonic()
        log.info("KV for decode %s goes over %s again", self.session, self.transport)
        self._on_routed(self.transport, self._dropped)

    def close(self) -> None:
        """Destroy the engine: its writes have ended afterwards. The next open() creates a new one. Raises
        WritesPendingError.
        """
        if self._engine is not None:
            try:
                self._engine.destroy()
            except WritesPendingError:
                raise
            except Exception:
                log.exception("error while destroying the engine to %s", self.session)
            self._engine = None

    def end(self) -> None:
        """Destroy the engine for good, also one that has just returned. Their writes have ended."""
        self._ended = True
        self._wanted.set()
        if (retrier := self._retrier) is not None:
            retrier.join()
        self.close()
        with self._lock:
            self._engine, self._returned = self._returned, None
        self.close()


def _destroy(engine: SendEngine) -> None:
    """Destroy an engine, and wait until its writes have ended."""
    while True:
        try:
            engine.destroy()
            return
        except WritesPendingError as error:
            log.error("%s: a probe of RDMA waits for them", error)
