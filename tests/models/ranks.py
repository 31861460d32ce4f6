"""Real rank processes for tests of sharded models: started once, reconnected for every topology.

One of them is forked from the fork server of tests/cluster, which has imported torch, and forks the others.
"""

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdserve.kernels.backends import half_products
from pdserve.models.config.sharding import RankTokens, Shard
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.parallel import Parallel
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.ports import free_port
from tests.small_products import multiply_without_onednn

if TYPE_CHECKING:
    from tests.models.pretend_ranks import GraphedResult

NUM_PAGES, PAGE_SIZE = 16, 4
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Pass:
    """One forward pass. `token_ids`, if any, reach only tp_rank 0 of a stage, which broadcasts them. With `scored`,
    the logits are those of these rows of `forward_hidden`. `ranks` are the numbers of tokens of all ranks, with
    data-parallel attention; a rank without slices only computes experts.
    """

    slices: tuple[SequenceSlice, ...]
    token_ids: tuple[int, ...] | None = None
    scored: tuple[int, ...] | None = None
    ranks: tuple[RankTokens, ...] | None = None


@dataclass(frozen=True)
class RankResult:
    """The result of a rank's passes; logits are numpy arrays, which need no shared memory to return."""

    logits: list[Any]
    kv_token_bytes: int
    cache_bytes: int


