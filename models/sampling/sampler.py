"""Samples tokens from logits.

A token is a function of its row's logits, its parameters and (seed, output index): independent of the rest of the
batch, of the sampling server and of the device. For this, the one random number per token comes from a counter-based
generator on the host; candidates are ranked by logit, ties by id; and probabilities are integers, whose sums do not
depend on the order of additions. On CUDA the host does not wait.

The order is: the mask of the grammar, penalties, bias and no EOS (penalties.py), temperature, top_k, top_p of the rest,
min_p.
"""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...common.sampling import SamplingParams
from ...kernels.sampling.keep_top_p import keep_top_p
from ...kernels.sampling.mask_logits import mask_logits
from ...kernels.sampling.top_tokens import top_tokens
from ..layers.host_copies import upload
from .penalties import Choice, Penalties

_SCALE = 1 << 40
"""The weight of a row's most likely token. A weight of 1 is far below 2^-32, the resolution of random numbers, and the
sum of 8 million of the largest does not overflow."""

_BLOCK_ELEMENTS = 1 << 24
"""Logits converted to 64-bit weights, or masked, at once: limits the temporary memory of large batches."""

_MASK_32 = (1 << 32) - 1

_MANY_ROWS = 16
"""From this many rows on, numpy arrays are faster: for a step of 128 rows 0.1 ms instead of 0.7."""


class _Kind(enum.Enum):
    """How a row is sampled. Only its own parameters decide: the rest of the batch must not change the result."""

    GREEDY = enum.auto()
    TOP_K = enum.auto()  # inverse CDF over the ranked candidates
    TOP_P = enum.auto()  # over the vocabulary, with some weights set to 0
    VOCABULARY = enum.auto()

    @staticmethod
    def of(params: SamplingParams) -> "_Kind":
        if params.greedy:
            return _Kind.GREEDY
        if params.top_k is not None:
            return _Kind.TOP_K
        return _Kind.TOP_P if params.top_p < 1.0 else _Kind.VOCABULARY


class TokenMasks:
    """Which tokens the rows of the logits allow: `masks`, on the device of the logits, has one mask
    (models/grammar/masks.py) for each of `rows`. The other rows allow all tokens.
    """

    def __init__(self, rows: Sequence[int], masks: torch.Tensor) -> None:
        self._slots = {row: slot for slot, row in enumerate(rows)}
        self._masks = masks

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The logits [B, V] of these rows, in which tokens that are not allowed are -inf: a copy, or `logits` itself if
        all of them allow all tokens.
        """
        slots = [self._slots.get(row, -1) for row in rows]
        if max(slots) < 0:
            return logits
        return mask_logits(logits, upload(slots, torch.int32, logits.device), self._masks)


class Sampler:
    """Samples tokens. Before a request's `min_new_tokens`, none of `eos_token_ids` can be sampled."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._penalties = Penalties(eos_token_ids)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, choices: Sequence[Choice], allowed: TokenMasks | None = None
    ) -> torch.Tensor:
        """One token per choice from logits [B, V] (float32), of the tokens `allowed`."""
        groups: dict[_Kind, list[int]] = {}
        for index, choice in enumerate(choices):
            groups.setdefault(_Kind.of(choice.params), []).append(index)
        order: list[int] = []
        tokens: list[torch.Tensor] = []
        for kind, members in groups.items():
            copies = kind is not _Kind.GREEDY or allowed is not None
            size = max(1, _BLOCK_ELEMENTS // logits.shape[-1]) if copies else len(members)
            for start in range(0, len(members), size):
                part = members[start : start + size]
                chosen = [choices[index] for index in part]
                rows = _rows(logits, chosen)
                if allowed is not None:
                    rows = allowed.apply(rows, [choice.row for choice in chosen])
                rows = self._penalties.apply(rows, chosen)
                if kind is _Kind.GREEDY:
                    tokens.append(rows.argmax(dim=-1))
                else:
                    draw = _draw_from_top_k if kind is _Kind.TOP_K else _draw_from_vocabulary
                    tokens.append(draw(rows, _Knobs(chosen, logits.device)))
                order += part
        if len(tokens) == 1:
            return tokens[0]
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(tokens).index_select(0, upload(places, torch.long, logits.device))


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one output position: 32 bits of Philox, keyed by seed and position."""
    words = philox((position & _MASK_32, position >> 32 & _MASK_32, 0, 0), (seed & _MASK_32, seed >> 32 & _MASK_32))
    return words[0] / (1 << 32)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), the generator of cuRAND.

    In plain integers it takes 4 us; numpy's, which must be constructed for every key, takes 12.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ low, right & _MASK_32, (left >> 32) ^ d ^ high, left & _MASK_32
        low, high = (low + 0x9E3779B9) & _MASK_32, (high + 0xBB67AE85) & _MASK_32
    return a, b, c, d


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` of each row."""
    if len(seeds) < _MANY_ROWS:
        return np.array([uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)])
    mask, shift = np.uint64(_MASK_32), np.uint64(32)
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    a, b, c, d = counter & mask, counter >> shift, np.zeros_like(counter), np.zeros_like(counter)
    low, high = key & mask, key >> shift
    for _ in range(10):  # as in `philox`
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (right >> shift) ^ b ^ low, right & mask, (left >> shift) ^ d ^ high, left & mask
        low, high = (low + np.uint64(0x9E3779B9)) & mask, (high + np.uint64(0xBB67AE85)) & mask
    return a / float(1 << 32)


