"""How many edges a request passes in the decode scheduler and its memory: files, classes, calls, changes of file.

    python -m benchmarks.hops

The real scheduler runs in the tests' simulator. Counted are calls of functions of scheduler/ and memory/ that a call
into scheduler/decode makes, and that call; a change is a call in another file than the call before.
"""

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tests.scheduler.simulation.simulator import Simulator

ROOT = Path(__file__).parents[1]
ENTRY = "scheduler/decode/"
COUNTED = ("scheduler/", "memory/")


class Hops:
    """What ran between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: collections.Counter[str] = collections.Counter()
        self.classes: set[tuple[str, str]] = set()
        self.calls = self.changes = 0
        self._depth = 0
        """Of the calls below the first one into ENTRY; 0 outside of it."""
        self._last = ""
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> "Hops":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "return":
            self._depth = max(0, self._depth - 1)
        if event != "call":
            return
        code = frame.f_code
        file = self._name_of(code.co_filename)
        if not self._depth and not (file or "").startswith(ENTRY):
            return
        self._depth += 1
        if file is None or code.co_name.startswith("<"):  # comprehensions are no calls in newer versions of Python
            return
        self.files[file] += 1
        self.calls += 1
        self.changes += self._last not in ("", file)
        self._last = file
        owner, _, _ = code.co_qualname.partition(".")
        if owner != code.co_qualname and "<locals>" not in owner:
            self.classes.add((file, owner))

    def _name_of(self, filename: str) -> str | None:
        if filename not in self._names:
            _, package, name = filename.replace(str(ROOT), "").rpartition("pdserve/")
            counted = package and name.startswith(COUNTED)
            self._names[filename] = name if counted else None
        return self._names[filename]

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.classes)} classes, {self.calls} calls, {self.changes} change the file"
        )


def short_request() -> Hops:
    """One request of 8 prompt tokens and 2 new ones, through a prefill server."""
    return _until_idle(Simulator(endpoints=("a:1",)), lambda simulator: simulator.ask_for(tuple(range(10, 18)), 2))


def hisparse_request() -> Hops:
    """The same with HiSparse, and longer than its hot buffer."""
    simulator = Simulator(endpoints=("a:1",), hot_pages=9)
    return _until_idle(simulator, lambda simulator: simulator.ask_for(tuple(range(10, 30)), 8))


def dying_prefill_server() -> Hops:
    """A prefill server dies while it computes a prompt; until another one has it."""
    simulator = Simulator(endpoints=("a:1",))
    simulator.ask_for(tuple(range(10, 26)), 2)
    for _ in range(2):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
    simulator.start("b:1")
    with Hops() as hops:
        simulator.kill(0)
        while not simulator.decode.state_counts()["prefilling"]:
            simulator.decode_turn()
            simulator.pass_time(0.01)
    return hops


def retraction() -> Hops:
    """Three requests that do not fit together: one loses its pages and continues later."""
    simulator = Simulator(endpoints=("a:1",), pages=14)

    def begin(simulator: Simulator) -> None:
        for start in (10, 50, 90):
            simulator.ask_for(tuple(range(start, start + 12)), 30)

    hops = _until_idle(simulator, begin)
    assert simulator.decode.counters["retractions"], "nothing was retracted"
    return hops


def _until_idle(simulator: Simulator, begin: Callable[[Simulator], object]) -> Hops:
    with Hops() as hops:
        begin(simulator)
        for _ in range(400):
            simulator.work()
            simulator.pass_time(0.01)
            if not simulator.decode.requests and simulator.decode.idle:
                break
    assert not simulator.decode.requests, "a request did not end"
    return hops


def main() -> None:
    for scenario in (short_request, hisparse_request, dying_prefill_server, retraction):
        print(f"{scenario.__name__.replace('_', ' ')}: {scenario()}")


if __name__ == "__main__":
    main()
