"""The engine of a decode server, or of one of its data-parallel ranks."""

import collections
import logging
from typing import Literal

from ...configs.errors import ServerError
from ...transfer.control.decode import DecodeControl
from ...transfer.control.events import (
    LoadReported,
    MessageReceived,
    PeerAlias,
    PeerClosed,
    PeerLost,
    PeersUnreachable,
    PeerUp,
    SendFailed,
)
from ...transfer.plan.pairing import share_cpu
from ...transfer.plan.staged_regions import staged_regions
from ...transfer.protocol.messages import (
    AbortAck,
    AnyMessage,
    CachedPrefixes,
    ChunkArrived,
    Hello,
    InstanceId,
    KvDestination,
    PrefillDone,
    StageArrived,
    StageRequest,
    StageStopped,
    TransferFailed,
    TransferKey,
    Welcome,
)
from ...transfer.protocol.wire import IntArray
from ..decode.dispatch.prefill_peers import PrefillPeer
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import ConnectPeer, Effect
from ..messages.frontend import Cancel, Submit
from ..messages.ranks import (
    CommandDone,
    CopyDone,
    GrammarReady,
    HotCounters,
    KvVerified,
    MaskReady,
    PartScattered,
    RunStep,
)
from ..ranks.group import RankGroup
from .engine import Engine
from .step_rows import decode_row, local_row

log = logging.getLogger(__name__)


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
        super().__init__(scheduler, ranks)
        self.control = control
        self._hello = hello
        self._hot_counters: dict[int, dict[str, float]] = {}
        """Totals of the hot buffers of each stage, by its first rank, which reports them."""
        self._done_by: collections.Counter[tuple[str, int]] = collections.Counter()
        """How many ranks have completed a command or a copy."""

    def handle(self, event: object, now: float) -> None:
        scheduler = self.scheduler
        match event:
            case Submit():
                scheduler.submit(event, now)
            case GrammarReady(number=number, problem=problem, slow=slow):
                scheduler.grammar_ready(number, problem, now, slow=slow)
            case MaskReady():
                scheduler.mask_ready(event, now)
            case Cancel(rid=rid, stopped=stopped):
                scheduler.cancel(rid, now, stopped=stopped)
            case CommandDone(command_id=command_id):
                if self._all_done("command", command_id):
                    scheduler.command_done(command_id)
            case CopyDone(copy=copy, seconds=seconds):
                if self._all_done("copy", copy):
                    scheduler.copy_done(copy, seconds, now)
            case HotCounters(rank=rank, counters=counters):
                self._hot_counters[rank] = counters
                for name in counters:
                    total = sum(of_rank[name] for of_rank in self._hot_counters.values())
                    scheduler.counters[f"hot_{name}"] = int(total)
            case KvVerified():
                scheduler.kv_verified(event, now)
            case PartScattered(part=part):
                scheduler.part_scattered(part, now)
            case MessageReceived(
                instance=instance, message=StageRequest() | StageArrived() | StageStopped() as message
            ):
                scheduler.stage_message(instance, message, now)
            case MessageReceived(instance=instance, message=CachedPrefixes() as message):
                scheduler.cache_report(instance, message)
            case MessageReceived(instance=instance, message=message):
                if isinstance(message, TransferFailed) and message.leaving:
                    scheduler.peer_leaving(instance, now)
                self._handle_message(message, now)
            case LoadReported(instance=instance, load=load):
                scheduler.peer_load(instance, load)
                if not load.accepting:
                    scheduler.peer_leaving(instance, now)
            case PeerUp(instance=instance, endpoint=endpoint, introduction=Welcome() as welcome):
                assert endpoint is not None, "a decode server connects by endpoint"
                layout = welcome.ranks[0].pools[0].layout
                peer = PrefillPeer(
                    instance,
                    {endpoint},
                    capacity=layout.num_pages * layout.page_size,
                    writes_both=welcome.enable_hisparse,
                    shares_cpu=share_cpu(self._hello.ranks, welcome.ranks),
                )
                if peer.shares_cpu and scheduler.limits.local_prefill == "auto":
                    log.info("prefill %s has the same CPU cores: prompts after the first are computed here", endpoint)
                scheduler.peer_up(peer, staged_regions(self._hello, welcome))
            case PeerAlias(endpoint=endpoint, instance=instance):
                scheduler.peer_alias(instance, endpoint)
            case PeerLost(instance=instance, reason=reason):
                scheduler.peer_lost(instance, reason, now)
            case PeerClosed(instance=instance):
                scheduler.peer_closed(instance, now)
            case SendFailed(message=KvDestination() as message, reason=reason):
                scheduler.transfer_failed(TransferFailed(message.key, reason, retryable=True), now)
            case PeersUnreachable(reasons=reasons):
                scheduler.peers_unreachable(reasons)
            case _:
                super().handle(event, now)

    def _handle_message(self, message: object, now: float) -> None:
        scheduler = self.scheduler
        match message:
            case ChunkArrived():
                scheduler.chunk_arrived(message)
            case PrefillDone():
                scheduler.prefill_done(message, now)
            case TransferFailed(key=key, reason=reason):
                log.log(logging.DEBUG if message.full else logging.WARNING, "transfer %s failed: %s", key, reason)
                scheduler.transfer_failed(message, now)
            case AbortAck(key=key, late_writes=late_writes):
                scheduler.abort_acked(key, late_writes, now)
            case _:
                raise TypeError(f"unexpected message from prefill: {message!r}")

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, ConnectPeer):
            self.control.connect(effect.endpoint, client=effect.client)
        else:
            super().perform(effect)

    def _send(self, instance: InstanceId, message: AnyMessage, *arrays: IntArray) -> None:
        self.control.send(instance, message, *arrays)

    def fail_transfer(self, instance: InstanceId, key: TransferKey, reason: str, now: float) -> None:  # noqa: ARG002 (keys are unique)
        self.scheduler.fail_prompt(key, ServerError(reason), now)

    def fail_request(self, rid: str, reason: str, now: float) -> bool:
        return self.scheduler.fail(rid, ServerError(reason), now)

    def _all_done(self, what: Literal["command", "copy"], number: int) -> bool:
        """Count the report of one rank; returns whether it is the last."""
        self._done_by[what, number] += 1
        if self._done_by[what, number] < self._ranks.size:
            return False
        del self._done_by[what, number]
        return True

    def next_step(self, now: float) -> RunStep | None:
        step = self.scheduler.next_step(now)
        if step is None:
            return None
        return RunStep(step.command_id, (*map(decode_row, step.rows), *map(local_row, step.chunks)))

    def answered(self) -> bool:
        return not self.scheduler.requests
