"""The engine loop with data-parallel ranks: steps of all ranks start together, each rank has requests of its own. The
test acts as the ranks.
"""

import itertools
import queue
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.sampling import Grammar, LogprobParams, SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.models.config.sharding import RankTokens
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.engine.decode_engine import DecodeEngine
from pdserve.scheduler.engine.loop import EngineLoop
from pdserve.scheduler.engine.routing import DecodeRouter
from pdserve.scheduler.messages.frontend import Cancel, Failed, Finished, FlushCache, Submit
from pdserve.scheduler.messages.lifecycle import State
from pdserve.scheduler.messages.ranks import (
    AssistStep,
    CheckCache,
    DropGrammar,
    DropGrammarState,
    GrammarReady,
    PrepareGrammar,
    RunStep,
    StepDone,
    WriteBackRows,
)
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.ranks.group import RankGroup

PAGE, CHUNK = 4, 16


class Ranks:
    """Records the commands of each rank. The test ends the steps."""

    def __init__(self, size: int) -> None:
        self.steps: list[list[RunStep | AssistStep]] = [[] for _ in range(size)]
        self.grammars: list[GrammarReady] = []
        """The reports of grammars, which the test sends."""
        self.write_backs: list[list[int]] = [[] for _ in range(size)]
        """For each copy to host memory, how many steps the rank had before."""

    def tell(self, command: object, to: Sequence[int] | None = None) -> None:
        for rank in to if to is not None else range(len(self.steps)):
            if isinstance(command, RunStep | AssistStep):
                self.steps[rank].append(command)
            elif isinstance(command, PrepareGrammar):
                self.grammars.append(GrammarReady(rank, command.number))
            elif isinstance(command, DropGrammar):
                self.grammars.remove(GrammarReady(rank, command.number))
            elif isinstance(command, WriteBackRows):
                self.write_backs[rank].append(len(self.steps[rank]))
            else:
                assert isinstance(command, CheckCache | DropGrammarState)

    def busy_seconds(self) -> dict[int, float]:
        return {}


class JointServer:
    """A decode server of data-parallel ranks that compute their prompts themselves, without its processes."""

    def __init__(self, size: int = 2, *, pages: int = 20, overlap: bool = False, queued: int = 8) -> None:
        limits = DecodeLimits(
            page_size=PAGE,
            max_running_requests=4,
            max_queued_requests=queued,
            growth_tokens=PAGE,
            retract_pages=0,
            queue_timeout_s=60,
            prefill_wait_s=3,
            prefill_timeout_s=60,
            request_timeout_s=600,
            quarantine_s=1,
            overlap=overlap,
            local_prefill="always",
            max_step_tokens=CHUNK,
        )
        self.ranks = Ranks(size)
        self.schedulers = [DecodeScheduler(limits, PageAllocator[KvPage](pages), [1]) for _ in range(size)]
        ranks: Any = self.ranks
        engines = [
            DecodeEngine(
                scheduler,
                RankGroup(ranks, [number]),
                control=Mock(),
                hello=Mock(),
            )
            for number, scheduler in enumerate(self.schedulers)
        ]
        self.frontend = Mock()
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.loop = EngineLoop(engines, DecodeRouter(self.schedulers), self.frontend, self.inbox, ranks)
        self._rids = itertools.count()
        self._ended = [0] * size

    def submit(
        self, tokens: int, new_tokens: int = 4, *, first: int = 100, grammar: Grammar | None = None, **more: Any
    ) -> str:
        """A prompt of ids from `first` on; returns its rid."""
        rid = f"r{next(self._rids)}"
        sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, grammar=grammar)
        self.inbox.put(Submit(rid, tuple(range(first, first + tokens)), sampling, **more))
        return rid

    def turn(self) -> None:
        """Handle all events, also on a slow machine, and start what can start."""
        while not self.inbox.empty() or self.loop._reports or self.loop._others:
            self.loop._handle_events()
        self.loop._turn()

    def last_steps(self) -> list[RunStep | AssistStep]:
        return [steps[-1] for steps in self.ranks.steps]

    def compile_grammars(self) -> None:
        """The ranks have compiled all grammars that they were sent and that were not dropped."""
        while self.ranks.grammars:
            self.inbox.put(self.ranks.grammars.pop(0))

    def end_step(self, rank: int) -> None:
        """The oldest step of a rank ends, if it has one."""
        steps = self.ranks.steps[rank]
        while self._ended[rank] < len(steps):
            step = steps[self._ended[rank]]
            self._ended[rank] += 1
            if isinstance(step, RunStep):
                results = tuple(StepResult((TokenLogprob(7, None),) * len(row.draws), ()) for row in step.rows)
                self.inbox.put(StepDone(rank, step.command_id, results))
                return

    def end_steps(self) -> None:
        for rank in range(len(self.ranks.steps)):
            self.end_step(rank)

    def finish(self) -> None:
        """Run until all requests have ended, and check that everything is free."""
        for _ in range(500):
            self.turn()
            if all(scheduler.idle for scheduler in self.schedulers):
                break
            self.compile_grammars()
            self.end_steps()
        for scheduler in self.schedulers:
            assert scheduler.idle
            scheduler.check_integrity()

    def responses(self, kind: type[Finished] | type[Failed]) -> list[str]:
        """The rids of these terminal messages, in order."""
        calls = self.frontend.send.call_args_list
        return [message.rid for call in calls for message in call.args if isinstance(message, kind)]

    def rank_of(self, rid: str) -> int:
        (rank,) = [number for number, scheduler in enumerate(self.schedulers) if rid in scheduler.requests]
        return rank


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_copied_to_host_memory_after_the_ranks_got_their_step(overlap: bool) -> None:
    """Once, also on a rank without rows in this step, and while another rank cannot take a step."""
    server = JointServer(overlap=overlap)

    def receive() -> None:
        for scheduler in server.schedulers:
            scheduler.memory.write_backs.append(WriteBackRows(1, (), (), 0, 0))

    receive()
    server.turn()
    assert server.ranks.write_backs == [[0], [0]]
    server.submit(8)
    receive()
    server.turn()
    busy, idle = sorted(server.ranks.write_backs, reverse=True)
    assert busy == [0, len(server.ranks.steps[0])]
    assert busy[-1] > 0
    assert len(idle) == 2
    receive()
    server.turn()
    assert [len(sent) for sent in server.ranks.write_backs] == [3, 3]


