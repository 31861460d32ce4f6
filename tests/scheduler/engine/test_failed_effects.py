"""Effects that cannot be performed: a message fails its own request, a command for the ranks ends the server."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.engine.decode_engine import DecodeEngine
from pdserve.scheduler.engine.frontend_link import FrontendLink
from pdserve.scheduler.engine.loop import EngineLoop
from pdserve.scheduler.engine.routing import DecodeRouter
from pdserve.scheduler.messages.frontend import Failed, Finished, Stop, Submit, ToFrontend, ToFrontendBatch, Tokens
from pdserve.scheduler.messages.ranks import RunStep, StepDone
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.ranks.group import RankGroup, RankLostError
from pdserve.transfer.control.decode import DecodeControl
from pdserve.transfer.protocol.messages import InstanceId
from tests.scheduler.engine.test_prefill_engine import HELLO
from tests.scheduler.simulation.timed_simulator import decode_limits

TOO_LARGE = 1 << 70
"""A token id that no message can have."""


class Ranks:
    """A rank that samples `token`, or that no step can be sent to."""

    def __init__(self, inbox: "queue.SimpleQueue[object]") -> None:
        self.inbox = inbox
        self.tokens: dict[int, int] = {}
        """By row of a step, if it is not 7."""
        self.problem: str | None = None

    def tell(self, command: object, to: object = None) -> None:  # noqa: ARG002 (the only rank)
        if not isinstance(command, RunStep):
            return
        if self.problem is not None:
            raise OSError(self.problem)
        results = tuple(
            StepResult((TokenLogprob(self.tokens.get(row, 7), None),) * len(each.draws), ())
            for row, each in enumerate(command.rows)
        )
        self.inbox.put(StepDone(0, command.command_id, results))

    def busy_seconds(self) -> dict[int, float]:
        return {}

    def problems(self) -> list[str]:
        return []


class Server:
    """The engine loop of a decode server with the sockets to its frontend; the test acts as frontend and rank."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        context = stack.enter_context(zmq.Context())
        self._socket = stack.enter_context(context.socket(zmq.PAIR))
        self._socket.bind(address)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        link = FrontendLink(address, self.inbox.put)
        stack.callback(link.close)
        self.ranks = Ranks(self.inbox)
        ranks: Any = self.ranks
        self.scheduler = DecodeScheduler(decode_limits(local_prefill="auto"), PageAllocator[KvPage](100), [])
        control = DecodeControl(HELLO, check=lambda _: None, on_event=self.inbox.put)
        stack.callback(control.close)
        control.start()
        engine = DecodeEngine(self.scheduler, RankGroup(ranks, [0]), control=control, hello=HELLO)
        self.loop = EngineLoop([engine], DecodeRouter([self.scheduler]), link, self.inbox, ranks)

    def submit(self, rid: str, first: int, new: int = 2) -> None:
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        self.inbox.put(Submit(rid, (first, *range(30)), sampling))

    def run(self, *, drain_s: float) -> list[ToFrontend]:
        """Run until all requests have ended, but at most `drain_s`; returns what the frontend receives."""
        self.inbox.put(Stop(drain_s))
        self.loop.run()
        return self.received()

    def received(self) -> list[ToFrontend]:
        messages: list[ToFrontend] = []
        while self._socket.poll(200):
            messages += msgspec.msgpack.decode(self._socket.recv(), type=ToFrontendBatch)
        return messages


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack, f"ipc://{tmp_path}/front")


@pytest.mark.parametrize("new", [1, 5], ids=["its last token", "its first of several"])
def test_tokens_that_cannot_be_sent_fail_their_request_only(server: Server, new: int) -> None:
    server.submit("good", 1)
    server.submit("bad", 2, new)
    server.ranks.tokens[1] = TOO_LARGE
    received = server.run(drain_s=20.0)
    (failed,) = [message for message in received if isinstance(message, Failed)]
    assert (failed.rid, failed.status) == ("bad", 500)
    assert "Tokens cannot be sent: " in failed.message
    (finished,) = [message for message in received if isinstance(message, Finished)]
    tokens = [message.token_ids for message in received if isinstance(message, Tokens) and message.rid == "good"]
    assert (finished.rid, tokens) == ("good", [(7,), (7,)])
    assert server.scheduler.counters["effect_errors"] == 1
    server.scheduler.check_integrity()


def test_destination_that_cannot_be_sent_fails_its_request_only(server: Server) -> None:
    server.scheduler.peer_up(PrefillPeer(InstanceId("prefill"), {"a:1"}))
    server.submit("bad", TOO_LARGE)
    server.submit("good", 1)
    received = server.run(drain_s=0.5)
    reasons = {message.rid: message.message for message in received if isinstance(message, Failed)}
    assert "KvDestination cannot be sent: " in reasons["bad"]
    assert reasons["good"] == "the server was shut down before the request was done"
    assert server.scheduler.counters["effect_errors"] == 1


def test_step_that_cannot_be_sent_ends_the_server_with_its_reason(server: Server) -> None:
    server.submit("r", 1)
    server.ranks.problem = "no such rank"
    reason = "RunStep cannot be sent to the ranks: no such rank"
    with pytest.raises(RankLostError, match=reason):
        server.loop.run()
    (failed,) = server.received()
    assert isinstance(failed, Failed)
    assert (failed.rid, failed.status, failed.message) == ("r", 503, f"the server lost a rank: {reason}")
