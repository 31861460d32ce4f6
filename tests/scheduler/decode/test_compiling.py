"""Requests that wait for their grammar: every limit of a queued request holds, and they end like others."""

import pytest

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import Effect, SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Cancel, Failed, Submit
from pdserve.scheduler.messages.ranks import DropGrammar, GrammarReady, PrepareGrammar
from pdserve.transfer.protocol.messages import InstanceId, KvDestination
from tests.scheduler.simulation.timed_simulator import decode_limits

GRAMMAR = Grammar("regex", "a+")
PEER = InstanceId("prefill")


class Server:
    """A decode scheduler with a prefill server; the test acts as the rank that samples."""

    def __init__(self, **limits: object) -> None:
        self.scheduler = DecodeScheduler(decode_limits(**limits), PageAllocator[KvPage](100), [])
        self.scheduler.peer_up(PrefillPeer(PEER, {"a:1"}))
        self.failed: dict[str, Failed] = {}
        self.compiling: list[int] = []
        """Numbers of the grammars that the rank has to compile."""
        self.sent: list[str] = []
        """Rids of prompts that were sent to prefill."""

    def submit(self, rid: str, *more: str, now: float = 0.0, timeout_s: float | None = None) -> None:
        sampling = SamplingParams(max_new_tokens=4, grammar=GRAMMAR)
        self.scheduler.handle(Submit(rid, (1, 2, 3), sampling, timeout_s=timeout_s, more_rids=more), now)
        self.turn(now)

    def turn(self, now: float) -> None:
        self.scheduler.advance(now)
        for effect in self.scheduler.take_effects():
            self._perform(effect)
        self.scheduler.check_integrity()

    def compiled(self, problem: str | None = None, *, now: float = 0.0) -> None:
        """The rank has compiled its first grammar."""
        self.scheduler.handle(GrammarReady(0, self.compiling.pop(0), problem), now)
        self.turn(now)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case PrepareGrammar(number=number, grammar=grammar):
                assert grammar == GRAMMAR
                self.compiling.append(number)
            case DropGrammar(number=number):
                self.compiling.remove(number)
            case SendToFrontend(message=Failed() as failed):
                assert failed.rid not in self.failed, "answered twice"
                self.failed[failed.rid] = failed
            case SendToPeer(message=KvDestination(rid=rid)):
                self.sent.append(rid)


def test_request_is_sent_to_prefill_when_its_grammar_is_compiled() -> None:
    server = Server()
    server.submit("r")
    assert (server.sent, server.scheduler.state_counts()["compiling"]) == ([], 1)
    server.compiled(now=1.0)
    assert (server.sent, server.scheduler.state_counts()["prefilling"]) == (["r"], 1)


@pytest.mark.parametrize(
    ("limits", "timeout_s", "ends_at", "status", "message"),
    [
        ({}, 1.0, 1.0, 504, "not finished within its deadline of 1 s (timeout_s)"),
        ({"request_timeout_s": 5.0}, None, 5.0, 504, "not finished within its deadline of 5 s (request_timeout_s)"),
        ({"queue_timeout_s": 3.0}, None, 3.0, 503, "its grammar was not compiled within 3 s (queue_timeout_s)"),
    ],
)
def test_deadlines_hold_while_a_grammar_is_compiled(
    limits: dict[str, float], timeout_s: float | None, ends_at: float, status: int, message: str
) -> None:
    server = Server(**limits)
    server.submit("r", timeout_s=timeout_s)
    server.turn(ends_at - 0.1)
    assert not server.failed
    server.turn(ends_at + 0.1)
    assert (server.failed["r"].status, server.failed["r"].message) == (status, message)
    assert server.compiling == [], "nobody waits for it any more"
    assert server.scheduler.idle


def test_deadline_of_a_request_counts_from_its_arrival() -> None:
    server = Server()
    server.submit("r", timeout_s=1.0)
    server.compiled(now=0.9)
    server.turn(1.1)
    assert server.failed["r"].status == 504


def test_requests_that_wait_for_their_grammar_count_as_queued() -> None:
    server = Server(max_queued_requests=2)
    for rid in ("a", "b", "c"):
        server.submit(rid)
    assert {rid: failed.status for rid, failed in server.failed.items()} == {"c": 429}
    server.compiled()
    server.submit("d")
    assert "d" not in server.failed


def test_other_samples_wait_for_their_grammar_when_one_is_cancelled() -> None:
    server = Server()
    server.submit("r0", "r1", "r2")
    server.scheduler.handle(Cancel("r1"), 0.5)
    server.turn(0.5)
    assert (server.sent, server.compiling) == ([], [0])
    assert server.scheduler.state_counts()["compiling"] == 2
    server.compiled(now=1.0)
    assert server.sent == ["r0"]
    assert server.failed.keys() == {"r1"}


def test_grammar_is_dropped_when_its_last_sample_is_cancelled() -> None:
    server = Server()
    server.submit("r0", "r1")
    server.scheduler.handle(Cancel("r0"), 0.5)
    server.scheduler.handle(Cancel("r1"), 0.5)
    server.turn(0.5)
    assert server.compiling == []
    server.scheduler.handle(GrammarReady(0, 0), 1.0)  # the rank had compiled it already
    server.turn(1.0)
    assert server.sent == []


def test_every_sample_of_a_grammar_that_cannot_be_compiled_fails() -> None:
    server = Server()
    server.submit("r0", "r1")
    server.compiled("is not valid")
    assert {rid: (failed.status, failed.message) for rid, failed in server.failed.items()} == dict.fromkeys(
        ("r0", "r1"), (400, "the grammar is not valid")
    )
    assert server.sent == []
    assert server.scheduler.idle


def test_shutdown_waits_for_requests_whose_grammar_is_compiled() -> None:
    server = Server()
    server.submit("r")
    server.scheduler.stop_accepting()
    server.submit("late")
    server.compiled()
    assert (server.sent, list(server.failed)) == (["r"], ["late"])
