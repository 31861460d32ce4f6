"""The table of faults as data: configurations, states, faults, and why a combination does not exist."""

from dataclasses import dataclass
from typing import Literal

from tests.faults.server_hooks import ENTERED, TURNED

Side = Literal["decode", "prefill"]
UNHARMED = frozenset({"200"})


@dataclass(frozen=True)
class Point:
    """Where the engine loop of a server pauses: when the request enters this state, or at the end of that loop turn."""

    side: Side
    state: str
    moment: str = ENTERED


@dataclass(frozen=True)
class State:
    """A state of the request in which a fault is injected, after the servers have reached all points."""

    side: Side
    name: str
    points: tuple[Point, ...]
    local: bool = True
    """Whether a prompt that decode computes itself is ever in it."""
    remote: bool = True
    """Whether a prompt that prefill computes is ever in it."""
    grammar: bool = False
    """Whether only requests with a grammar are ever in it."""
    only: str = ""
    """The only configuration whose requests are ever in it."""

    @property
    def label(self) -> str:
        return f"{self.side} {self.name}"


def _state(
    side: Side,
    name: str,
    moment: str = ENTERED,
    *more: Point,
    local: bool = True,
    remote: bool = True,
    grammar: bool = False,
    only: str = "",
) -> State:
    return State(side, name, (Point(side, name, moment), *more), local, remote, grammar, only)


STATES = (
    _state("decode", "compiling", TURNED, grammar=True),
    _state("decode", "queued"),
    _state("decode", "prefilling", TURNED, Point("prefill", "waiting"), local=False),
    _state("decode", "loading", TURNED, only="cached"),
    _state("decode", "computing", TURNED, remote=False),
    State("decode", "taken back", (Point("decode", "computing", TURNED),), only="auto"),
    _state("decode", "verifying", TURNED, local=False),
    _state("decode", "arrived"),
    _state("decode", "opening", TURNED, only="hisparse"),
    _state("decode", "ready"),
    _state("decode", "running", TURNED),
    _state("decode", "saving"),
    _state("decode", "saved"),
    _state("decode", "restoring"),
    _state("decode", "ended"),
    _state("prefill", "waiting", local=False),
    _state("prefill", "computing", TURNED, local=False),
    _state("prefill", "sending", TURNED, local=False),
    _state("prefill", "closing", local=False),
)
"""CLOSED is left out: then prefill holds nothing of the request. Decode may hold pages of one that has ENDED."""
UNLISTED = _state("prefill", "compiling", TURNED, local=False, grammar=True)
"""Not in the tables: tests run some of its cells."""


@dataclass(frozen=True)
class Fault:
    """`name` is a key of INJECTIONS in `injections.py`; `side` is the server with the fault, or None."""

    name: str
    label: str
    side: Side | None = None
    needs: Literal["rank process", "link", ""] = ""
    ends: frozenset[str] = frozenset({"200", "503"})
    """How the request may end: a status, `closed` (the response is cut short) or `left` (by the client)."""
    loses_peer: bool = False
    """Whether decode loses its prefill server."""


def _process_faults(side: Side) -> tuple[Fault, ...]:
    actions = (("kill", "SIGKILL"), ("stop_short", "SIGSTOP 0.4 s"), ("stop_long", "SIGSTOP 4 s"))
    signals = [
        Fault(
            f"{action}_{process}",
            f"{side} {process}: {label}",
            side,
            "rank process" if process == "rank" else "",
            _ends_after(side, process, action),
            loses_peer=side == "prefill" and (action == "kill" or (action == "stop_long" and process != "frontend")),
        )
        for process in ("frontend", "leader", "rank")
        for action, label in actions
    ]
    return (*signals, Fault("terminate", f"{side}: SIGTERM, restart", side))


def _ends_after(side: Side, process: str, action: str) -> frozenset[str]:
    if action == "stop_short" or (action == "stop_long" and process == "frontend"):
        return UNHARMED
    if (side, process, action) == ("decode", "frontend", "kill"):
        return frozenset({"200", "closed"})
    return frozenset({"200", "503"})


FAULTS = (
    *_process_faults("decode"),
    *_process_faults("prefill"),
    Fault("cut_control", "control link cut 2.5 s", needs="link", loses_peer=True),
    Fault("stall_control", "control link silent 3 s", needs="link", loses_peer=True),
    Fault("delay_control", "control link delayed 0.2 s", needs="link", ends=UNHARMED),
    Fault("reset_control", "control link reset", needs="link"),
    Fault("cut_data", "data link cut 2.5 s", needs="link"),
    Fault("stall_data", "data link stalled 3 s", needs="link"),
    Fault("reset_data", "data link reset", needs="link"),
    Fault("cut_both", "both links cut 2.5 s", needs="link", loses_peer=True),
    Fault("reset_both", "both links reset", needs="link"),
    Fault("lossy_both", "both links delayed 50 ms, 10 % lost", needs="link", ends=UNHARMED),
    Fault("client_gone", "client gone", ends=frozenset({"200", "left"})),
    Fault("client_slow", "client reads slowly", ends=UNHARMED),
    Fault("fill_pools", "KV pools full", ends=UNHARMED),
    Fault("transfer_error", "transfer error", needs="link"),
    Fault("late_write", "late write of a dead generation", needs="link"),
    Fault("clock_forward", "clocks jump forward 1 h", ends=UNHARMED),
    Fault("clock_back", "clocks jump back 1 h", ends=UNHARMED),
    Fault("oom", "decode rank out of memory", "decode", ends=frozenset({"200", "500", "503"})),
    Fault("oom", "prefill rank out of memory", "prefill", ends=frozenset({"200", "500", "503"})),
)