class _Knobs:
    """The parameters of some choices and their random numbers, as columns [B, 1] on the device."""

    def __init__(self, choices: Sequence[Choice], device: torch.device) -> None:
        params = [choice.params for choice in choices]
        self.any_top_p = any(row.top_p < 1.0 for row in params)
        self.any_min_p = any(row.min_p > 0.0 for row in params)
        self.largest_top_k = max(row.top_k or 0 for row in params)
        drawn = uniforms([row.seed for row in params], [choice.output_index for choice in choices])
        table = np.column_stack([[(row.temperature, row.top_k or 0, row.top_p, row.min_p) for row in params], drawn])
        columns = upload(table, torch.float64, device).unsqueeze(2).unbind(dim=1)
        self.temperature, self.top_k, self.top_p, self.min_p, self.uniform = columns


def _rows(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    rows = [choice.row for choice in choices]
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, upload(rows, torch.long, logits.device))


def _draw_from_vocabulary(logits: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), knobs)
    if knobs.any_top_p:
        keep_top_p(logits, weights, _needed(weights.sum(dim=-1, keepdim=True), knobs))
    return _draw(weights, knobs).squeeze(1)


def _draw_from_top_k(logits: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    ids, ranked = top_tokens(logits, min(knobs.largest_top_k, logits.shape[-1]))
    weights = _weights(ranked, ranked[:, :1], knobs)
    ranks = torch.arange(weights.shape[-1], device=logits.device)
    weights = weights.where(ranks < knobs.top_k, 0)
    if knobs.any_top_p:
        mass = weights.cumsum(dim=-1)
        weights = weights.where(mass - weights < _needed(mass[:, -1:], knobs), 0)
    return ids.gather(1, _draw(weights, knobs)).squeeze(1)


def _needed(mass: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    """The mass, of a row's mass [B, 1], that the tokens kept by top_p must reach: the first ones that do are kept."""
    return (knobs.top_p * mass.double()).ceil().long()


def _weights(logits: torch.Tensor, best: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    """Integers proportional to the probabilities; that of the `best` logit is _SCALE.

    `best` is subtracted first, so that a tiny temperature cannot overflow.
    """
    return logits.double().sub_(best).div_(knobs.temperature).exp_().mul_(_SCALE).round_().long()


def _draw(weights: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    """Indices [B, 1] drawn in proportion to `weights`, after min_p: inverse CDF of one random number per row."""
    if knobs.any_min_p:
        weights = weights.where(weights.double() >= knobs.min_p * _SCALE, 0)
    cdf = weights.cumsum(dim=-1)
    target = (knobs.uniform * cdf[:, -1:].double()).long()
    # The first index whose cdf exceeds the target, so never one of weight 0: random numbers are at most 1 - 2^-32.
    # Only NaN logits lead past the end, where an index would end a CUDA process.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[-1] - 1)
