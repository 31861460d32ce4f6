"""A decode server with data-parallel ranks: a simulator for each, joined by the router and by their steps.

To prefill servers each rank looks like a decode server of its own, so each simulator has its own side of every prefill
server; a fault happens on all sides at once.
"""

from pdserve.scheduler.engine.routing import DecodeRouter
from pdserve.scheduler.messages.frontend import Submit
from tests.scheduler.simulation.simulator import SETTLED_AFTER
from tests.scheduler.simulation.staged_simulator import StagedSimulator


class RankSimulator(StagedSimulator):
    """One data-parallel rank, with a staging ring."""

    joint: "JointSimulator"

    def take(self, submit: Submit) -> None:
        self.joint.take(submit)

    def decode_turn(self) -> None:
        self.joint.turn()


class JointSimulator:
    def __init__(self, ranks: int, *, overlap: bool = False, verifies: bool = False) -> None:
        self.ranks = [RankSimulator(overlap=overlap, verifies=verifies) for _ in range(ranks)]
        self._router = DecodeRouter([rank.decode for rank in self.ranks])
        first = self.ranks[0]
        for rank in self.ranks:
            rank.joint = self
            rank.names, rank.submitted = first.names, first.submitted
            rank.terminal, rank.failures, rank.output = first.terminal, first.failures, first.output

    def take(self, submit: Submit) -> None:
        for number in self._router.route(submit):
            rank = self.ranks[number]
            rank.decode.handle(submit, rank.now)
            rank.act()

    def turn(self) -> None:
        """A turn of the engine loop. Steps of all ranks start together."""
        for rank in self.ranks:
            if rank.healing:
                rank.drain_parts()
            rank.decode.advance(rank.now)
        for number in self._router.rebalance(self.ranks[0].now):
            self.ranks[number].decode.advance(self.ranks[number].now)
        for rank in self.ranks:
            rank.act()
            rank.look_at_requests()
        while all(rank.decode.may_start_step() for rank in self.ranks):
            steps = [rank.decode.next_step(rank.now) for rank in self.ranks]
            for rank, step in zip(self.ranks, steps, strict=True):
                rank.act()  # pages of retracted requests are saved before the step
                if step is not None:
                    rank.commands.append(step)
            if not any(steps):
                break
        else:
            for rank in self.ranks:
                rank.decode.use_waiting_time()
        for rank in self.ranks:
            rank.act()

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def finish(self) -> None:
        """End all faults, run until every request has ended, and check that nothing is left."""
        for rank in self.ranks:
            rank.heal()
        for _ in range(SETTLED_AFTER):
            for rank in self.ranks:
                rank.settle_some()
            if not any(rank.decode.requests for rank in self.ranks):
                break
        else:
            raise AssertionError(f"stuck: {[rank.decode.state_counts() for rank in self.ranks]}")
        for rank in self.ranks:
            rank.check_end()
