"""Hashes the pages of prompts. The leader uses the hashes to find the prefill server that has cached their prefix."""

import asyncio
from collections.abc import Sequence

import msgspec

from ...memory.page_hashes import ROOT, pack_short_hashes, page_hashes
from ...scheduler.messages.frontend import Submit

SLICE_TOKENS = 2048
"""Tokens that are hashed before other tasks of the event loop run: about a quarter of a millisecond."""


async def hash_prompts(messages: Sequence[Submit], page_sizes: Sequence[int]) -> Sequence[Submit]:
    """Returns the messages with the hashes of their pages, for each of `page_sizes`. A message that names its prefill
    server gets none. Other tasks of the event loop run between the slices of a long prompt: 32,768 tokens take
    milliseconds.
    """
    if not page_sizes:
        return messages
    return [message if message.endpoint is not None else await _hashed(message, page_sizes) for message in messages]


async def _hashed(message: Submit, page_sizes: Sequence[int]) -> Submit:
    found: dict[int, bytes] = {}
    for size in page_sizes:
        hashes: list[bytes] = []
        step = max(1, SLICE_TOKENS // size) * size
        for start in range(0, len(message.prompt_ids), step):
            if start:
                await asyncio.sleep(0)
            hashes += page_hashes(message.prompt_ids[start : start + step], size, hashes[-1] if hashes else ROOT)
        found[size] = pack_short_hashes(hashes)
    return msgspec.structs.replace(message, page_hashes=found)
