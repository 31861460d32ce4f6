"""Hashing the prompts of a call on the event loop."""

import asyncio

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.page_hashes import page_hashes, short_hash, unpack_hashes
from pdserve.scheduler.messages.frontend import Submit
from pdserve.server.engine.prompt_hashes import SLICE_TOKENS, hash_prompts


def submit(tokens: int, endpoint: str | None = None) -> Submit:
    return Submit("r", tuple(range(tokens)), SamplingParams(), endpoint)


@pytest.mark.parametrize("tokens", [0, 15, 16, SLICE_TOKENS, SLICE_TOKENS + 17, 3 * SLICE_TOKENS + 1000])
def test_slices_have_the_hashes_of_the_whole_prompt(tokens: int) -> None:
    sizes = (16, 48, 2 * SLICE_TOKENS)
    (hashed,) = asyncio.run(hash_prompts([submit(tokens)], sizes))
    expected = {size: tuple(map(short_hash, page_hashes(range(tokens), size))) for size in sizes}
    assert {size: unpack_hashes(packed) for size, packed in hashed.page_hashes.items()} == expected


def test_prompt_with_a_given_prefill_server_is_not_hashed() -> None:
    messages = [submit(64, "host:1"), submit(64)]
    pinned, other = asyncio.run(hash_prompts(messages, (16,)))
    assert not pinned.page_hashes
    assert len(other.page_hashes[16]) == 4 * 8
    assert asyncio.run(hash_prompts(messages, ())) is messages


def test_event_loop_runs_between_the_slices_of_a_long_prompt() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.ensure_future(count())
        await hash_prompts([submit(8 * SLICE_TOKENS)], (16,))
        counting.cancel()

    asyncio.run(main())
    assert turns == 7