def test_rank_without_rows_assists() -> None:
    server = JointServer()
    server.submit(6)
    server.turn()
    ran, assisted = server.last_steps()
    tokens = (RankTokens(6, 1), RankTokens(0, 0))
    assert isinstance(ran, RunStep)
    assert ran.ranks == tokens
    assert assisted == AssistStep(tokens)
    server.finish()


def test_ranks_have_steps_of_their_own_requests_with_the_tokens_of_all() -> None:
    server = JointServer(3)
    for tokens in (6, 3, 9, 5):
        server.submit(tokens, first=10 * tokens)
    server.turn()
    steps = server.last_steps()
    assert all(isinstance(step, RunStep) for step in steps)
    (ranks,) = {step.ranks for step in steps}
    assert sorted(ranks) == [(6, 1), (8, 2), (9, 1)], "the fourth prompt is where the shortest one waits"
    for step, rank in zip(steps, ranks, strict=True):
        assert isinstance(step, RunStep)
        assert sum(row.length for row in step.rows) == rank.tokens
    server.finish()
    assert len(server.responses(Finished)) == 4


def test_requests_that_wait_for_their_grammar_are_divided_among_the_ranks() -> None:
    server = JointServer(3)
    rids = [server.submit(4, grammar=Grammar("regex", "a+")) for _ in range(6)]
    server.turn()
    assert [scheduler.state_counts()["compiling"] for scheduler in server.schedulers] == [2, 2, 2]
    server.compile_grammars()
    server.turn()
    assert sorted(server.rank_of(rid) for rid in rids) == [0, 0, 1, 1, 2, 2]
    server.finish()
    assert sorted(server.responses(Finished)) == rids


def test_limits_hold_for_grammars_on_every_rank() -> None:
    """One of three samples is cancelled on each rank, and each rank has room for one more prompt."""
    server = JointServer(2, queued=2)
    grammar = Grammar("regex", "a+")
    first = [server.submit(4, grammar=grammar, more_rids=(f"{at} 1", f"{at} 2")) for at in range(2)]
    second = [server.submit(4, grammar=grammar, timeout_s=0.01) for _ in range(2)]
    refused = [server.submit(4, grammar=grammar) for _ in range(2)]
    server.turn()
    assert sorted(server.rank_of(rid) for rid in first) == [0, 1]
    assert server.responses(Failed) == refused
    for at in range(2):
        server.inbox.put(Cancel(f"{at} 1"))
    while len(server.responses(Failed)) < 6:  # until the deadline of the second ones has passed
        server.turn()
    assert sorted(server.responses(Failed)) == sorted([*refused, "0 1", "1 1", *second])
    assert server.ranks.steps == [[], []], "a prompt is computed before its grammar is compiled"
    assert [report.number for report in server.ranks.grammars] == [0, 0], "those of the second ones were dropped"
    server.compile_grammars()
    server.turn()
    assert all(isinstance(step, RunStep) for step in server.last_steps())
    server.finish()
    assert sorted(server.responses(Finished)) == sorted([*first, "0 2", "1 2"])


