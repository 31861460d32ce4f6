"""The figures in benchmarks/results and the page that shows them."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.results import (
    PAGE,
    README,
    RESULTS,
    Anchor,
    Figure,
    Results,
    page,
    read_results,
    readme,
    record,
    renew,
)

FILES = sorted(RESULTS.glob("*.json"))
MEASURED = Figure("step", 2.0, "ms", "python -m benchmarks.engine", "0123abcd", "2026-11-19", "1 x H200", target=1.5)


def test_the_page_is_what_the_files_say_in_at_most_200_lines() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make format"
    assert len(page().splitlines()) <= 200


def test_the_figures_of_the_readme_are_those_of_the_files() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run: make format"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_figure_has_a_command_a_commit_and_a_machine_and_stands_once(path: Path) -> None:
    rows = read_results(path).rows
    for row in rows:
        assert row.command, row
        assert row.machine, row
        assert len(row.commit) >= 7, row
        assert row.date.startswith("20"), row
    assert len({row.figure for row in rows}) == len(rows)


def test_a_row_without_a_command_is_refused(tmp_path: Path) -> None:
    row = msgspec.to_builtins(MEASURED)
    del row["command"]
    (tmp_path / "broken.json").write_bytes(msgspec.json.encode({"title": "broken", "rows": [row]}))
    with pytest.raises(msgspec.ValidationError, match="command"):
        read_results(tmp_path / "broken.json")


def test_record_replaces_the_figure_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    record(path, "Steps", [MEASURED, msgspec.structs.replace(MEASURED, figure="other")])
    newer = msgspec.structs.replace(MEASURED, value=1.0)
    record(path, "ignored, as the file has a title", [newer])
    assert read_results(path) == Results("Steps", [newer, msgspec.structs.replace(MEASURED, figure="other")])


def test_record_keeps_the_anchor_of_the_figure_that_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    first, second = Anchor("vLLM", 1.9), Anchor("vLLM", 1.8)
    for anchor, kept in ((first, first), (None, first), (second, second)):
        record(path, "Steps", [msgspec.structs.replace(MEASURED, anchor=anchor)])
        (row,) = read_results(path).rows
        assert row.anchor == kept


def test_renewed_figures_keep_their_target_and_others_get_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.json"
    record(path, "Steps", [MEASURED])
    renew(path, {"step": 1.25, "another": 3.0})
    (row,) = read_results(path).rows
    assert (row.value, row.unit, row.target) == (1.25, "ms", 1.5)
    assert row.machine != MEASURED.machine
    assert "without a row: another" in capsys.readouterr().out


def test_a_figure_misses_its_target_on_the_side_that_is_worse() -> None:
    assert MEASURED.misses
    assert not msgspec.structs.replace(MEASURED, better="higher").misses
    assert not msgspec.structs.replace(MEASURED, value=1.0).misses
