"""Which part of a model a rank holds. Integer arithmetic, no torch.

Ranks of a server are numbered stage by stage: rank = stage * tp_size + tp_rank. Stages hold consecutive layers; within
a stage, tensor-parallel ranks divide heads, the feed-forward width and the vocabulary. With data-parallel attention,
the ranks of a stage divide only MLPs and experts: each has all of attention and of the vocabulary, and its own
requests.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...common.arithmetic import ceil_div
from ...common.errors import StartupError


class RankTokens(NamedTuple):
    """The tokens of one rank in a step of data-parallel ranks. In the last layer, only `outputs` of its rows remain."""

    tokens: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's position among `tp_size` x `stages` ranks."""

    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0
    stages: int = 1
    whole_experts: bool = False  # it holds some whole experts, instead of a part of every expert's width
    dp_attention: bool = False  # it computes attention of its own requests, with all heads

    @staticmethod
    def of(rank: int, *, tp_size: int, stages: int, whole_experts: bool = False, dp_attention: bool = False) -> "Shard":
        return Shard(rank % tp_size, tp_size, rank // tp_size, stages, whole_experts, dp_attention)

    @property
    def attention(self) -> "Shard":
        """Its part of attention and of the vocabulary: whole layers with data-parallel attention."""
        return replace(self, tp_rank=0, tp_size=1) if self.dp_attention else self

    @property
    def rank(self) -> int:
        return self.stage * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.stages

    @property
    def first(self) -> bool:
        """Whether its stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether its stage computes logits."""
        return self.stage == self.stages - 1

    @property
    def samples(self) -> bool:
        """Whether it has logits and samples: one rank, or with data-parallel attention all of the last stage."""
        return self.last and self.attention.tp_rank == 0

    def layers(self, num_layers: int) -> range:
        """Global layers of its stage. The last stage, which also computes logits, gets no more than the others."""
        if self.stages > num_layers:
            raise StartupError(
                f"pp = {self.stages} stages for a model of {num_layers} layers: give at most {num_layers}"
            )
        size, longer = divmod(num_layers, self.stages)
        start = self.stage * size + min(self.stage, longer)
        return range(start, start + size + (self.stage < longer))

    def part(self, name: str, size: int) -> range:
        """Its part of `size` items; raises StartupError with `name` if they cannot be divided evenly."""
        if size % self.tp_size:
            raise StartupError(f"tp = {self.tp_size} does not divide {name} = {size}")
        share = size // self.tp_size
        return range(self.tp_rank * share, (self.tp_rank + 1) * share)

    def vocabulary(self, size: int) -> range:
        """Its token ids. If `size` cannot be divided evenly, the last ranks have fewer than `vocabulary_rows`."""
        rows = self.vocabulary_rows(size)
        return range(min(self.tp_rank * rows, size), min((self.tp_rank + 1) * rows, size))

    def vocabulary_rows(self, size: int) -> int:
        """Rows of a matrix that holds a part of the vocabulary: the same on every rank, padded with unused rows."""
        return ceil_div(size, self.tp_size)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Its KV heads; with more ranks than heads, adjacent ranks hold the same one."""
        if num_kv_heads >= self.tp_size:
            return self.part("num_key_value_heads", num_kv_heads)
        if self.tp_size % num_kv_heads:
            raise StartupError(f"tp = {self.tp_size} is not a multiple of num_key_value_heads = {num_kv_heads}")
        head = self.tp_rank // (self.tp_size // num_kv_heads)
        return range(head, head + 1)


WHOLE = Shard()
"""The shard of a server with a single rank."""