def test_prompt_logprobs_keep_all_tokens_in_the_last_layer() -> None:
    server = JointServer()
    server.submit(6, logprobs=LogprobParams(start=0))
    server.turn()
    assert server.last_steps()[0].ranks == (RankTokens(6, 6), RankTokens(0, 0))


@pytest.mark.parametrize("overlap", [False, True])
def test_next_step_starts_when_every_rank_can_take_it(overlap: bool) -> None:
    """Otherwise a rank that reports late would miss the step."""
    server = JointServer(overlap=overlap)
    for first in (100, 200):
        server.submit(5, 20, first=first)
    server.turn()
    server.end_steps()
    server.turn()  # both run
    server.turn()  # with overlap, another step is in flight
    started = [len(steps) for steps in server.ranks.steps]
    assert started == ([3, 3] if overlap else [2, 2])
    server.end_step(0)
    server.turn()
    assert [len(steps) for steps in server.ranks.steps] == started, "rank 1 has not reported"
    server.end_step(1)
    server.turn()
    assert [len(steps) for steps in server.ranks.steps] == [count + 1 for count in started]
    assert all(isinstance(step, RunStep) for step in server.last_steps())
    server.finish()


def test_prompts_are_spread_over_ranks_and_cancels_go_to_their_ranks() -> None:
    server = JointServer()
    rids = [server.submit(5, 20, first=100 * index) for index in range(4)]
    server.turn()
    assert sorted(server.rank_of(rid) for rid in rids) == [0, 0, 1, 1]
    for rid in rids:
        server.inbox.put(Cancel(rid))
    server.inbox.put(Cancel("unknown"))
    server.turn()
    assert server.responses(Failed) == rids
    server.finish()


def test_cached_prefix_attracts_a_prompt_unless_its_rank_is_crowded() -> None:
    server = JointServer(pages=60)
    rid = server.submit(9, 1)
    server.turn()
    rank = server.rank_of(rid)
    server.finish()
    found = []
    for _ in range(4):
        rid = server.submit(9, 20)
        server.turn()
        found.append(server.rank_of(rid))
    assert found == [rank, rank, 1 - rank, rank], "with the third, the rank would have two more than the other"
    server.finish()


def test_flush_empties_the_caches_of_all_ranks() -> None:
    server = JointServer()
    for first in (100, 200):
        server.submit(9, 1, first=first)
    server.turn()
    server.finish()
    assert all(len(scheduler.cache) for scheduler in server.schedulers)
    server.inbox.put(FlushCache())
    server.turn()
    assert [len(scheduler.cache) for scheduler in server.schedulers] == [0, 0]


def test_prompt_that_waits_for_pages_moves_to_a_rank_that_has_some() -> None:
    """Both ranks are full. The rank of the waiting prompt stays full; the other one is free first."""
    server = JointServer(pages=10)
    long, short = server.submit(30, 10, first=100), server.submit(30, 2, first=200)
    server.turn()
    assert server.rank_of(long) != server.rank_of(short)
    waiting = [server.submit(8, 2, first=300 + 10 * index) for index in range(2)]
    server.turn()
    stuck = [rid for rid in waiting if server.rank_of(rid) == server.rank_of(long)]
    assert stuck, "no prompt waits behind the long request"
    waiting_for_pages = [scheduler.gauges()["waiting_for_pages"] for scheduler in server.schedulers]
    assert waiting_for_pages[server.rank_of(long)] == len(stuck)
    assert sum(waiting_for_pages) == len(waiting)
    while not set(waiting) <= set(server.responses(Finished)):
        server.end_steps()
        server.turn()
        assert long not in server.responses(Finished), "the prompts waited for the long request"
    assert [scheduler.gauges()["waiting_for_pages"] for scheduler in server.schedulers] == [0, 0]
    assert sum(scheduler.counters["prompts_moved"] for scheduler in server.schedulers) == len(stuck)
    server.finish()
    assert len(server.responses(Finished)) == 4


