"""Runs what the scheduler decided. One rank in this process for now; the interface is what ranks will stand behind."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from ..configs.sampling import SamplingParams, TokenLogprob
from ..memory.kv_pool import KvPool
from ..models.batch import SequenceSlice
from ..models.copies import read_back, upload
from ..models.logprobs import Logprobs, entries, score
from ..models.penalties import Choice
from ..models.runner import ModelRunner
from ..models.sampling import Sampler

_SCORED_ELEMENTS = 1 << 24
"""Logits of prompt tokens that exist at once: a chunk of 8192 tokens would have gigabytes of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose after a row's last one. Its seed is `sampling.seed`.

    `output_index` is the token's index in its output, `output_ids` the output so far; penalties count it.
    """

    sampling: SamplingParams
    output_index: int
    output_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence of a step: run `token_ids` from position `start`, then choose a token for each draw.

    A chunk that does not end its prompt has no draws; several draws are samples of one prompt. `prompt_ids` is the
    whole prompt, for the repetition penalty and the prompt's log-probabilities. `top_logprobs` alternatives come with
    each log-probability; None wants none for the draws. With `prompt_logprobs_from`, the results of a prompt's chunks
    have, joined, one entry per prompt token from that position on: if the position is p, the first chunk to ask
    starts at or before p - 1, whose logits they are (0 for the first token, which has no log-probability).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: tuple[Draw, ...] = ()
    prompt_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    prompt_logprobs_from: int | None = None

    @property
    def scored(self) -> range:
        """Positions of the prompt whose log-probabilities this step's logits give."""
        if self.prompt_logprobs_from is None:
            return range(0)
        end = self.start + len(self.token_ids)
        return range(max(self.prompt_logprobs_from, self.start + 1), min(end + 1, len(self.prompt_ids)))


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a row's step gave: a token per draw (with a log-probability where asked for), and its prompt's part."""

    drawn: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


class Executor:
    """The model and its KV pool on one device. Called from the engine thread only.

    None of `eos_token_ids`, nor of a request's stop tokens, is drawn before its `min_new_tokens`.
    """

    def __init__(self, runner: ModelRunner, pool: KvPool, eos_token_ids: Iterable[int]) -> None:
        self._runner = runner
        self._sampler = Sampler([token for token in eos_token_ids if token < runner.config.vocab_size])
        self.pool = pool

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow]) -> list[StepResult]:
        """One forward pass and one result per row. KV of all rows is written when `kv_ready()` says so."""
        slices = [SequenceSlice(row.token_ids, row.start, row.pages) for row in rows]
        prompt_parts: list[tuple[int, Logprobs]] = []
        if any(row.scored for row in rows):
            hidden = self._runner.forward_hidden(self.pool, slices)
            prompt_parts = self._score_prompts(rows, hidden)
            ends = list(itertools.accumulate(len(row.token_ids) for row in rows))
            last = upload([end - 1 for end in ends], torch.long, hidden.device)
            logits = self._runner.logits(hidden.index_select(0, last))
        else:
            logits = self._runner.forward(self.pool, slices)
        drawn, scores = self._draw_and_read(rows, logits, [part for _, part in prompt_parts])
        prompts: list[list[TokenLogprob]] = [_first_token(row) for row in rows]
        for (index, _), part in zip(prompt_parts, scores, strict=True):
            prompts[index] += entries(part, [rows[index].top_logprobs or 0] * len(part[0]))
        tokens = iter(drawn)
        return [
            StepResult(tuple(itertools.islice(tokens, len(row.draws))), tuple(prompt))
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def kv_ready(self) -> Callable[[], None] | None:
        """A wait for the KV of the last step, for another thread to call; None where it is complete already."""
        if self.pool.data.device.type != "cuda":
            return None
        device = self.pool.data.device
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(device))

        def wait() -> None:
            torch.cuda.set_device(
                device
            )  # a thread of its own starts on device 0, and Mooncake copies on the current one
            event.synchronize()

        return wait

    def _score_prompts(self, rows: Sequence[StepRow], hidden: torch.Tensor) -> list[tuple[int, Logprobs]]:
        """Log-probabilities of the prompt tokens that rows want, in blocks: (index of the row, a block), in order."""
        parts: list[tuple[int, Logprobs]] = []
        block = max(1, _SCORED_ELEMENTS // self._runner.config.vocab_size)
        offset = 0
        for index, row in enumerate(rows):
            for start in range(row.scored.start, row.scored.stop, block):
                targets = row.prompt_ids[start : min(start + block, row.scored.stop)]
                first = offset + start - 1 - row.start
                logits = self._runner.logits(hidden[first : first + len(targets)])
                tokens = upload(targets, torch.long, hidden.device)
                parts.append((index, score(logits, tokens, row.top_logprobs or 0)))
            offset += len(row.token_ids)
        return parts

    def _draw_and_read(
        self, rows: Sequence[StepRow], logits: torch.Tensor, prompt_parts: Sequence[Logprobs]
    ) -> tuple[list[TokenLogprob], list[list[list[float]]]]:
        """Choose all tokens and read them back together with the prompts' parts: the one wait of a step."""
        choices = [
            Choice(index, draw.sampling, draw.output_index, row.prompt_ids, draw.output_ids)
            for index, row in enumerate(rows)
            for draw in row.draws
        ]
        tops = {at: top for at, choice in enumerate(choices) if (top := rows[choice.row].top_logprobs) is not None}
        pending = [tensor for part in prompt_parts for tensor in part.tensors]
        if not choices and not pending:
            return [], []
        values = read_back(pending + self._draw(logits, choices, tops, exhaustive=False))
        scores = [values[at : at + 4] for at in range(0, len(pending), 4)]
        if not choices:
            return [], scores
        stands, tokens, *logprobs = values[len(pending) :]
        if not stands[0]:
            _, tokens, *logprobs = read_back(self._draw(logits, choices, tops, exhaustive=True))
        drawn = [TokenLogprob(int(token), None) for token in tokens]
        if tops:
            for at, entry in zip(tops, entries(logprobs, list(tops.values())), strict=True):
                drawn[at] = entry
        return drawn, scores

    def _draw(
        self, logits: torch.Tensor, choices: Sequence[Choice], tops: dict[int, int], *, exhaustive: bool
    ) -> list[torch.Tensor]:
        """Whether the tokens stand, the tokens, and the log-probabilities of those in `tops`."""
        if not choices:
            return []
        tokens, stands = self._sampler.sample(logits, choices, exhaustive=exhaustive)
        if not tops:
            return [stands, tokens]
        where = upload([(choices[at].row, at) for at in tops], torch.long, logits.device)
        scored = score(logits.index_select(0, where[:, 0]), tokens.index_select(0, where[:, 1]), max(tops.values()))
        return [stands, tokens, *scored.tensors]


def _first_token(row: StepRow) -> list[TokenLogprob]:
    """The entry of the prompt's first token, where it is this step's to give."""
    if row.prompt_logprobs_from == 0 and row.start == 0:
        return [TokenLogprob(row.prompt_ids[0], None)]
    return []
