"""The engine loop of prefill with real sockets: bursts of events, messages that are too large, lost peers."""

import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from pdserve.common.sampling import Grammar, SamplingParams, TokenLogprob, pack_logprobs
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.engine.loop import EngineLoop
from pdserve.scheduler.engine.prefill_engine import PrefillEngine
from pdserve.scheduler.engine.routing import PrefillRouter
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import Stop
from pdserve.scheduler.messages.ranks import (
    CancelChunks,
    ChunkReport,
    DropGrammar,
    GrammarReady,
    OpenPeer,
    PeerRoutes,
    PrepareGrammar,
    StepDone,
)
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.scheduler.shutdown import LAST_WRITES_S
from pdserve.transfer.control.decode import DecodeControl
from pdserve.transfer.control.events import Event, MessageReceived, PeerClosed, PeerLost, PeerUp
from pdserve.transfer.control.prefill import PrefillControl
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Hello,
    InstanceId,
    KvDestination,
    Pool,
    PrefillDone,
    Rank,
    TransferFailed,
    TransferKey,
    Welcome,
)

DECODE = InstanceId("decode")
KEY = TransferKey(1, 1)
LAYOUT = KvLayout((Plane("k", 128), Plane("v", 128)), 0, 4, 0, 2, 16, 1 << 16, "float32")
PLACES = (Rank(0, "127.0.0.1:1", (Pool(LAYOUT, 1 << 20, LAYOUT.size_bytes),)),)
HELLO = Hello(PROTOCOL_VERSION, DECODE, "model", "model", PLACES)
WELCOME = Welcome(PROTOCOL_VERSION, InstanceId("prefill"), "model", "model", PLACES)


class Engine:
    """The engine loop of a prefill server without ranks and frontend, and the control thread of a decode server."""

    def __init__(self, stack: ExitStack) -> None:
        limits = PrefillLimits(
            page_size=16,
            chunk_size=512,
            max_queued_requests=1000,
            context_length=1 << 20,
            vocab_size=1 << 20,
        )
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.ranks = Mock(size=1, numbers=[0])
        self.scheduler = PrefillScheduler(limits, PageAllocator[KvPage](1 << 16))
        control = PrefillControl("127.0.0.1", 0, WELCOME, check=lambda _: None, on_event=self.inbox.put)
        self.control = control
        decode = DecodeControl(HELLO, check=lambda _: None, on_event=self.heard.put)
        for side in (control, decode):
            stack.callback(side.close)
            side.start()
        decode.connect(f"127.0.0.1:{control.port}")
        self.engine = PrefillEngine(self.scheduler, self.ranks, control=control, welcome=WELCOME)
        router = PrefillRouter([self.scheduler])
        self.loop = EngineLoop([self.engine], router, Mock(), self.inbox, self.ranks)
        assert isinstance(self.heard.get(timeout=10), PeerUp)
        paired = self.inbox.get(timeout=10)
        assert isinstance(paired, PeerUp)
        self.inbox.put(paired)
        self.turn()
        assert self.ranks.tell.call_args.args == (OpenPeer(HELLO, WELCOME),)

    def turn(self) -> None:
        self.loop._handle_events()

    def answer(self) -> object:
        while not isinstance(event := self.heard.get(timeout=10), MessageReceived):
            pass
        return event.message


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(stack)


def test_burst_of_long_prompts_does_not_delay_the_ranks(engine: Engine) -> None:
    prompt, indices = np.zeros(100_000, dtype=np.int32), np.zeros(6250, dtype=np.int32)
    for number in range(100):
        wanted = KvDestination(TransferKey(number, 1), f"r{number}", SamplingParams(), timeout_s=60.0)
        engine.inbox.put(MessageReceived(DECODE, wanted, (prompt, indices)))
    engine.inbox.put(PeerRoutes(0, DECODE, {"k+v": "tcp"}, {}))
    engine.turn()
    assert DECODE in engine.engine.routes, "what ranks report comes first"
    turns = 1
    while len(engine.scheduler.requests) < 100:
        engine.turn()
        turns += 1
    assert turns > 3, "between two turns the ranks get their next step"
    assert [key.transfer_id for _, key in engine.scheduler.requests] == list(range(100))


