"""The commands of prefill to its ranks for a long prompt: every page id and every token id is sent once."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from pdserve.common.sampling import Grammar, LogprobParams, SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.engine.step_rows import prefill_row
from pdserve.scheduler.messages.ranks import ChunkReport, GrammarReady, RankCommand, RunStep, SentStep
from pdserve.scheduler.messages.step import StepResult, StepRow
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.scheduler.ranks.page_tables import SentTables
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import Abort, InstanceId, KvDestination, TransferKey

DECODE = InstanceId("decode")
PAGE, THEIR_PAGE, CHUNK = 16, 12, 64
GREEDY = SamplingParams()


class Prefill:
    """A prefill scheduler whose steps and writes succeed at once, and its commands."""

    def __init__(
        self, *, pages: int = 512, chunk_size: int = CHUNK, their_page: int = THEIR_PAGE, window: int | None = None
    ) -> None:
        limits = PrefillLimits(
            page_size=PAGE,
            chunk_size=chunk_size,
            max_queued_requests=8,
            context_length=1 << 20,
            vocab_size=1 << 20,
            steps_in_flight=1,
            window=window,
        )
        self.scheduler = PrefillScheduler(limits, PageAllocator[KvPage](pages))
        self.scheduler.peer_up(DECODE, PageSpace(1 << 20, their_page))
        self.rows: list[StepRow] = []

    def serve(self, prompt: Sequence[int], indices: list[int], wanted: KvDestination) -> list[ChunkWrite]:
        """The chunks of this transfer, in order."""
        chunks: list[ChunkWrite] = []
        self.scheduler.receive(PrefillRequest(DECODE, wanted, prompt, indices, 0.0), 0.0)
        while self.scheduler.requests:
            for chunk in self.step():
                chunks.append(chunk)
                self.sent(chunk)
        return chunks

    def step(self) -> list[ChunkWrite]:
        """Compute the next step; returns the writes that begin."""
        self.scheduler.advance(0.0)
        step = self.scheduler.next_step(0.0)
        if step is not None:
            rows = [prefill_row(chunk) for chunk in step.chunks]
            self.rows += rows
            results = [StepResult((TokenLogprob(1, None),) * len(row.draws), ()) for row in rows]
            self.scheduler.step_done(step.command_id, results, 0.0)
        return [effect for effect in self.scheduler.take_effects() if isinstance(effect, ChunkWrite)]

    def sent(self, chunk: ChunkWrite) -> None:
        ended = ChunkWritten(DECODE, chunk.key, chunk.token_start, chunk.token_end, ok=True)
        self.scheduler.handle(ChunkReport(0, ended), 0.0)


def destination(number: int, **options: object) -> KvDestination:
    wanted = KvDestination(TransferKey(number, 1), f"r{number}", GREEDY, timeout_s=60.0)
    return msgspec.structs.replace(wanted, **options)


def test_pages_behind_the_window_stay_until_their_chunk_is_sent() -> None:
    """All layers have a window of 32 tokens. The second chunk is sent before the first one."""
    prefill, pages = Prefill(window=32), 192 // PAGE
    prefill.scheduler.receive(PrefillRequest(DECODE, destination(1), range(192), list(range(16)), 0.0), 0.0)
    (first,) = prefill.step()
    (second,) = prefill.step()
    assert prefill.scheduler.allocator.held == pages, "the third chunk sees the last two pages of the second one only"
    prefill.sent(second)
    assert prefill.scheduler.allocator.held == pages
    prefill.sent(first)
    assert prefill.scheduler.allocator.held == pages - (128 - 32) // PAGE


@pytest.mark.parametrize("prefix", [0, 3 * THEIR_PAGE])
def test_chunk_write_has_only_the_pages_of_its_tokens(prefix: int) -> None:
    """With different page sizes on both sides, so that chunks rarely end on page boundaries of both."""
    prompt = list(range(300))
    indices = list(range(1000, 1025))[prefix // THEIR_PAGE :]
    prefill = Prefill()
    chunks = prefill.serve(prompt, indices, destination(1, prefix_tokens=prefix))
    ours = prefill.rows[0].pages  # a step has the whole list
    assert [chunk.token_start for chunk in chunks] == [max(prefix, start) for start in range(0, 300, CHUNK)]
    for chunk in chunks:
        tokens = range(chunk.token_start, chunk.token_end)
        assert chunk.source_pages == list(dict.fromkeys(ours[token // PAGE] for token in tokens))
        assert chunk.indices == list(dict.fromkeys(1000 + token // THEIR_PAGE for token in tokens))


def test_chunk_write_with_token_granularity_has_one_index_per_token() -> None:
    rows = list(range(5000, 5260))
    chunks = Prefill().serve(list(range(300)), rows, destination(1, granularity="token", prefix_tokens=40))
    assert [index for chunk in chunks for index in chunk.indices] == rows
    assert all(len(chunk.indices) == chunk.token_end - chunk.token_start for chunk in chunks)


def test_commands_for_a_prompt_of_128k_tokens_have_linear_size() -> None:
    tokens = 1 << 17
    prompt = [token % 1000 for token in range(tokens)]
    prefill = Prefill(pages=tokens // PAGE, chunk_size=2048, their_page=PAGE)
    chunks = prefill.serve(prompt, list(range(tokens // PAGE)), destination(1))
    assert len(chunks) == 64
    encode = msgspec.msgpack.Encoder().encode
    writes_bytes = sum(len(encode(chunk)) for chunk in chunks)
    assert writes_bytes < 2 * 3 * (tokens // PAGE) + 64 * 100, "two page ids of up to 3 bytes each, and the framing"
    tables = SentTables()
    steps_bytes = sum(
        len(encode(tables.pack(RunStep(command_id, (row,))))) for command_id, row in enumerate(prefill.rows)
    )
    assert steps_bytes < 3 * tokens + 3 * (tokens // PAGE) + 64 * 100, "the same for token ids and pages"


def test_cached_prefix_is_sent_in_chunks_for_verification_and_otherwise_at_once() -> None:
    """A checksum copies its whole chunk to host memory."""
    prefill, prompt = Prefill(), list(range(300))
    indices = list(range(25))
    prefill.serve(prompt, indices, destination(1))
    plain = prefill.serve(prompt, indices, destination(2))
    verified = prefill.serve(prompt, indices, destination(3, verify=True))
    assert [(chunk.token_start, chunk.token_end) for chunk in plain] == [(0, 288), (288, 300)]
    assert [(chunk.token_start, chunk.token_end) for chunk in verified] == [
        (0, 64),
        (64, 128),
        (128, 192),
        (192, 256),
        (256, 288),
        (288, 300),
    ]


def test_ranks_get_the_whole_prompt_only_when_it_is_needed() -> None:
    """With the last chunk for penalties, with all chunks for log-probabilities, otherwise not at all."""
    prompt, indices = list(range(300)), list(range(25))

    def sent(wanted: KvDestination) -> list[StepRow]:
        prefill = Prefill()
        prefill.serve(prompt, indices, wanted)
        assert [token for row in prefill.rows for token in row.token_ids] == prompt
        return prefill.rows

    assert [row.prompt_ids for row in sent(destination(1))] == [()] * 5
    penalty = SamplingParams(repetition_penalty=1.5)
    *others, last = sent(destination(1, sampling=penalty, output_tokens=10))
    assert [row.prompt_ids for row in others] == [()] * 4
    (draw,) = last.draws
    assert (last.prompt_ids, draw.output_ids, draw.output_index) == (prompt[:290], tuple(prompt[290:]), 10)
    plain = sent(destination(1, output_tokens=10))[-1]
    assert (plain.draws[0].output_ids, plain.draws[0].output_index) == ((), 10)
    scored = sent(destination(1, logprobs=LogprobParams(start=0)))
    assert all(row.prompt_ids == prompt and row.prompt_logprobs_from == 0 for row in scored)


@pytest.mark.parametrize("granularity", ["page", "token"])
@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(repetition_penalty=1.5)},
        {"sampling": SamplingParams(presence_penalty=0.5), "output_tokens": 10},
        {"sampling": SamplingParams(grammar=Grammar("regex", "a*"))},
        {"logprobs": LogprobParams(start=0)},
    ],
)
def test_commands_for_a_prompt_from_a_peer_can_be_sent_to_rank_processes(
    options: dict[str, object], granularity: str
) -> None:
    """A message brings its integers as arrays, which msgpack does not know."""
    prefill = Prefill()
    wanted = destination(1, granularity=granularity, prefix_tokens=THEIR_PAGE, **options)
    prompt, indices = np.arange(100, dtype=np.int32), np.arange(100 - THEIR_PAGE, dtype=np.int32)
    prefill.scheduler.handle(MessageReceived(DECODE, wanted, (prompt, indices)), 0.0)
    if wanted.sampling.grammar is not None:
        prefill.scheduler.handle(GrammarReady(0, 0), 0.0)
    writes = [*prefill.step(), *prefill.step()]
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(RankCommand).decode
    received = decode(encode(SentTables().pack(RunStep(1, tuple(prefill.rows)))))
    assert isinstance(received, SentStep)
    assert [token for sent in received.rows for token in sent.row.token_ids] == [*range(100)]
    before = 100 - wanted.output_tokens
    if wanted.sampling.grammar is None:
        assert received.rows[-1].row.prompt_ids == [*range(before)]
    assert all(draw.output_ids == [*range(before, 100)] for draw in received.rows[-1].row.draws)
    assert [decode(encode(write)) for write in writes] == writes


def test_waiting_prompt_is_matched_with_the_cache_only_after_memory_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lookup of a long prompt takes milliseconds."""
    prefill = Prefill(pages=20)
    scheduler = prefill.scheduler
    looked_up: list[int] = []
    match = scheduler.cache.match

    def spy(tokens: Sequence[int], most_tokens: int, needed_from: int | None) -> list[KvPage]:
        looked_up.append(len(tokens))
        return match(tokens, most_tokens, needed_from)

    monkeypatch.setattr(scheduler.cache, "match", spy)
    for number, tokens in enumerate((200, 201, 202)):
        scheduler.receive(PrefillRequest(DECODE, destination(number), [number] * tokens, list(range(25)), 0.0), 0.0)
    for _ in range(50):
        scheduler.advance(0.0)
    assert looked_up == [200, 201, 202]
    scheduler.handle(MessageReceived(DECODE, Abort(TransferKey(1, 1), "waiting"), ()), 0.0)
    for _ in range(50):
        scheduler.advance(0.0)
    assert looked_up == [200, 201, 202]
    scheduler.handle(MessageReceived(DECODE, Abort(TransferKey(0, 1), "computing"), ()), 0.0)
    scheduler.advance(0.0)
    assert looked_up == [200, 201, 202, 202]
    assert [request.grant is not None for request in scheduler.requests.values()] == [True]


def test_scored_prompt_uses_the_cache_after_a_retraction() -> None:
    """Log-probabilities of a prompt are computed once; after a retraction only its KV is missing."""
    prefill, prompt = Prefill(), list(range(300))
    scored = LogprobParams(start=0)
    prefill.serve(prompt[:280], list(range(25)), destination(1, logprobs=scored))
    prefill.rows.clear()
    prefill.serve(prompt, list(range(25)), destination(2, logprobs=scored, output_tokens=20))
    assert [row.start for row in prefill.rows] == [280 // PAGE * PAGE]
