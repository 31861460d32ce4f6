"""The benchmark of TP ranks that send to data-parallel ranks still runs, with a tiny model on a CPU."""

import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import dep_pair


def test_figures_of_a_staged_pair_and_of_one_without_staging(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert dep_pair.main(["--tiny", "--arms", "tcp-dep-staged", "tcp-dep-off", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    staged, off = (results["arms"][f"tcp-dep-{mode}"] for mode in ("staged", "off"))
    token_bytes = 2 * 2 * 4 * 16 * 4  # layers, keys and values, heads, dimensions, float32
    for arm in (staged, off):
        assert (arm["alone"]["ok"], arm["load"]["ok"]) == (2, 8)
        assert arm["alone"]["prompt_bytes"] == 96 * token_bytes
        assert arm["load"]["prompt_bytes"] == 48 * token_bytes
        assert arm["alone"]["kv_gb_per_s"] > 0
        assert 0 < arm["alone"]["to_first_step_s"] < arm["alone"]["ttft_p50_s"] + 1
    # two ranks write one part each of a prompt; without staging, each page, layer and plane of two heads in one write
    assert staged["load"]["writes"] == staged["load"]["staged_parts"] == 2 * 8
    assert off["load"]["staged_parts"] == 0
    assert off["load"]["writes"] > 4 * staged["load"]["writes"]
    gains = dep_pair.gains_of(results["arms"])
    assert [line.split(" gives ")[0] for line in gains] == ["tcp: staging"] * 2


def test_a_load_that_takes_too_long_is_ended_and_its_requests_are_missed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--tiny", "--arms", "tcp-dep-staged", "--requests", "400", "--limit-s", "2", "--json", str(file)]
    assert dep_pair.main(arguments) == 1
    load = json.loads(file.read_text())["arms"]["tcp-dep-staged"]["load"]
    assert load["missed"] == 400 - load["ok"] > 0
    assert load["failed"] == 0
    assert load["duration_s"] < 10


@pytest.mark.parametrize("serves", [False, True])
def test_mps_is_ended_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """A control program that notes what it is told."""
    notes = tmp_path / "notes"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\necho "$@" "$CUDA_MPS_PIPE_DIRECTORY" >> {notes}\n'
        f'[ "$1" = -d ] || while read line; do echo $line >> {notes}; {"echo 42" if serves else ":"}; done\n'
    )
    control.chmod(0o755)
    client = tmp_path / "client"
    client.write_text("#!/bin/sh\nexit 0\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(client))
    with dep_pair.mps(Console(quiet=True)) as side_by_side:
        assert side_by_side == serves
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) == serves
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    lines = notes.read_text().splitlines()
    assert lines[0].startswith("-d /")
    assert lines[-1] == "quit"


def test_without_the_control_program_there_is_no_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with dep_pair.mps(Console(quiet=True)) as side_by_side:
        assert not side_by_side
