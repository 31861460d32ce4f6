"""Write the table in docs/reliability.md of what happens to requests when their prefill server dies; with --check, only
say whether it is true. The real schedulers run in the simulator of the tests.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / ".dev"), str(Path(__file__).parent), str(ROOT)]

from generated_section import update_section  # type: ignore[import-not-found]  # noqa: E402

from pdserve.common.sampling import Grammar, SamplingParams  # noqa: E402
from pdserve.configs.setting_types import LocalPrefillSetting  # noqa: E402
from pdserve.scheduler.decode.requests.request import Request  # noqa: E402
from pdserve.scheduler.messages.frontend import Submit  # noqa: E402
from pdserve.scheduler.messages.lifecycle import State  # noqa: E402
from tests.scheduler.simulation.simulator import Simulator  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- lost prefill server: written by docs/lost_prefill_table.py -->"
END = "<!-- end of lost prefill server -->"
MOST_TURNS = 4000


@dataclass(frozen=True)
class World:
    """What is there besides the prefill server that dies."""

    name: str
    endpoints: tuple[str, ...]
    local: LocalPrefillSetting


WORLDS = (
    World("another prefill server", ("a:1", "b:1"), "never"),
    World("none; decode may compute", ("a:1",), "auto"),
    World("none; `--local-prefill never`", ("a:1",), "never"),
)


@dataclass(frozen=True)
class Way:
    """How a request gets into a state."""

    begin: Callable[[Simulator], object]
    options: dict[str, object] = field(default_factory=dict)
    local: bool = False
    """Only if decode computes its prompt."""
    copies: bool = True
    """Whether the ranks make copies before it is in the state."""


def _ask(count: int, tokens: int, new: int) -> Callable[[Simulator], object]:
    def ask(simulator: Simulator) -> None:
        for number in range(count):
            simulator.ask_for(tuple(range(10 + 20 * number, 10 + 20 * number + tokens)), new)

    return ask


def _ask_with_grammar(simulator: Simulator) -> None:
    sampling = SamplingParams(max_new_tokens=4, grammar=Grammar("regex", ".*"))
    simulator.submitted.add("r")
    simulator.decode.handle(Submit("r", (10, 11, 12), sampling), simulator.now)


def _ask_with_cached_prefix(simulator: Simulator) -> None:
    simulator.ask_for(tuple(range(10, 22)), 6)
    while not simulator.decode.idle:
        _turn(simulator)
    simulator.ask_for(tuple(range(10, 24)), 6)


RETRACTED = Way(_ask(2, 16, 30), {"retract_pages": 24, "prefix_cache": False})
WAYS = {
    State.COMPILING: Way(_ask_with_grammar),
    State.QUEUED: Way(_ask(1, 8, 4)),
    State.PREFILLING: Way(_ask(1, 8, 4)),
    State.VERIFYING: Way(_ask(1, 8, 4), {"verifies": True}),
    State.LOADING: Way(_ask_with_cached_prefix, {"overlap": True, "hot_pages": 14, "writes_both": True}, copies=False),
    State.COMPUTING: Way(_ask(1, 20, 4), local=True),
    State.ARRIVED: Way(_ask(3, 6, 20), {"hot_pages": 7}),
    State.OPENING: Way(_ask(1, 6, 20), {"hot_pages": 7}),
    State.READY: Way(_ask(4, 4, 3)),
    State.RUNNING: Way(_ask(1, 8, 20)),
    State.SAVING: RETRACTED,
    State.SAVED: RETRACTED,
    State.RESTORING: RETRACTED,
}


def _turn(simulator: Simulator, seen: Callable[[], bool] = lambda: False, *, copies: bool = True) -> bool:
    """A turn of every server and rank, until `seen`; returns whether it was."""
    moves: list[Callable[[], None]] = [simulator.decode_turn, partial(simulator.rank_turn, eos=False)]
    for which in range(len(simulator.servers)):
        moves += [
            partial(simulator.deliver, which, up=False),
            partial(simulator.prefill_turn, which),
            partial(simulator.end_write, which, ok=True, late=False),
            partial(simulator.deliver, which, up=True),
        ]
    moves += [simulator.copy_turn] * copies
    simulator.pass_time(0.01)
    for move in moves:
        move()
        if seen():
            return True
    return False


def reached(state: State, world: World) -> tuple[Simulator, Request]:
    """A request in this state."""
    way = WAYS[state]
    local: LocalPrefillSetting = "always" if way.local else "never"
    simulator = Simulator(endpoints=world.endpoints, local_prefill=local, **way.options)  # type: ignore[arg-type]
    way.begin(simulator)

    def found() -> list[Request]:
        return [request for request in simulator.decode.requests.values() if request.state is state]

    for _ in range(MOST_TURNS):
        if found() or _turn(simulator, lambda: bool(found()), copies=way.copies):
            return simulator, found()[0]
    raise AssertionError(f"no request became {state}")


def fate(state: State, world: World) -> tuple[str, str]:
    """What happens to a request in this state: at once, and in the end."""
    way = WAYS[state]
    if way.local and world.local == "never":
        return "", "n/a"
    simulator, request = reached(state, world)
    object.__setattr__(simulator.decode.limits, "local_prefill", world.local)  # only now: before, it would not prefill
    attempt, attempts, prompt = request.prompt.attempt, request.prompt.attempts, request.prompt
    servers = list(simulator.servers)
    server = servers.index(attempt.instance) if attempt is not None and attempt.instance in servers else 0
    act, then = simulator.act, list[State]()

    def note() -> None:
        then.append(request.state)
        act()

    simulator.act = note  # type: ignore[method-assign]
    simulator.kill(server)
    simulator.act = act  # type: ignore[method-assign]
    at_once = "stays" if then[0] is state else then[0].name
    at_once += "; its pages are in quarantine" * (attempt is not None and attempt.given_up)
    for _ in range(MOST_TURNS):
        if request.state is State.ENDED:
            break
        _turn(simulator)
    failed = simulator.failures.get(request.rid)
    if failed is not None:
        return at_once, f"{failed.status}"
    if prompt.attempts > attempts:
        return at_once, "200, sent again" if attempts else "200, sent there"
    computes = request.kv_path == "local" and not way.local
    return at_once, "200, computed by decode" if computes else "200"


def table() -> str:
    lines = [f"| state | at once | {' | '.join(world.name for world in WORLDS)} |", f"|{'---|' * (2 + len(WORLDS))}"]
    for state in WAYS:
        fates = [fate(state, world) for world in WORLDS]
        (at_once,) = {first for first, _ in fates if first}
        lines.append(f"| {state.name} | {at_once} | {' | '.join(end for _, end in fates)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(update_section(PAGE, BEGIN, END, table()))
