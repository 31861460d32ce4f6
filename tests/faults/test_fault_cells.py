"""A selection of the table of faults (`selection()` in catalog.py). `make faults` runs all cells."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.servers import HTTP, wait_until
from tests.faults.catalog import (
    CONFIGS,
    FAULTS,
    STATES,
    UNLISTED,
    Cell,
    Config,
    Side,
    missing_because,
    selection,
    unlisted_cells,
)
from tests.faults.clients import StreamClient
from tests.faults.rig import LOADED, Rig
from tests.faults.soak import soak

SELECTION = selection() + unlisted_cells()
STUCK_NAMED_S = 5.0
SOAK_S = 6.0


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[str, Rig]]:
    """The rig of one configuration at a time, by its name: `rig_of` stops the last one before it starts another one."""
    started: dict[str, Rig] = {}
    yield started
    for rig in started.values():
        rig.__exit__()


def rig_of(config: Config, rigs: dict[str, Rig], directory: Path) -> Rig:
    if config.name not in rigs:
        while rigs:
            rigs.popitem()[1].__exit__()
        rigs[config.name] = Rig(config, directory).__enter__()
    return rigs[config.name]


@pytest.mark.parametrize("cell", SELECTION, ids=lambda cell: cell.id)
def test_request_ends_once_and_all_memory_is_freed(
    cell: Cell, rigs: dict[str, Rig], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig_of(cell.config, rigs, tmp_path_factory.mktemp(cell.config.name)).run(cell)


def test_random_faults_under_random_traffic(rigs: dict[str, Rig], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The short form of `make soak`."""
    rig = rig_of(SELECTION[0].config, rigs, tmp_path_factory.mktemp("soak"))
    assert soak(rig, seed=3, seconds=SOAK_S, verbose=False) == []


def test_selection_has_every_state_and_every_fault_that_needs_no_rank_process() -> None:
    assert {cell.state for cell in SELECTION} == {*STATES, UNLISTED}
    found = {cell.fault for cell in SELECTION if cell.fault.needs != "rank process"}
    assert found == {fault for fault in FAULTS if fault.needs != "rank process"}


def test_every_state_and_every_fault_has_a_cell_in_some_configuration() -> None:
    found = {
        (state, fault)
        for config in CONFIGS
        for state in STATES
        for fault in FAULTS
        if missing_because(config, state, fault) is None
    }
    assert {state for state, _ in found} == set(STATES)
    assert {fault for _, fault in found} == set(FAULTS)


@pytest.mark.parametrize(
    ("side", "thread", "name"),
    [
        ("decode", "loop", "the engine loop"),
        ("decode", "rank", "step "),
        ("decode", "control", "the control thread"),
        ("prefill", "sender", "the sender to "),
    ],
)
def test_health_names_what_is_stuck_and_the_server_recovers(
    side: Side, thread: str, name: str, rigs: dict[str, Rig], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig = rig_of(SELECTION[0].config, rigs, tmp_path_factory.mktemp("stuck"))
    rig.wait_ready()
    server, decode = rig.servers[side], rig.servers["decode"]

    def reasons() -> list[str]:
        return list(HTTP.get(f"{server.url}/health", timeout=10).json()["reasons"])

    decode.generate(rig.request.prompt, 1)  # so that the server has measured a step
    process = rig.hooks.leader(side)
    process.tell(block=thread)
    client = StreamClient(decode, rig.request.prompt, rig.request.new_tokens)
    try:
        wait_until(lambda: any(name in reason for reason in reasons()), LOADED * STUCK_NAMED_S, f"{name} is named")
    finally:
        process.tell(block="")
    assert client.outcome()[0] in ("200", "503")
    wait_until(lambda: reasons() == [], 20, "healthy")
    rig.check_after()
