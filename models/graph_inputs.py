"""What the steps of a CUDA graph read and what changes between them, brought to the device by one copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ..kernels.attention_plan import IntArray
from .batch import SequenceSlice


class InputBuffer:
    """Named sections of one int32 buffer: on the device, and pinned on the host to be filled."""

    def __init__(self, sections: Mapping[str, int], device: torch.device) -> None:
        """`sections` have so many elements each. Of the last one only as much as is in use is copied."""
        names, sizes = list(sections), list(sections.values())
        self._staged = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=True)
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._last_start = sum(sizes[:-1])
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        staged = torch.split_with_sizes(self._staged, sizes)
        self.host: dict[str, IntArray] = {name: part.numpy() for name, part in zip(names, staged, strict=True)}
        self.device = dict(zip(names, torch.split_with_sizes(self._on_device, sizes), strict=True))

    def wait(self) -> None:
        """Until `host` may be changed: the copy of the step before may still be reading it."""
        self._copied.synchronize()

    def upload(self, last_used: int) -> None:
        """Copy `host` to `device` in stream order, of the last section `last_used` elements."""
        length = self._last_start + last_used
        self._on_device[:length].copy_(self._staged[:length], non_blocking=True)
        self._copied.record()


TOKEN_SECTIONS = ("token_ids", "positions", "page_ids", "offsets")
"""One element per row of the batch; every architecture has them."""


@dataclass(frozen=True)
class DecodeRows:
    """A batch of single tokens as arrays: where each is in its sequence, and the pages of all up to there."""

    token_ids: list[int]
    starts: IntArray
    used: list[int]  # pages of each sequence
    ends: IntArray  # of each sequence's pages in `pages`
    pages: IntArray  # all of them, end to end

    @staticmethod
    def gather(slices: Sequence[SequenceSlice], page_size: int) -> "DecodeRows":
        """Raises ValueError when a sequence lacks pages."""
        live = len(slices)
        starts = np.fromiter((piece.start for piece in slices), dtype=np.int32, count=live)
        used = [-(-piece.end // page_size) for piece in slices]
        pages = np.fromiter(
            chain.from_iterable(piece.pages[:count] for piece, count in zip(slices, used, strict=True)), dtype=np.int32
        )
        if len(pages) != sum(used):
            raise ValueError(f"{live} sequences have {len(pages)} pages of {page_size} tokens and need {sum(used)}")
        ends = np.cumsum(used, dtype=np.int32) if live else np.zeros(0, dtype=np.int32)
        return DecodeRows([piece.token_ids[0] for piece in slices], starts, used, ends, pages)

    def fill_tokens(self, host: Mapping[str, IntArray], size: int, page_size: int) -> None:
        """The sections of TOKEN_SECTIONS, for a batch padded to `size` rows."""
        live = len(self.token_ids)
        host["token_ids"][:live] = self.token_ids
        host["positions"][:live] = self.starts
        host["page_ids"][:live] = self.pages[self.ends - 1]
        host["offsets"][:live] = self.starts % page_size
        for name in TOKEN_SECTIONS:
            host[name][live:size] = 0
