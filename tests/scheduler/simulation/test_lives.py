"""The lives of `make lives`: one of each kind."""

import logging
from collections.abc import Iterator

import pytest

from tests.scheduler.simulation import lives


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in lives.KINDS])
def test_life_of_each_kind_ends_well(kind: str) -> None:
    assert lives.live((kind, 7, 120)) == (kind, 7, None)


def test_failure_is_returned_with_what_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(seed: int, steps: int) -> None:
        raise AssertionError(f"lost after {steps} steps of {seed}")

    monkeypatch.setattr(lives, "KINDS", (short,))
    kind, seed, problem = lives.live(("short", 3, 40))
    assert (kind, seed) == ("short", 3)
    assert problem is not None
    assert "lost after 40 steps of 3" in problem