def test_unequal_page_sizes_are_logged_with_their_cost(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.inbox.put(PeerUp(DECODE, None, HELLO))
    engine.turn()
    assert not caplog.records
    layout = msgspec.structs.replace(LAYOUT, page_size=64)
    places = (msgspec.structs.replace(PLACES[0], pools=(Pool(layout, 1 << 20, layout.size_bytes),)),)
    engine.inbox.put(PeerUp(DECODE, None, msgspec.structs.replace(HELLO, ranks=places)))
    engine.turn()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "A chunk of 512 tokens takes 512 writes instead of at most 32" in record.message
    assert "same --page-size" in record.message


def done_with_logprobs() -> PrefillDone:
    scored = (TokenLogprob(5, -1.0),) * 500
    return PrefillDone(KEY, (TokenLogprob(1, None),), 500, 1, 1, 8, 0.0, 0.0, 0.0, input_logprobs=pack_logprobs(scored))


def test_too_large_prefill_done_fails_its_transfer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of a long prompt with their alternatives are megabytes. The server continues."""
    monkeypatch.setattr("pdserve.transfer.protocol.wire.MAX_FRAME_BYTES", 2000)
    engine.scheduler._outbox.append(SendToPeer(DECODE, done_with_logprobs()))
    engine.loop._perform_effects()
    failed = engine.answer()
    assert isinstance(failed, TransferFailed)
    assert (failed.key, failed.retryable, failed.late_writes) == (KEY, False, False)
    assert "log-probabilities of 500 prompt tokens are too large" in failed.reason
    assert "limit 2000 B" in failed.reason


def test_message_that_cannot_be_sent_fails_its_transfer_only(engine: Engine) -> None:
    """The end of a chunk is a number that no message can have."""
    prompt, indices = np.zeros(100, dtype=np.int32), np.zeros(7, dtype=np.int32)
    for key in (KEY, TransferKey(2, 1)):
        wanted = KvDestination(key, "r", SamplingParams(), timeout_s=60.0)
        engine.inbox.put(MessageReceived(DECODE, wanted, (prompt, indices)))
    engine.turn()
    engine.loop._turn()
    engine.inbox.put(ChunkReport(0, ChunkWritten(DECODE, KEY, 0, 1 << 70, ok=True)))
    engine.turn()
    failed = engine.answer()
    assert isinstance(failed, TransferFailed)
    assert (failed.key, failed.retryable) == (KEY, False)
    assert "ChunkArrived cannot be sent: " in failed.reason
    assert [key for _, key in engine.scheduler.requests] == [TransferKey(2, 1)]


@pytest.mark.parametrize("ends", [False, True], ids=["hang", "end"])
def test_transfers_fail_after_their_writes_end_at_the_drain_deadline(
    engine: Engine, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise decode would only see a closed connection, and quarantine the pages. After LAST_WRITES_S the server
    exits, also if writes have not ended.
    """
    engine.ranks.busy_seconds.return_value = {}
    wanted = KvDestination(KEY, "r", SamplingParams(), timeout_s=60.0)
    prompt, indices = np.zeros(512, dtype=np.int32), np.zeros(32, dtype=np.int32)
    engine.inbox.put(MessageReceived(DECODE, wanted, (prompt, indices)))
    engine.turn()
    engine.loop._turn()
    engine.inbox.put(StepDone(0, 1, (StepResult((TokenLogprob(1, None),), ()),)))
    engine.turn()
    (chunk,) = [call.args[0] for call in engine.ranks.tell.call_args_list if isinstance(call.args[0], ChunkWrite)]

    def rank(command: object) -> None:
        """Cancelled writes end, or hang."""
        if command == CancelChunks(DECODE, KEY) and ends:
            ended = ChunkWritten(DECODE, KEY, chunk.token_start, chunk.token_end, ok=False, reason="cancelled")
            engine.inbox.put(ChunkReport(0, ended))

    engine.ranks.tell.side_effect = rank
    engine.inbox.put(Stop(drain_s=0.0))
    began = time.monotonic()
    engine.loop.run()
    waited_s = time.monotonic() - began
    engine.control.close()
    heard: list[object] = []
    while not isinstance(event := engine.heard.get(timeout=10), PeerLost):
        heard += [event.message] if isinstance(event, MessageReceived) else []
    reason = "the server was shut down before the request was done"
    assert heard == ([TransferFailed(KEY, reason, retryable=True, leaving=True)] if ends else [])
    assert ends or waited_s >= LAST_WRITES_S
    engine.ranks.tell.assert_any_call(CancelChunks(DECODE, KEY))
    assert caplog.messages.count("drain deadline (shutdown_timeout_s): 1 request cut off") == 1


def test_routes_of_a_closed_peer_are_ignored(engine: Engine) -> None:
    engine.inbox.put(PeerRoutes(0, DECODE, {"k+v": "tcp"}, {}))
    engine.turn()
    assert engine.engine.routes[DECODE][:2] == ({"k+v": "tcp"}, {})
    engine.inbox.put(PeerClosed(DECODE))
    engine.inbox.put(PeerRoutes(1, DECODE, {"k+v": "tcp"}, {}))
    engine.turn()
    assert engine.engine.routes == {}


def test_a_route_that_works_again_is_reported_without_its_problem(engine: Engine) -> None:
    """Each rank has senders of its own."""
    down = {"rdma": "no port is active"}
    for rank in (0, 1):
        engine.inbox.put(PeerRoutes(rank, DECODE, {"k+v": "tcp"}, down))
    engine.inbox.put(PeerRoutes(0, DECODE, {"k+v": "rdma"}, {}))
    engine.turn()
    assert engine.engine.routes[DECODE].unusable == down
    engine.inbox.put(PeerRoutes(1, DECODE, {"k+v": "rdma"}, {}))
    engine.turn()
    assert engine.engine.routes[DECODE][:2] == ({"k+v": "rdma"}, {})
    assert engine.engine.routes[DECODE].since is not None


def with_grammar(engine: Engine) -> PrepareGrammar:
    """Send a request with a grammar; returns the command that the ranks get."""
    sampling = SamplingParams(grammar=Grammar("regex", "a+"))
    prompt, indices = np.zeros(20, dtype=np.int32), np.zeros(2, dtype=np.int32)
    engine.inbox.put(MessageReceived(DECODE, KvDestination(KEY, "r", sampling, timeout_s=60.0), (prompt, indices)))
    engine.turn()
    engine.loop._turn()
    assert engine.scheduler.state_counts()["compiling"] == 1
    (command,) = (call.args[0] for call in engine.ranks.tell.call_args_list if isinstance(call.args[0], PrepareGrammar))
    assert command.grammar == sampling.grammar
    return command


def test_request_waits_until_its_grammar_is_compiled(engine: Engine) -> None:
    command = with_grammar(engine)
    engine.inbox.put(GrammarReady(0, command.number))
    engine.turn()
    counts = engine.scheduler.state_counts()
    assert (counts["compiling"], counts["waiting"]) == (0, 1)


def test_request_whose_grammar_cannot_be_compiled_is_refused(engine: Engine) -> None:
    command = with_grammar(engine)
    engine.inbox.put(GrammarReady(0, command.number, "is not valid"))
    engine.turn()
    assert engine.answer() == TransferFailed(KEY, "the grammar is not valid", retryable=False)


def test_request_can_be_aborted_while_its_grammar_is_compiled(engine: Engine) -> None:
    command = with_grammar(engine)
    engine.inbox.put(MessageReceived(DECODE, Abort(KEY, "client gone"), ()))
    engine.turn()
    assert engine.answer() == AbortAck(KEY)
    engine.ranks.tell.assert_called_with(DropGrammar(command.number))
    engine.inbox.put(GrammarReady(0, command.number))
    engine.turn()
    assert not engine.scheduler.requests


def test_grammar_of_a_lost_decode_server_is_dropped(engine: Engine) -> None:
    command = with_grammar(engine)
    engine.inbox.put(PeerLost(DECODE, "gone"))
    engine.turn()
    engine.ranks.tell.assert_called_with(DropGrammar(command.number))
    assert engine.scheduler.idle


def test_request_that_waits_for_its_grammar_counts_as_queued(engine: Engine) -> None:
    sampling = SamplingParams(grammar=Grammar("regex", "a+"))
    prompt, indices = np.zeros(20, dtype=np.int32), np.zeros(2, dtype=np.int32)
    for number in range(1001):
        wanted = KvDestination(TransferKey(number, 1), "r", sampling, timeout_s=60.0)
        engine.inbox.put(MessageReceived(DECODE, wanted, (prompt, indices)))
    while engine.scheduler.counters["requests"] + engine.scheduler.counters["requests_refused"] < 1001:
        engine.turn()
    failed = engine.answer()
    assert isinstance(failed, TransferFailed)
    assert (failed.key.transfer_id, failed.full, failed.retryable) == (1000, True, True)
    assert engine.scheduler.load().waiting_requests == 1000


def test_request_that_waits_for_its_grammar_may_finish_during_shutdown(engine: Engine) -> None:
    command = with_grammar(engine)
    engine.inbox.put(Stop(drain_s=5))
    engine.inbox.put(GrammarReady(0, command.number))
    engine.turn()
    assert engine.scheduler.state_counts()["waiting"] == 1
