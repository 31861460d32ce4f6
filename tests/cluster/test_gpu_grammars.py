"""Grammars on a pair on one GPU, with CUDA graphs and overlap scheduling: sampling waits for the previous step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.servers import Server, cluster
from tests.cluster.test_grammars import SCHEMAS, ask, check_all

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Server]:
    flags = ("--device", "cuda", "--dtype", "bfloat16", "--kv-tokens", "16384")
    with cluster(tmp_path_factory.mktemp("grammars")) as started:
        prefill, decode = started.pair(llama, flags, (*flags, "--cuda-graphs"))
        yield decode
        prefill.check_clean()
        decode.check_clean()


def test_answers_validate(decode: Server) -> None:
    check_all(decode, SCHEMAS, seed=1)


def test_four_samples_with_penalties_validate(decode: Server) -> None:
    check_all(decode, SCHEMAS[:6], n=4, frequency_penalty=0.3, seed=2)


def test_the_same_seed_gives_the_same_answer(decode: Server) -> None:
    first, second = (ask(decode, SCHEMAS[0], seed=7)[0]["output_ids"] for _ in range(2))
    assert first == second