def test_grammar_of_a_prompt_that_moves_is_compiled_by_its_new_rank() -> None:
    """Otherwise the first step of the request would compile it, and all ranks would wait."""
    server = JointServer(pages=10)
    long, short = server.submit(30, 10, first=100), server.submit(30, 2, first=200)
    server.turn()
    waiting = [server.submit(8, 2, first=300 + 10 * at, grammar=Grammar("regex", "a+")) for at in range(2)]
    server.turn()
    server.compile_grammars()
    server.turn()
    full, free = server.rank_of(long), server.rank_of(short)
    moving = [rid for rid in waiting if server.rank_of(rid) == full]
    assert moving, "no prompt waits behind the long request"
    while server.rank_of(moving[0]) == full:
        server.end_steps()
        server.turn()
    request = server.schedulers[free].requests[moving[0]]
    assert (request.state, [report.rank for report in server.ranks.grammars]) == (State.COMPILING, [free])
    for scheduler in server.schedulers:
        scheduler.check_integrity()
    server.finish()
    assert sorted(server.responses(Finished)) == sorted([long, short, *waiting])


def test_queue_limit_holds_per_rank_and_calls_are_accepted_as_a_whole() -> None:
    server = JointServer(pages=10, queued=1)
    for first_id in (100, 200):
        server.submit(30, 8, first=first_id)
    server.turn()
    first = server.submit(8, first=300)
    more = [server.submit(8, first=310 + index, follows=first) for index in range(4)]
    server.turn()
    assert server.responses(Failed) == []
    refused = server.submit(8, first=400)
    server.turn()
    assert server.responses(Failed) == [refused]
    server.finish()
    assert set(more) < set(server.responses(Finished))


@pytest.mark.parametrize("accepted", [True, False])
def test_all_ranks_accept_or_refuse_the_prompts_of_a_call_with_grammars(accepted: bool) -> None:
    server = JointServer(pages=10, queued=1)
    for first_id in (100, 200):
        server.submit(30, 8, first=first_id)
    server.turn()
    if not accepted:  # both queues are full
        for first_id in (300, 310):
            server.submit(8, first=first_id)
        server.turn()
    grammar = Grammar("regex", "a+")
    first = server.submit(8, first=400, grammar=grammar)
    rids = [first, *(server.submit(8, first=410 + 10 * at, follows=first, grammar=grammar) for at in range(4))]
    server.turn()
    for report in server.ranks.grammars:
        server.inbox.put(report)
    server.turn()
    assert server.responses(Failed) == ([] if accepted else rids)
    server.finish()
    assert set(rids) <= set(server.responses(Finished if accepted else Failed))


def test_state_of_the_server_is_the_sum_of_its_ranks() -> None:
    server = JointServer()
    for index in range(3):
        server.submit(5, 20, first=100 * index)
    server.turn()
    server.loop._publish(force=True)
    snapshot = server.loop.snapshot
    assert snapshot.gauges["kv_pages"] == 40
    assert snapshot.states["computing"] == 3
    assert snapshot.counters["requests"] == 3
    assert sorted(rank.states["computing"] for rank in snapshot.dp_ranks) == [1, 2]
    assert [rank.gauges["kv_pages"] for rank in snapshot.dp_ranks] == [20, 20]
    server.finish()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_random_requests_get_one_response_each_and_leave_all_memory_free(data: st.DataObject) -> None:
    """Small pools: prompts wait, move between ranks and are retracted; clients disconnect; steps end in any order."""
    size = data.draw(st.integers(2, 3))
    server = JointServer(size, pages=12, overlap=data.draw(st.booleans()))
    rids: list[str] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "submit", "cancel", "compile", "end", "turn"])):
            case "submit":
                tokens, new_tokens = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
                grammar = data.draw(st.sampled_from([None, Grammar("regex", "a+")]))
                rids.append(
                    server.submit(tokens, new_tokens, first=data.draw(st.sampled_from([100, 200])), grammar=grammar)
                )
            case "compile":
                server.compile_grammars()
            case "cancel" if rids:
                server.inbox.put(Cancel(data.draw(st.sampled_from(rids))))
            case "end":
                server.end_step(data.draw(st.integers(0, size - 1)))
            case _:
                server.turn()
                open_rids = [rid for scheduler in server.schedulers for rid in scheduler.requests]
                assert len(open_rids) == len(set(open_rids)), "a request is on two ranks"
        for scheduler in server.schedulers:
            scheduler.check_integrity()
    server.finish()
    assert sorted(server.responses(Finished) + server.responses(Failed)) == sorted(rids)
    for steps in zip(*server.ranks.steps, strict=True):
        assert len({step.ranks for step in steps}) == 1
        for step, tokens_of_rank in zip(steps, steps[0].ranks, strict=True):
            assert isinstance(step, RunStep) == (tokens_of_rank.tokens > 0)
