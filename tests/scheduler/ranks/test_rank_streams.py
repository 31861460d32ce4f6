"""A rank on a GPU uses its own stream, from loading to the last step: the simulated GPU refuses the default stream."""

import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.sampling import SamplingParams
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.memory.index_spaces import KvPage
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.ranks import (
    CheckCache,
    CommandDone,
    ComputeCommand,
    CopyPage,
    RankReport,
    RunStep,
    StepDone,
    StopRank,
)
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.rank import RankEngine
from tests.checkpoints import make_checkpoint
from tests.kernels.interpreter import INTERPRETED
from tests.models.pretend_gpu import PretendGpu

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


DRAWS = (Draw(SamplingParams(temperature=0.0), 0),)
PROMPT = [5, 3, 200, 7, 7]


def serve(config: AnyServerConfig, *commands: ComputeCommand) -> tuple[list[RankReport], int]:
    """The reports of a single rank for these commands, and how often it has waited for arrivals."""
    reports: list[RankReport] = []
    inbox: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    for command in (*commands, CheckCache()):
        inbox.put(command)

    def report(done: RankReport) -> None:
        reports.append(done)
        if sum(isinstance(report, StepDone | CommandDone) for report in reports) == len(commands):
            inbox.put(StopRank())

    with PretendGpu() as gpu:
        rank = RankEngine(config, locate_model(config.model), 0, meet_at=None, report=report)
        try:
            rank.serve(inbox)
        finally:
            rank.close()
    return reports, gpu.waits_for_arrivals


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.models.graphs.chunks.COPIED_TOKENS", 512)  # every 128 are a program to interpret


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    directory: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", **sizes)
    return {
        "model": str(directory),
        "device": "cuda:0",
        "dtype": "float16",
        "page_size": 8,
        "kv_tokens": 64,
        "transport": "tcp",
    }


def test_prefill_steps_run_on_the_own_stream(settings: dict[str, Any]) -> None:
    step = RunStep(1, (StepRow(PROMPT, 0, [3], draws=DRAWS),))
    reports, waits = serve(PrefillConfig(**settings, chunk_size=8, max_queued_requests=2), step)
    done = [report for report in reports if isinstance(report, StepDone)]
    assert [report.error for report in done] == [None]
    assert waits == 0, "no peer writes to a prefill server"


@pytest.mark.parametrize("staging", ["off", "on"])
def test_decode_steps_and_page_copies_run_on_the_own_stream(settings: dict[str, Any], staging: str) -> None:
    small = {"max_running_requests": 1, "max_step_tokens": 8, "retract_memory_gib": 0}
    config = DecodeConfig.model_validate({**settings, **small, "staging": staging, "cuda_graphs": staging == "off"})
    reports, waits = serve(
        config,
        RunStep(1, (StepRow([5], 0, [3], draws=DRAWS),)),
        CopyPage(2, KvPage(3), KvPage(4)),
        RunStep(3, (StepRow([5], 1, [4], draws=DRAWS),)),
    )
    assert [report.error for report in reports if isinstance(report, StepDone)] == [None, None]
    assert [report.command_id for report in reports if isinstance(report, StepDone | CommandDone)] == [1, 2, 3], (
        "in order"
    )
    assert waits == 3, "each command may read KV that has just arrived"
