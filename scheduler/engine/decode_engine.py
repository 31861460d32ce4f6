"""The engine of a decode server, or of one of its data-parallel ranks."""

import logging
import math

from ...common.errors import ServerError
from ...transfer.control.decode import DecodeControl
from ...transfer.control.events import PeerUp
from ...transfer.plan.pairing import share_device, share_gpu
from ...transfer.plan.staged_regions import staged_regions
from ...transfer.protocol.messages import Hello, InstanceId, TransferKey, Welcome
from ..decode.placement.peers import PrefillPeer
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import ConnectPeer, Effect
from ..messages.ranks import RunStep
from ..ranks.group import RankGroup
from .engine import Engine
from .step_rows import decode_row, local_row

log = logging.getLogger(__name__)

ADDING_PAUSE_S = 0.001
"""Between turns that add pages of ended requests to the prefix cache, for other threads that need the GIL."""


class DecodeEngine(Engine[DecodeScheduler]):
    """The events and effects of a decode server."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        ranks: RankGroup,
        *,
        control: DecodeControl,
        hello: Hello,
    ) -> None:
        super().__init__(scheduler, ranks, control)
        self.control = control
        self._hello = hello

    def handle(self, event: object, now: float) -> None:
        match event:
            case PeerUp(instance=instance, endpoint=endpoint, introduction=Welcome() as welcome):
                assert endpoint is not None, "a decode server connects by endpoint"
                layout = welcome.ranks[0].pools[0].layout
                peer = PrefillPeer(
                    instance,
                    {endpoint},
                    capacity=layout.num_pages * layout.page_size,
                    writes_both=welcome.enable_hisparse,
                    shares_device=share_device(self._hello.ranks, welcome.ranks),
                    shares_gpu=share_gpu(self._hello.ranks, welcome.ranks),
                )
                if peer.shares_device and self.scheduler.limits.local_prefill == "auto":
                    log.info("prefill %s has the same device: prompts after the first are computed here", endpoint)
                elif peer.shares_gpu:
                    log.info("prefill %s has the same GPU: decode steps wait for its prompts", endpoint)
                self.scheduler.peer_up(peer, staged_regions(self._hello, welcome))
            case _:
                super().handle(event, now)

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, ConnectPeer):
            self.control.connect(effect.endpoint, client=effect.client)
        else:
            super().perform(effect)

    def fail_transfer(self, instance: InstanceId, key: TransferKey, reason: str, now: float) -> None:  # noqa: ARG002 (keys are unique)
        self.scheduler.fail_prompt(key, ServerError(reason), now)

    def fail_request(self, rid: str, reason: str, now: float) -> bool:
        return self.scheduler.fail(rid, ServerError(reason), now)

    def next_step(self, now: float) -> RunStep | None:
        step = self.scheduler.next_step(now)
        if step is None:
            return None
        return RunStep(step.command_id, (*map(decode_row, step.rows), *map(local_row, step.chunks)))

    @property
    def pause_s(self) -> float:
        if self.scheduler.adds_pages:
            return ADDING_PAUSE_S
        pause_s = self.scheduler.pause_s
        return pause_s if pause_s < math.inf else 0.0

    def answered(self) -> bool:
        return not self.scheduler.requests