class RankProcesses:
    """Processes that become ranks on command."""

    def __init__(self, count: int) -> None:
        from tests.cluster.servers import fork_server  # rank processes do without its imports

        self.store_port = 0
        """The rendezvous of the last process group."""
        pipes = [multiprocessing.Pipe() for _ in range(count)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        channel, their_channel = socket.socketpair()
        with channel, their_channel:
            files = (their_channel.fileno(), 1, 2)
            self._process = fork_server().run("tests.models.ranks:main", [str(count)], dict(os.environ), files)
            socket.send_fds(channel, [b"pipes"], [theirs.fileno() for _, theirs in pipes])
        for _, theirs in pipes:
            theirs.close()

    @contextmanager
    def connected(
        self, tp_size: int, stages: int, *, whole_experts: bool = False, dp_attention: bool = False
    ) -> Iterator[list[Shard]]:
        """Let the first tp_size * stages processes form a server."""
        shards = [
            Shard.of(rank, tp_size=tp_size, stages=stages, whole_experts=whole_experts, dp_attention=dp_attention)
            for rank in range(tp_size * stages)
        ]
        self.store_port = port = free_port()
        for shard in shards:
            self.send(shard, "connect", shard, port)
        for shard in shards:
            self.receive(shard)
        try:
            yield shards
        finally:
            for shard in shards:
                self.send(shard, "close")
            for shard in shards:
                self.receive(shard)

    def run(self, shards: Sequence[Shard], directory: Path, passes: Sequence[Pass]) -> list[RankResult]:
        return self.run_each(shards, directory, [passes] * len(shards))

    def run_each(
        self, shards: Sequence[Shard], directory: Path, passes_of: Sequence[Sequence[Pass]]
    ) -> list[RankResult]:
        """Run passes of their own on every rank (data-parallel attention)."""
        for shard, passes in zip(shards, passes_of, strict=True):
            self.send(shard, "run", directory, passes)
        return [self.receive(shard) for shard in shards]

    def run_in_graphs(
        self, tp_size: int, stages: int, directory: Path, dtype: torch.dtype, passes: Sequence[Pass]
    ) -> "list[GraphedResult]":
        """Run the passes on ranks with a simulated GPU (pretend_ranks.py), which form a server for this call only."""
        shards = [Shard.of(rank, tp_size=tp_size, stages=stages) for rank in range(tp_size * stages)]
        port = free_port()
        for shard in shards:
            self.send(shard, "run_in_graphs", shard, port, TIMEOUT_S / 2, directory, dtype, passes)
        return [self.receive(shard, 4 * TIMEOUT_S) for shard in shards]

    def minimum(self, shards: Sequence[Shard], values: Sequence[int]) -> list[int]:
        """The agreed minimum on each rank, with these values as input."""
        for shard, value in zip(shards, values, strict=True):
            self.send(shard, "agree", value)
        return [self.receive(shard) for shard in shards]

    def products(self, shards: Sequence[Shard], directory: Path, fast: Sequence[bool]) -> list[torch.dtype]:
        """The dtype in which each rank multiplies a bfloat16 model; `fast` says whether 16-bit products are fast."""
        for shard, each in zip(shards, fast, strict=True):
            self.send(shard, "products", directory, each)
        return [self.receive(shard) for shard in shards]

    def send(self, shard: Shard, *command: Any) -> None:
        self._pipes[shard.rank].send(command)

    def receive(self, shard: Shard, timeout_s: float = TIMEOUT_S) -> Any:
        """The response to the rank's oldest command; raises the exception of the rank."""
        pipe = self._pipes[shard.rank]
        assert pipe.poll(timeout_s), f"rank {shard.rank} does not answer"
        answer = pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        assert self._process.wait(TIMEOUT_S) == 0, "a rank did not end"


def run_passes(runner: ModelRunner, passes: Sequence[Pass]) -> RankResult:
    """Run the passes over a new cache full of large stale values."""
    cache = runner.make_cache(NUM_PAGES, PAGE_SIZE)
    for pool in cache.pools:
        pool.data.fill_(50.0)
    logits = [_run_pass(runner, cache, each) for each in passes]
    return RankResult(
        logits=[None if rows is None else rows.cpu().numpy() for rows in logits],
        kv_token_bytes=runner.kv_token_bytes,
        cache_bytes=cache.size_bytes,
    )


def _run_pass(runner: ModelRunner, cache: Any, each: Pass) -> torch.Tensor | None:
    shard = runner.parallel.shard
    if not each.slices:
        assert each.ranks is not None
        runner.assist(each.ranks)
        return None
    if each.scored is not None:
        hidden = runner.forward_hidden(cache, each.slices, ranks=each.ranks)
        assert (hidden is not None) == shard.last
        return None if hidden is None else runner.logits(hidden[list(each.scored)])
    token_ids = None
    if each.token_ids is not None:
        token_ids = torch.tensor(each.token_ids if shard.tp_rank == 0 else [0] * len(each.slices))
        runner.parallel.broadcast_tokens(token_ids)
    return runner.forward(cache, each.slices, token_ids, ranks=each.ranks)


def _products(parallel: Parallel, directory: Path, fast: bool) -> torch.dtype:
    import pytest  # here, because ranks do without it otherwise

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(half_products, "_CHOICES", {})
        patches.setattr(half_products, "_is_fast", lambda _: fast)
        source, dtype = locate_model(str(directory)), torch.bfloat16
        ModelRunner.load(source, device=torch.device("cpu"), dtype=dtype, parallel=parallel)
        return half_products.computes_in(dtype)


def main(arguments: list[str]) -> int:
    """The first rank process: forks the others before any of them uses torch. Its stdin is a socket, which brings the
    pipes of all of them.
    """
    with socket.socket(fileno=os.dup(0)) as channel:
        _, descriptors, *_ = socket.recv_fds(channel, 16, int(arguments[0]))
    first, *others = (Connection(descriptor) for descriptor in descriptors)
    pids = []
    for pipe in others:
        if (pid := os.fork()) == 0:
            _serve(pipe)
            os._exit(0)
        pids.append(pid)
    _serve(first)
    return max((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), key=abs, default=0)


def _serve(pipe: Connection) -> None:
    """A rank process: executes commands until its pipe closes."""
    torch.set_num_threads(1)
    multiply_without_onednn()
    warnings.simplefilter("error")
    parallel: Parallel | None = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            match command:
                case "connect":
                    shard, port = arguments
                    parallel = Parallel.connect(
                        shard,
                        store_host="127.0.0.1",
                        store_port=port,
                        backend="gloo",
                        device=torch.device("cpu"),
                        timeout_s=TIMEOUT_S / 2,
                    )
                    pipe.send(None)
                case "run":
                    assert parallel is not None
                    directory, passes = arguments
                    runner = ModelRunner.load(
                        locate_model(str(directory)),
                        device=torch.device("cpu"),
                        dtype=torch.float32,
                        parallel=parallel,
                        keep_blocks=True,
                    )
                    pipe.send(run_passes(runner, passes))
                case "run_in_graphs":
                    from tests.models.pretend_ranks import run_in_graphs

                    pipe.send(run_in_graphs(*arguments))
                case "agree":
                    assert parallel is not None
                    pipe.send(parallel.agree_minimum(*arguments))
                case "products":
                    assert parallel is not None
                    pipe.send(_products(parallel, *arguments))
                case "close":
                    assert parallel is not None
                    parallel.close()
                    pipe.send(None)
        except Exception as error:  # reported to the test, which fails with it
            pipe.send(RuntimeError("".join(traceback.format_exception(error))))
