"""The engine of a prefill server, or of one of its data-parallel ranks."""

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from ...common.sampling import PackedLogprobs
from ...transfer.control.events import PeerClosed, PeerUp
from ...transfer.control.prefill import PrefillControl
from ...transfer.plan.page_sizes import describe_page_sizes
from ...transfer.plan.staged_regions import staged_regions
from ...transfer.protocol.messages import (
    AnyMessage,
    Hello,
    InstanceId,
    PrefillDone,
    TransferKey,
    Welcome,
)
from ...transfer.protocol.wire import Array, WireError
from ..messages.ranks import ClosePeer, OpenPeer, PeerRoutes, RunStep
from ..prefill.request import PageSpace
from ..prefill.scheduler import PrefillScheduler
from ..ranks.group import RankGroup
from .engine import Engine
from .step_rows import prefill_row

log = logging.getLogger(__name__)


class KvRoutes(NamedTuple):
    """The transport of each pool to a decode server, why other transports do not work, and since when this is so."""

    transports: dict[str, str]
    unusable: dict[str, str]
    since: float | None = None


NO_ROUTES = KvRoutes({}, {})


class PrefillEngine(Engine[PrefillScheduler]):
    """The events and effects of a prefill server."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        ranks: RankGroup,
        *,
        control: PrefillControl,
        welcome: Welcome,
    ) -> None:
        super().__init__(scheduler, ranks, control)
        self._welcome = welcome
        self.routes: dict[str, KvRoutes] = {}
        """By decode server. Read by another thread."""
        self._routes_of: dict[InstanceId, dict[tuple[int, tuple[str, ...]], PeerRoutes]] = {}
        """The last report of each sender: of a rank, for some of its pools."""
        self._open: set[InstanceId] = set()
        """Decode servers that the ranks can write to."""

    def handle(self, event: object, now: float) -> None:
        match event:
            case PeerRoutes(instance=instance) as report:
                if instance in self._open:  # the report may come after ClosePeer
                    reports = self._routes_of.setdefault(instance, {})
                    reports[report.rank, tuple(report.transports)] = report
                    self.routes[instance] = _joined_routes(reports.values())
            case PeerUp(instance=instance, introduction=Hello() as hello):
                self._open.add(instance)
                self._ranks.tell(OpenPeer(hello, self._welcome))
                self.scheduler.peer_up(instance, _page_space(hello), staged_regions(hello, self._welcome))
                remark = describe_page_sizes(hello, self._welcome, self.scheduler.limits.chunk_size)
                if remark is not None and 0 in self._ranks.numbers:  # once per server
                    log.warning("decode %s: %s", instance, remark)
            case PeerClosed(instance=instance):
                self._open.discard(instance)
                self._ranks.tell(ClosePeer(instance))
                self.routes.pop(instance, None)
                self._routes_of.pop(instance, None)
                super().handle(event, now)
            case _:
                super().handle(event, now)

    def _send(self, instance: InstanceId, message: AnyMessage, *arrays: Array) -> None:
        try:
            super()._send(instance, message, *arrays)
        except WireError as error:
            if not isinstance(message, PrefillDone):
                raise
            scored = len(PackedLogprobs(message.input_logprobs))
            reason = f"the log-probabilities of {scored} prompt tokens are too large for one message: {error}"
            raise WireError(reason) from error

    def fail_transfer(self, instance: InstanceId, key: TransferKey, reason: str, now: float) -> None:
        self.scheduler.fail(instance, key, reason, now)

    def fail_request(self, rid: str, reason: str, now: float) -> bool:  # noqa: ARG002 (clients send none to prefill)
        return False

    def next_step(self, now: float) -> RunStep | None:
        step = self.scheduler.next_step(now)
        return RunStep(step.command_id, tuple(map(prefill_row, step.chunks))) if step is not None else None

    def answered(self) -> bool:
        return self.scheduler.idle

    def writes(self) -> bool:
        return bool(self.scheduler.requests)


def _page_space(hello: Hello) -> PageSpace:
    """The pages that a decode server has announced. All its pools and ranks have the same page ids."""
    layout = hello.ranks[0].pools[0].layout
    hot = [rank.hot.layout.num_pages for rank in hello.ranks if rank.hot is not None]
    return PageSpace(
        layout.num_pages,
        layout.page_size,
        in_host_memory=any(pool.memory == "host" for rank in hello.ranks for pool in rank.pools),
        hot_pages=min(hot) if len(hot) == len(hello.ranks) else 0,
    )


def _joined_routes(reports: Iterable[PeerRoutes]) -> KvRoutes:
    """Of all senders to a decode server."""
    routes = KvRoutes({}, {}, time.time())
    for report in reports:
        routes.transports.update(report.transports)
        routes.unusable.update(report.unusable)
    return routes
