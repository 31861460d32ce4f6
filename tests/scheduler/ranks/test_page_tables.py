"""Page tables of rank processes: the rank gets the same steps, however the page lists change."""

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import RequestSlot
from pdserve.models.config.sharding import RankTokens
from pdserve.scheduler.messages.ranks import AssistStep, RankCommand, RunStep, SentStep
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.page_tables import FORGET_AFTER_STEPS, KnownTables, SentTables, UnknownPagesError

DRAWS = (Draw(SamplingParams(seed=5), 2, []),)
FORGET_AFTER = 4

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)


def step_of(command_id: int, *lists: list[int]) -> RunStep:
    """A step with one row per page list. All its sequences are lists, as after decoding."""
    return RunStep(
        command_id, tuple(StepRow([command_id], index, pages, DRAWS, []) for index, pages in enumerate(lists))
    )


def travel(sent: SentStep) -> SentStep:
    """Encode on the leader's side, decode on the rank's."""
    received = _decoder.decode(_encoder.encode(sent))
    assert isinstance(received, SentStep)
    return received


def grow(rng: random.Random, pages: list[int]) -> list[int]:
    """Append pages, as a grant does."""
    pages.extend(rng.choices(range(1000), k=rng.randint(1, 3)))
    return pages


def change(rng: random.Random, pages: list[int]) -> list[int]:
    pages[rng.randrange(len(pages))] = rng.randrange(1000)
    return pages


def shrink(rng: random.Random, pages: list[int]) -> list[int]:
    del pages[rng.randrange(len(pages)) :]
    return pages


def swap_end(rng: random.Random, pages: list[int]) -> list[int]:
    """Shrink and grow between two steps: the same length, another page."""
    pages[-1] = rng.randrange(1000)
    return grow(rng, pages) if rng.random() < 0.5 else pages


def copy(_rng: random.Random, pages: list[int]) -> list[int]:
    """The same pages in another list, as after a retraction. The id of the old list may be reused."""
    return list(pages)


Change = Callable[[random.Random, list[int]], list[int]]
CHANGES: tuple[Change, ...] = (grow, grow, grow, change, shrink, swap_end, copy)


def page_list_steps(seed: int, steps: int) -> Iterator[list[list[int]]]:
    """The page lists of each step: they appear, change, are reordered, appear twice in a step, disappear and return."""
    rng = random.Random(seed)
    present: list[list[int]] = []
    absent: list[list[int]] = []
    for _ in range(steps):
        present += [rng.choices(range(1000), k=rng.randint(0, 6)) for _ in range(rng.randint(0, 2))]
        for index, pages in enumerate(present):
            if rng.random() < 0.6:
                present[index] = rng.choice(CHANGES)(rng, pages) if pages else grow(rng, pages)
        rng.shuffle(present)
        while len(present) > 5 or (present and rng.random() < 0.2):
            absent.append(present.pop())
        if absent and rng.random() < 0.3:
            present.append(absent.pop(rng.randrange(len(absent))))
        del absent[:-6]
        yield present + ([present[0]] if present and rng.random() < 0.1 else [])


def test_steps_of_data_parallel_ranks_have_the_tokens_of_all() -> None:
    ranks = (RankTokens(5, 1), RankTokens(0, 0))
    step = msgspec.structs.replace(step_of(1, [3, 4]), ranks=ranks)
    assert KnownTables().unpack(travel(SentTables().pack(step))) == step
    assert _decoder.decode(_encoder.encode(AssistStep(ranks))) == AssistStep(ranks)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_unpacked_steps_equal_packed_steps(seed: int, steps: int) -> None:
    sent_tables, known_tables = SentTables(FORGET_AFTER), KnownTables()
    rows_sent: list[int] = []
    in_flight: list[tuple[StepRow, list[int]]] = []
    for command_id, lists in enumerate(page_list_steps(seed, steps)):
        step = step_of(command_id, *lists)
        received = known_tables.unpack(travel(sent_tables.pack(step)))
        assert received == step
        in_flight += [(row, list(row.pages)) for row in received.rows]
        for row, pages in in_flight:  # earlier steps may still be in flight
            assert row.pages[: len(pages)] == pages
        rows_sent.append(len(lists))
        assert len(known_tables._tables) == len(sent_tables._tables) <= sum(rows_sent[-FORGET_AFTER:])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(2, 30), data=st.data())
