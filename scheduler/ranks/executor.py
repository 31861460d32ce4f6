"""Runs steps on one rank: its part of the model and, on the rank that has the logits, sampling."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from ...common.sampling import TokenLogprob
from ...memory.kv_pool import KvCache
from ...models.config.sharding import RankTokens
from ...models.grammar.masks import GrammarLimitError
from ...models.layers.batch import SequenceSlice
from ...models.layers.host_copies import ReadBack, upload
from ...models.runner import ModelRunner
from ...models.sampling.logprobs import Logprobs, entries, score
from ...models.sampling.penalties import Choice
from ...models.sampling.sampler import Sampler
from ..messages.step import StepResult, StepRow
from .step_grammars import NO_MASKS, GrammarProblem, StepGrammars, StepMasks

_SCORED_ELEMENTS = 1 << 24
"""Most logits of prompt tokens in memory at once: those of a chunk of 8192 tokens would take gigabytes."""
_UNKNOWN = (0,)
"""Placeholder in a slice for a token that is only on the device."""


Collect = Callable[[], list[StepResult]]


class PendingStep:
    """A step in flight. `finish()` waits until its KV is complete and returns one result per row; None on ranks that do
    not sample.

    With `sample`, the model runs, but tokens are sampled later: their grammars need the tokens of the previous step.
    `sample()` is called after the end of that step, and before the next step starts.
    """

    def __init__(
        self, device: torch.device, collect: Collect | None = None, *, sample: Callable[[], Collect] | None = None
    ) -> None:
        self._device = device
        self._collect = collect
        self._sample = sample
        self._error: Exception | None = None
        self._done: torch.cuda.Event | None = None
        if sample is None:
            self._record()

    def _record(self) -> None:
        if self._device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._done.record(torch.cuda.current_stream(self._device))

    def sample(self) -> None:
        """Sample the tokens, if that has not happened. `finish` raises its error."""
        sample, self._sample = self._sample, None
        if sample is not None:
            try:
                self._collect = sample()
            except Exception as error:
                self._error = error
            self._record()

    @property
    def done(self) -> bool:
        """Whether `finish` returns without waiting. A failed step is done: `finish` raises."""
        try:
            return self._done is None or self._done.query()  # type: ignore[no-untyped-call]  # torch leaves it so
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Wait until the KV of the step is complete. May be called from any thread."""
        if self._done is not None:
            self._done.synchronize()

    def finish(self) -> list[StepResult] | None:
        self.sample()
        self.wait()
        if self._error is not None:
            raise self._error
        return self._collect() if self._collect is not None else None