@dataclass(frozen=True)
class Config:
    """A pair of servers, or a decode server that computes its prompts itself."""

    name: str
    model: Literal["dense", "sparse", "mixture"] = "dense"
    prefill_ranks: int = 1
    decode_ranks: int = 1
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    local: bool = False
    only: str = ""
    """The only state of its cells: the others are those of other configurations."""
    faults: tuple[str, ...] = ()
    """The names of its faults; none: all."""

    @property
    def decode_pools(self) -> int:
        """The data-parallel ranks of decode: each has pages of its own, and is a peer of prefill."""
        return self.decode_ranks if "--dp-attention" in self.decode_flags else 1


KILLS = ("kill_frontend", "kill_leader", "kill_rank")
DEP2 = ("--tp", "2", "--dp-attention")
AUTO = ("--local-prefill", "auto", "--slo-ttft-ms", "400", "--max-step-tokens", "32")
"""Steps too small for the request to be computed on decode at once."""
SMALL_RING = ("--staging-ring-mib", "0.05")
CONFIGS = (
    Config("dense"),
    Config("staged", prefill_ranks=2, prefill_flags=("--tp", "2"), decode_flags=SMALL_RING),
    Config(
        "hisparse",
        model="sparse",
        decode_ranks=2,
        decode_flags=("--pp", "2", "--enable-hisparse", "--hot-rows", "32", "--kv-memory-gib", "0.002"),
    ),
    Config("local", local=True, decode_flags=("--local-prefill", "always")),
    Config(
        "cached",
        model="sparse",
        decode_flags=("--local-prefill", "always", "--prefix-cache", "--enable-hisparse", "--hot-rows", "256"),
        local=True,
        only="loading",
    ),
    Config("auto", decode_flags=AUTO, only="taken back"),
    Config(
        "TP to DEP",
        model="mixture",
        prefill_ranks=2,
        decode_ranks=2,
        prefill_flags=("--tp", "2"),
        decode_flags=(*DEP2, *SMALL_RING),
        faults=KILLS,
    ),
    Config(
        "DEP to TP",
        model="mixture",
        prefill_ranks=2,
        decode_ranks=2,
        prefill_flags=DEP2,
        decode_flags=("--tp", "2", *SMALL_RING),
        faults=KILLS,
    ),
)


def missing_because(config: Config, state: State, fault: Fault) -> str | None:
    """Why there is no such cell; None if there is one."""
    if state.only not in ("", config.name):
        return f"only with {state.only}"
    if config.only not in ("", state.name):
        return "as in the other tables"
    if config.faults and fault.name not in config.faults:
        return "as in the other tables"
    if config.local and not state.local:
        return "no prefill server: decode computes the prompt"
    if config.local and (fault.side == "prefill" or fault.needs == "link"):
        return "no prefill server: decode computes the prompt"
    if not config.local and not state.remote:
        return "prefill computes the prompt"
    if fault.needs == "rank process":
        ranks = config.decode_ranks if fault.side == "decode" else config.prefill_ranks
        if ranks == 1:
            return "a single rank is a thread of the leader"
    if state.name == "closing" and fault.name in ("client_gone", "client_slow"):
        return "the client has left before"
    return None


@dataclass(frozen=True)
class Cell:
    """One fault in one state of one configuration."""

    config: Config
    state: State
    fault: Fault

    @property
    def id(self) -> str:
        return f"{self.config.name}-{self.state.label}-{self.fault.label}".replace(" ", "_")


def cells(config: Config) -> list[Cell]:
    """All cells of a configuration, by diagonals of the table: a run that ends early has had most faults and states."""
    return [
        Cell(config, STATES[(number + turn) % len(STATES)], fault)
        for turn in range(len(STATES))
        for number, fault in enumerate(FAULTS)
        if missing_because(config, STATES[(number + turn) % len(STATES)], fault) is None
    ]


def selection() -> list[Cell]:
    """The cells of `make test-all`: each fault that needs no rank process once, each state at least once, by
    configuration, and with data-parallel ranks a killed rank on either side.
    """
    chosen: list[Cell] = []
    dense, local = (config for config in CONFIGS if config.name in ("dense", "local"))
    turn = 0
    for fault in FAULTS:
        states = [state for state in STATES if missing_because(dense, state, fault) is None]
        if states:
            chosen.append(Cell(dense, states[turn % len(states)], fault))
            turn += 1
    places = (("decode", "running"), ("prefill", "sending"))
    chosen += [
        Cell(config, state, fault)
        for config in CONFIGS
        for state in STATES
        for fault in FAULTS
        if config.model == "mixture" and (state.side, state.name) in places
        if fault.name == "kill_rank" and fault.side == state.side
    ]
    computing = next(state for state in STATES if state.name == "computing" and not state.remote)
    wanted = ("kill_leader", "fill_pools")
    chosen += [Cell(local, computing, fault) for fault in FAULTS[:10] + FAULTS[-8:] if fault.name in wanted]
    kill = next(fault for fault in FAULTS if fault.name == wanted[0])
    chosen += [Cell(config, state, kill) for config in CONFIGS for state in STATES if state.only == config.name]
    auto = next(config for config in CONFIGS if config.only == "taken back")
    state = next(state for state in STATES if state.only == auto.name)
    faults = [fault for fault in FAULTS if fault.name in ("kill_leader", "cut_both", "client_gone")]
    return chosen + [Cell(auto, state, fault) for fault in faults if fault is not kill]


def unlisted_cells() -> list[Cell]:
    names = ("kill_leader", "terminate", "cut_control", "client_gone")
    return [Cell(CONFIGS[0], UNLISTED, fault) for fault in FAULTS if fault.name in names and fault.side != "decode"]