def test_lost_step_raises_before_wrong_pages_are_used(seed: int, steps: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, steps - 2))
    sent_tables, known_tables = SentTables(FORGET_AFTER), KnownTables()
    for command_id, lists in enumerate(page_list_steps(seed, steps)):
        step = step_of(command_id, *lists)
        sent = travel(sent_tables.pack(step))
        if command_id == lost:
            continue
        try:
            received = known_tables.unpack(sent)
        except UnknownPagesError:
            assert command_id > lost
            return
        assert received == step


def test_every_field_of_a_row_is_preserved() -> None:
    row = StepRow(
        token_ids=[3, 4],
        start=7,
        pages=[1, 2],
        draws=(Draw(SamplingParams(temperature=0.5, logit_bias=((3, -1.0),)), 4, [8, 9]), *DRAWS),
        prompt_ids=[5, 6],
        top_logprobs=3,
        prompt_logprobs_from=2,
        follows=1,
        hot_slot=RequestSlot(6),
    )
    for field in msgspec.structs.fields(StepRow):
        assert getattr(row, field.name) != field.default, f"{field.name} is not tested"
    step = RunStep(11, (row,))
    assert KnownTables().unpack(travel(SentTables().pack(step))) == step


def test_growing_list_is_sent_once_and_stays_the_same_object() -> None:
    """Graphs copy a list to the device only when it has grown (KnownPages), so it has to be the same object."""
    sent_tables, known_tables = SentTables(), KnownTables()
    pages = list(range(100_000, 102_048))
    first = known_tables.unpack(travel(sent_tables.pack(step_of(0, pages)))).rows[0].pages
    for command_id in range(1, 4 * FORGET_AFTER_STEPS):
        pages.append(command_id)
        sent = sent_tables.pack(step_of(command_id, pages))
        assert sent.rows[0].new_pages == [command_id]
        assert len(_encoder.encode(sent)) < 150
        assert known_tables.unpack(travel(sent)).rows[0].pages is first
    assert first == pages


def test_unused_table_is_dropped_after_some_steps_and_sent_again() -> None:
    sent_tables, known_tables = SentTables(FORGET_AFTER), KnownTables()
    command_id = 0

    def pages_sent(*lists: list[int]) -> int:
        nonlocal command_id
        command_id += 1
        sent = sent_tables.pack(step_of(command_id, *lists))
        assert known_tables.unpack(travel(sent)).rows == step_of(command_id, *lists).rows
        return sum(len(row.new_pages) for row in sent.rows)

    pausing, going = [1, 2, 3], [4, 5]
    assert pages_sent(pausing, going) == 5
    assert [pages_sent(going) for _ in range(FORGET_AFTER - 1)] == [0] * (FORGET_AFTER - 1)
    assert pages_sent(pausing) == 0
    assert [pages_sent(going) for _ in range(FORGET_AFTER)] == [0] * FORGET_AFTER
    assert len(sent_tables._tables) == len(known_tables._tables) == 1
    assert pages_sent(pausing) == 3


def test_unknown_page_tables_raise_with_their_numbers() -> None:
    sent_tables = SentTables(1)
    sent_tables.pack(step_of(0, [7], [1, 2, 3]))
    pages = [1, 2, 3]
    sent_tables.pack(step_of(1, pages))
    later = sent_tables.pack(step_of(2, pages))
    with pytest.raises(UnknownPagesError, match="step 2 extends table 2 of 3 pages; this rank has 0 of them"):
        KnownTables().unpack(travel(later))
    with pytest.raises(UnknownPagesError, match="step 3 drops page table 2, which this rank does not have"):
        KnownTables().unpack(travel(sent_tables.pack(step_of(3))))
