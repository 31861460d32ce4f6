"""A selection of the table of faults: each fault once and each state at least once. `make faults` runs all cells."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.catalog import CONFIGS, FAULTS, STATES, Cell, Config, missing_because, selection
from tests.faults.rig import Rig

SELECTION = selection()


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[str, Rig]]:
    """The servers of the configuration in use: those of the last one end when another one begins."""
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


def test_selection_has_every_state_and_every_fault_that_needs_no_rank_process() -> None:
    assert {cell.state for cell in SELECTION} == set(STATES)
    assert {cell.fault for cell in SELECTION} == {fault for fault in FAULTS if fault.needs != "rank process"}


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