class Executor:
    """The model and its KV on one rank. Called from one thread; every rank of a server makes the same calls, with
    data-parallel attention for rows of its own.

    Before `min_new_tokens`, neither `eos_token_ids` nor stop tokens of the request are sampled. With `overlap`, rows
    may follow rows of the previous step: its sampled tokens stay on the device, on every rank of the only stage.
    Without `grammars`, no row may have one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KvCache,
        eos_token_ids: Iterable[int],
        *,
        overlap: bool = False,
        grammars: StepGrammars | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = Sampler([token for token in eos_token_ids if token < runner.config.vocab_size])
        self._overlap = overlap
        self._drawn = torch.empty(0, dtype=torch.long, device=cache.device)
        self._sampled: Callable[[], list[int]] = list
        """Returns the tokens in `_drawn`, after they have arrived on the host."""
        self._last: PendingStep | None = None
        self.cache = cache
        self.grammars = grammars
        self.samples_later = cache.device.type == "cuda"
        """Rows with a grammar that follow the previous step are sampled after its end, while the device computes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._runner.held_weight_bytes

    def start(self, rows: Sequence[StepRow], ranks: Sequence[RankTokens] | None = None) -> PendingStep:
        """One forward pass. On CUDA nothing waits for it, and with a grammar on a row that follows the previous step,
        its tokens are sampled later (PendingStep). `ranks` has the tokens of all ranks of the stage, with data-parallel
        attention.
        """
        if self._last is not None:
            self._last.sample()
        rows, following = self._resolve(rows)
        previous, self._sampled = self._sampled, list
        self._drawn = self._drawn[:0]  # until this step has sampled
        self._last = self._start(rows, following, previous, ranks)
        return self._last

    def assist(self, ranks: Sequence[RankTokens]) -> None:
        """Take part in a step of other data-parallel ranks."""
        self._runner.assist(ranks)

    @torch.inference_mode()
    def _start(
        self,
        rows: Sequence[StepRow],
        following: torch.Tensor | None,
        previous: Callable[[], list[int]],
        ranks: Sequence[RankTokens] | None,
    ) -> PendingStep:
        slices = [
            SequenceSlice(row.token_ids if row.follows is None else _UNKNOWN, row.start, row.pages, row.hot_slot)
            for row in rows
        ]
        prompt_parts: list[tuple[int, Logprobs]] = []
        if any(row.scored for row in rows):
            hidden = self._runner.forward_hidden(self.cache, slices, ranks=ranks)
            if hidden is None:
                return PendingStep(self.cache.device)
            prompt_parts = self._score_prompts(rows, hidden)
            ends = list(itertools.accumulate(row.length for row in rows))
            last = upload([end - 1 for end in ends], torch.long, hidden.device)
            logits = self._runner.logits(hidden.index_select(0, last))
        else:
            draws = any(row.draws for row in rows)
            logits = self._runner.forward(self.cache, slices, following, logits=draws, ranks=ranks)
        choices = [
            Choice(index, draw.sampling, draw.output_index, row.prompt_ids, draw.output_ids, row.has_grammar)
            for index, row in enumerate(rows)
            for draw in row.draws
        ]
        if logits is None:
            if self._overlap and choices:
                self._share_drawn(torch.empty(len(choices), dtype=torch.long, device=self.cache.device))
            return PendingStep(self.cache.device)
        if not any(row.has_grammar for row in rows):
            return PendingStep(logits.device, self._draw(rows, choices, logits, prompt_parts, NO_MASKS))

        @torch.inference_mode()
        def sample() -> Collect:
            assert self.grammars is not None, "a grammar for an executor without grammars"
            sampled = previous() if any(row.follows is not None for row in rows) else []
            return self._draw(rows, choices, logits, prompt_parts, self.grammars.masks(rows, sampled))

        if self.samples_later and any(row.has_grammar and row.follows is not None for row in rows):
            return PendingStep(logits.device, sample=sample)
        return PendingStep(logits.device, sample())

    def _resolve(self, rows: Sequence[StepRow]) -> tuple[Sequence[StepRow], torch.Tensor | None]:
        """Replace tokens that are not known on the host. If some rows follow the last step, returns the rows and a
        tensor on the device with the first token of each row (entries of chunks are not used). A step that computes
        log-probabilities of a prompt reads the sampled tokens back first, and needs no tensor.
        """
        sources = [row.follows for row in rows]
        if all(source is None for source in sources):
            return rows, None
        drawn = len(self._drawn)
        if any(source is not None and source >= drawn for source in sources):
            raise RuntimeError("the step that this one follows has failed")
        if any(row.scored for row in rows):
            tokens = self._drawn.tolist()
            return [
                msgspec.structs.replace(row, token_ids=(tokens[row.follows],), follows=None)
                if row.follows is not None
                else row
                for row in rows
            ], None
        if sources == list(range(len(sources))):
            return rows, self._drawn[: len(sources)]
        # known tokens are appended to the sampled ones
        known = [row.token_ids[0] if row.follows is None else 0 for row in rows]
        picks = [drawn + at if source is None else source for at, source in enumerate(sources)]
        both = upload([known, picks], torch.long, self._drawn.device)
        return rows, torch.cat((self._drawn, both[0])).index_select(0, both[1])

    def _share_drawn(self, tokens: torch.Tensor) -> None:
        self._runner.parallel.broadcast_tokens(tokens)
        self._drawn = tokens

    def _score_prompts(self, rows: Sequence[StepRow], hidden: torch.Tensor) -> list[tuple[int, Logprobs]]:
        """Log-probabilities of prompt tokens, in blocks: (index of the row, block), in order."""
        parts: list[tuple[int, Logprobs]] = []
        block = max(1, _SCORED_ELEMENTS // self._runner.config.vocab_size)
        offset = 0
        for index, row in enumerate(rows):
            for start in range(row.scored.start, row.scored.stop, block):
                targets = row.prompt_ids[start : min(start + block, row.scored.stop)]
                first = offset + start - 1 - row.start
                logits = self._runner.logits(hidden[first : first + len(targets)])
                if logits is not None:
                    tokens = upload(targets, torch.long, hidden.device)
                    parts.append((index, score(logits, tokens, row.top_logprobs or 0)))
            offset += row.length
        return parts

    def _draw(
        self,
        rows: Sequence[StepRow],
        choices: Sequence[Choice],
        logits: torch.Tensor,
        prompt_parts: Sequence[tuple[int, Logprobs]],
        masks: StepMasks,
    ) -> Collect:
        """Sample all tokens and start to read them back, together with the log-probabilities of prompts."""
        tensors = [tensor for _, part in prompt_parts for tensor in part.tensors]
        tops = {at: top for at, choice in enumerate(choices) if (top := rows[choice.row].top_logprobs) is not None}
        if choices:
            tokens = self._sampler.sample(logits, choices, masks.allowed)
            if self._overlap:
                self._share_drawn(tokens)
            tensors.append(tokens)
            if tops:
                where = upload([(choices[at].row, at) for at in tops], torch.long, logits.device)
                picked = logits.index_select(0, where[:, 0]), tokens.index_select(0, where[:, 1])
                tensors += score(*picked, max(tops.values())).tensors
        values = ReadBack(tensors)
        scored = [index for index, _ in prompt_parts]
        at = 4 * len(prompt_parts)  # after the four tensors of each part
        self._sampled = lambda: [int(token) for token in values()[at]] if choices else []
        return lambda: _results(rows, len(choices), tops, scored, masks, values())


def _results(
    rows: Sequence[StepRow],
    drawn: int,
    tops: dict[int, int],
    scored: Sequence[int],
    masks: StepMasks,
    values: list[list[float]],
) -> list[StepResult]:
    """The results of all rows. `values` was read back: four lists per block of prompt tokens, the sampled tokens, and
    their log-probabilities.
    """
    prompts: list[list[TokenLogprob]] = [_first_token(row) for row in rows]
    for at, index in enumerate(scored):
        part = values[4 * at : 4 * at + 4]
        prompts[index] += entries(part, [rows[index].top_logprobs or 0] * len(part[0]))
    sampled: list[TokenLogprob] = []
    if drawn:
        tokens, *logprobs = values[4 * len(scored) :]
        sampled = [TokenLogprob(int(token), None) for token in tokens]
        if tops:
            for at, entry in zip(tops, entries(logprobs, list(tops.values())), strict=True):
                sampled[at] = entry
    in_order = iter(sampled)
    return [
        StepResult(
            tuple(itertools.islice(in_order, len(row.draws))),
            tuple(prompt),
            *_described(masks.problems.get(index)),
            slow_mask=index in masks.slow,
        )
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


def _described(problem: GrammarProblem | None) -> tuple[str | None, bool]:
    """The fields of a StepResult about a problem."""
    return (None, False) if problem is None else (str(problem), isinstance(problem, GrammarLimitError))


def _first_token(row: StepRow) -> list[TokenLogprob]:
    """The entry of the prompt's first token, if it belongs to this row."""
    if row.prompt_logprobs_from == 0 and row.start == 0:
        return [TokenLogprob(row.prompt_ids[0], None)]
    return []
