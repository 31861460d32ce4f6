"""Runs steps in CUDA graphs on a single rank, which always has logits."""

from collections.abc import Sequence

import torch

from pdserve.models.graphs.capture import StepGraphs
from pdserve.models.layers.batch import SequenceSlice


def run_graph(
    graphs: StepGraphs, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    logits = graphs.run(slices, token_ids)
    assert logits is not None
    return logits
