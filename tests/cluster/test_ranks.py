"""Tensor- and pipeline-parallel servers: transfers between all layouts, and lost ranks."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference, make_checkpoint
from tests.cluster.servers import Cluster, Server, cluster, wait_until
from tests.ports import free_port
from tests.processes import gone

NEW_TOKENS = 10
LENGTHS = (1, 17, 48, 131)
FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every combination; otherwise a few that cover every kind of transfer."""

Layout = tuple[int, int]
"""Tensor-parallel ranks and pipeline stages."""
LAYOUTS: tuple[Layout, ...] = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
PREFILL = LAYOUTS if FULL else ((1, 1), (4, 1), (2, 2))
DECODE = LAYOUTS if FULL else ((2, 1), (1, 2))
RETRACTING = ((1, 2), (2, 1)) if FULL else ((1, 2),)
"""Layouts of decode servers whose pool is too small for all requests."""
PAGE_SIZES = {(1, 1): 16, (2, 1): 8, (4, 1): 16, (1, 2): 64, (2, 2): 1}
"""Page sizes of the decode servers; those of prefill servers are 16."""


class Model(NamedTuple):
    directory: Path
    prompts: list[list[int]]
    expected: list[GreedyTokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Five layers make stages unequal; all but the third have a window that is shorter than prompts. With two KV heads
    for four ranks, two ranks each hold the same head.
    """
    directory = make_checkpoint(
        tmp_path_factory.mktemp("ranks-model"),
        "gemma3_text",
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2 if not FULL else 4,
        max_position_embeddings=8192,
    )
    rng = random.Random(4)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    reference = load_reference(directory)
    return Model(directory, prompts, [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts])


def flags(layout: Layout, page_size: int) -> list[str]:
    tp, pp = layout
    return ["--tp", str(tp), "--pp", str(pp), "--page-size", str(page_size), "--kv-tokens", "4096"]


@pytest.fixture(scope="module")
def prefills(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[Layout, Server]]]:
    with cluster(tmp_path_factory.mktemp("ranks-logs")) as servers:
        started = {
            layout: servers.add("prefill", model.directory, *flags(layout, 16), "--chunk-size", "48")
            for layout in PREFILL
        }
        for server in started.values():
            server.wait_ready()
        yield servers, started


@pytest.mark.parametrize("layout", DECODE, ids=lambda layout: f"decode-tp{layout[0]}-pp{layout[1]}")
def test_tokens_equal_transformers_for_all_layouts(
    prefills: tuple[Cluster, dict[Layout, Server]], model: Model, layout: Layout
) -> None:
    servers, sources = prefills
    decode = servers.add(
        "decode",
        model.directory,
        "--prefill",
        ",".join(server.endpoint for server in sources.values()),
        *flags(layout, PAGE_SIZES[layout]),
        "--no-prefix-cache",
    )
    decode.wait_ready(peers=len(sources))
    for source in sources.values():
        with ThreadPoolExecutor() as pool:
            found = pool.map(
                lambda prompt, source=source: decode.generate(prompt, NEW_TOKENS, **source.bootstrap), model.prompts
            )
        assert list(found) == model.expected
    assert decode.count("chunks_verified") > 0
    assert len(decode.info()["ranks"]) == layout[0] * layout[1]
    for source in sources.values():
        assert {"k+v": "tcp"} in [peer["transports"] for peer in source.settled_info()["peers"]]
    decode.check_clean()
    assert decode.stop() == 0


def rank_pids(server: Server) -> list[int]:
    leader = server.leader_pid()
    return [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]


@pytest.mark.parametrize("layout", RETRACTING, ids=lambda layout: f"decode-tp{layout[0]}-pp{layout[1]}")
def test_retraction_under_memory_pressure_keeps_tokens(
    prefills: tuple[Cluster, dict[Layout, Server]], model: Model, layout: Layout
) -> None:
    """Eight requests at once in a pool for about three."""
    servers, sources = prefills
    tp, pp = layout
    source = sources[1, 1].endpoint
    small = ["--tp", str(tp), "--pp", str(pp), "--kv-tokens", "480", "--growth-tokens", "8", "--no-prefix-cache"]
    decode = servers.add("decode", model.directory, "--prefill", source, *small)
    decode.wait_ready(peers=1)
    prompt = model.prompts[-1]
    alone = decode.generate(prompt, 40)
    assert alone[:NEW_TOKENS] == model.expected[-1]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: decode.generate(prompt, 40), range(8))) == [alone] * 8
    assert decode.count("retractions") > 0
    decode.check_clean()
    assert decode.stop() == 0


def test_pipeline_stages_overlap(tmp_path: Path) -> None:
    """With eight requests, the busy time of the two stages adds up to more than the elapsed time.

    The model is large enough for steps to take longer than the overhead between them. One attempt may fail on a busy
    machine; stages that run one after the other would never pass.
    """
    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6, hidden_size=512, intermediate_size=2048)
    prompt = list(range(20))
    with cluster(tmp_path) as servers:
        _, decode = servers.pair(model, [], ["--pp", "2", "--no-prefix-cache"])
        alone = decode.generate(prompt, 60)

        def busy() -> dict[str, float]:
            return {name: value for name, value in decode.settled_info()["gauges"].items() if "busy_seconds" in name}

        for _ in range(3):
            before, started = busy(), time.monotonic()
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(lambda _: decode.generate(prompt, 60), range(8))) == [alone] * 8
            wall = time.monotonic() - started
            shares = {name: (value - before[name]) / wall for name, value in busy().items()}
            print(f"share of time that each stage was busy: {shares}, bubble {1 - sum(shares.values()) / 2:.2f}")
            assert len(shares) == 2
            if sum(shares.values()) > 1.1:
                return
    raise AssertionError("the stages did not run at the same time")


@pytest.mark.parametrize(("number", "lost"), [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1)], ids=str)
def test_server_exits_within_seconds_when_a_rank_is_lost(
    prefills: tuple[Cluster, dict[Layout, Server]], model: Model, number: signal.Signals, lost: int
) -> None:
    servers, sources = prefills
    decode = servers.add("decode", model.directory, "--prefill", sources[1, 1].endpoint, *flags((1, 2), 16))
    decode.wait_ready(peers=1)
    ranks = rank_pids(decode)
    assert len(ranks) == 2
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(decode.post, model.prompts[1], 3000, 60) for _ in range(4)]
        wait_until(lambda: decode.info()["states"]["running"] == 4, 30, "four running")
        os.kill(ranks[lost], number)
        lost_at = time.monotonic()
        for answer in answers:
            response = answer.result(20)
            assert response.status_code == 503
            assert f"rank {lost}" in response.text
        assert time.monotonic() - lost_at < 8
    assert decode.process is not None
    assert decode.process.wait(10) == 1
    wait_until(lambda: all(map(gone, ranks)), 5, "the ranks are gone")


def test_server_on_two_machines_serves_and_stops(model: Model, tmp_path: Path) -> None:
    """Two sets of processes simulate two machines. The second one has only a rank, and ends with the first. It is not
    forked, because no other test starts a rank from the command line.
    """
    with cluster(tmp_path) as servers:
        key = ["--cluster-key", "a secret of the whole cluster"]
        prefill = servers.add("prefill", model.directory, *key)
        both = [*key, *flags((2, 1), 16), "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
        decode = servers.add("decode", model.directory, "--prefill", prefill.endpoint, *both)
        second = servers.add("decode", model.directory, *both, "--node-rank", "1", forked=False)
        decode.wait_ready(peers=1)
        assert len(rank_pids(decode)) == 1
        assert decode.generate(model.prompts[2], NEW_TOKENS) == model.expected[2]
        assert decode.stop() == 0
        assert second.process is not None
        assert second.process.wait(15) == 0
