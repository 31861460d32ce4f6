"""The engine that writes to one rank of a peer, over the first of its routes that works."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...configs.errors import StartupError
from ..mooncake.engine import PREFLIGHT_TIMEOUT_S, SendEngine
from ..mooncake.library import Transport
from ..mooncake.sockets import PeerUnreachableError, Region, describe_engine
from ..mooncake.transports import REMEDIES, KvRoute, LocalTransport
from ..protocol.messages import Pool
from .probe import probe

log = logging.getLogger(__name__)


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

    A route that does not work, or fails later, is dropped if another route works. `on_routed` is called with the
    transport in use, and with the reasons why others are not used.
    """

    def __init__(
        self,
        routes: Sequence[KvRoute],
        pools: Sequence[PoolPair],
        local: LocalTransport,
        on_routed: Callable[[Transport, Mapping[Transport, str]], None],
    ) -> None:
        self._routes = list(routes)
        self._pools = pools
        self._local = local
        self._on_routed = on_routed
        self._dropped: dict[Transport, str] = {}
        self._engine: SendEngine | None = None

    @property
    def transport(self) -> Transport:
        return self._routes[0].transport

    @property
    def session(self) -> str:
        return self._routes[0].session

    def open(self) -> SendEngine:
        """The engine of the first route that works. If none works, raises the error of the last one. No route is
        dropped then, because the cause is the peer (it is gone), not a transport.
        """
        problem = ""
        for index, route in enumerate(self._routes):
            if self._engine is not None:
                break
            try:
                self._engine = self._try_route(route)
            except (PeerUnreachableError, StartupError) as error:
                if index + 1 == len(self._routes):
                    raise
                problem = problem or str(error)
            else:
                self._drop_routes(index, problem)
                self._on_routed(self.transport, self._dropped)
        assert self._engine is not None, "a sender has at least one route"
        return self._engine

    def _try_route(self, route: KvRoute) -> SendEngine:
        """An engine whose probes of all pools succeeded. Raises PeerUnreachableError and StartupError."""
        sources = {pair.source for pair in self._pools}
        targets = {Region(pair.destination.base_address, pair.destination.size_bytes) for pair in self._pools}
        engine = SendEngine(
            route.session,
            sorted(targets, key=lambda region: region.addr),
            transport=route.transport,
            rdma=self._local.rdma if route.transport == "rdma" else None,
            sources=sorted(sources, key=lambda region: region.addr),
        )
        for pair in self._pools:
            problem = probe(engine, pair.probe, pair.destination) if pair.probe is not None else None
            if problem is not None:
                engine.destroy()
                raise PeerUnreachableError(f"decode {route.session} cannot be written to: {problem}")
        return engine

    def drop_failed_route(self, reason: str) -> None:
        """After a failed write: if the next route reaches the peer, the transport was at fault, and later jobs use that
        route.
        """
        if len(self._routes) > 1:
            with contextlib.suppress(PeerUnreachableError):
                describe_engine(self._routes[1].session, PREFLIGHT_TIMEOUT_S)
                self._drop_routes(1, reason)

    def _drop_routes(self, count: int, reason: str) -> None:
        """Remove the first `count` routes."""
        for _ in range(count):
            route = self._routes.pop(0)
            self._dropped[route.transport] = reason
            log.warning(
                "KV for decode %s goes over %s from now on, because %s does not work: %s. %s",
                self.session,
                self.transport,
                route.transport,
                reason,
                REMEDIES.get(route.transport, ""),
            )

    def close(self) -> None:
        """Destroy the engine: its writes have ended afterwards. The next open() creates a new one."""
        if self._engine is not None:
            try:
                self._engine.destroy()
            except Exception:
                log.exception("error while destroying the engine to %s", self.session)
            self._engine = None
