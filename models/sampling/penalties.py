"""Changes logits before sampling: penalties, biases, and no EOS before `min_new_tokens`.

In this order: the repetition penalty over prompt and output (positive logits are divided, negative ones multiplied),
presence and frequency over the output (subtracted), the bias (added), the mask. Rows that use none of them cost
nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...common.sampling import SamplingParams
from ..layers.host_copies import upload

_REMEMBERED_PROMPTS = 512
_REMEMBERED_BIASES = 256


_Bias = tuple[tuple[int, float], ...]
_Ids = npt.NDArray[np.int64]
_Amounts = npt.NDArray[np.float64]


class Choice(msgspec.Struct, frozen=True):
    """One token to sample: its row of the logits, its parameters, and the tokens before it.

    `output_index` is the token's index in its output; `prompt_ids` and `output_ids` are used by penalties only. With
    `may_end`, EOS is not excluded before `min_new_tokens`: a grammar decides where the output ends.
    """

    row: int
    params: SamplingParams
    output_index: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    may_end: bool = False


class Penalties:
    """Applies the parameters of choices to their logits. `eos_token_ids` are the model's."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._prompts = _PromptMasks(_REMEMBERED_PROMPTS)
        self._biases: OrderedDict[int, tuple[_Bias, _Ids, _Amounts]] = OrderedDict()
        """As arrays, by the identity of the bias, which is held: 256 rows of 1,000 tokens took 60 ms of each step."""

    def apply(self, logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
        """The logits [B, V] to sample from, one row per choice: a copy, or `logits` itself if nothing changes.

        Does not wait for a CUDA device: constants are assigned as tensors, because a Python scalar would wait.
        """
        repeating = [row for row, choice in enumerate(choices) if choice.params.repetition_penalty != 1.0]
        subtracted, added, masked = _Edits(), _Edits(), _Edits()
        for row, choice in enumerate(choices):
            params = choice.params
            if choice.output_ids and (params.presence_penalty or params.frequency_penalty):
                counts = Counter(choice.output_ids)
                amounts = params.presence_penalty + params.frequency_penalty * np.fromiter(counts.values(), np.float64)
                subtracted.add(row, counts, amounts)
            if params.logit_bias:
                added.add(row, *self._bias(params.logit_bias))
            if choice.output_index < params.min_new_tokens and not choice.may_end:
                masked.add(row, {*self._eos_token_ids, *params.stop_token_ids})
        if not (repeating or subtracted or added or masked):
            return logits
        logits = logits.clone()
        if repeating:
            self._penalize_repetition(logits, choices, repeating)
        if subtracted:
            logits[subtracted.index(logits)] -= subtracted.amounts(logits)
        if added:
            logits[added.index(logits)] += added.amounts(logits)
        if masked:
            logits.index_put_(masked.index(logits), logits.new_full((), -torch.inf))
        return logits

    def _bias(self, bias: _Bias) -> tuple[_Ids, _Amounts]:
        found = self._biases.get(id(bias))
        if found is None:
            amounts = dict(bias)
            found = bias, np.fromiter(amounts, np.int64), np.fromiter(amounts.values(), np.float64)
            self._biases[id(bias)] = found
            if len(self._biases) > _REMEMBERED_BIASES:
                self._biases.popitem(last=False)
        return found[1:]

    def _penalize_repetition(self, logits: torch.Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> None:
        """In place, over a mask of the vocabulary: the tokens of a prompt can be many, and are uploaded once."""
        seen = torch.stack([self._prompts.mask(choices[row].prompt_ids, logits) for row in rows])
        outputs = _Edits()
        for at, row in enumerate(rows):
            outputs.add(at, choices[row].output_ids)
        seen.index_put_(outputs.index(seen), seen.new_ones(()))
        index = upload(rows, torch.long, logits.device)
        penalties = [choices[row].params.repetition_penalty for row in rows]
        factor = upload(penalties, logits.dtype, logits.device).unsqueeze(1)
        before = logits.index_select(0, index)
        after = torch.where(before > 0, before / factor, before * factor)
        logits.index_copy_(0, index, after.where(seen, before))


class _Edits:
    """(row, token) positions in a batch, each with an amount if the change has one."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._amounts: list[npt.NDArray[np.float64]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, tokens: Iterable[int], amounts: npt.NDArray[np.float64] | None = None) -> None:
        ids = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)
        self._tokens.append(ids)
        self._rows.append(np.full(len(ids), row))
        if amounts is not None:
            self._amounts.append(amounts)

    def index(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions as an index of `batch` [B, V]; raises ValueError for a token outside the vocabulary."""
        tokens = np.concatenate(self._tokens)
        _check_tokens(tokens, batch.shape[-1])
        rows, columns = upload(np.stack([np.concatenate(self._rows), tokens]), torch.long, batch.device)
        return rows, columns

    def amounts(self, batch: torch.Tensor) -> torch.Tensor:
        return upload(np.concatenate(self._amounts), batch.dtype, batch.device)


class _PromptMasks:
    """Which tokens of the vocabulary occur in a prompt, on the device.

    A prompt is used again for every token of its output, as the same tuple: the last `capacity` masks are cached.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[int, tuple[Sequence[int], torch.Tensor]] = OrderedDict()

    def mask(self, prompt_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """[V] bool, with V and the device of `logits`."""
        known = self._known.get(id(prompt_ids))
        if known is not None:
            self._known.move_to_end(id(prompt_ids))
            return known[1]
        tokens = np.fromiter(prompt_ids, np.int64)
        _check_tokens(tokens, logits.shape[-1])
        mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        mask.index_fill_(0, upload(tokens, torch.long, logits.device), True)
        if isinstance(prompt_ids, tuple):  # a list may change. The cache keeps the tuple alive, so its id stays unique.
            self._known[id(prompt_ids)] = (prompt_ids, mask)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return mask


def _check_tokens(tokens: npt.NDArray[np.int64], vocab_size: int) -> None:
    """Checked on the host: on CUDA, an index out of range fails a device assertion, which ends the process."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"token ids [{tokens.min()}, {tokens.max()}] are outside the vocabulary of {vocab_size}")
