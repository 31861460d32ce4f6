"""The work of one forward pass: slices of sequences, as the scheduler passes them and as tensors of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...common.arithmetic import ceil_div
from ...kernels.attention.paged_attention import AttentionPlan, plan_attention
from ...kernels.backends.uploads import upload_array
from ..config.sharding import RankTokens
from .host_copies import upload


class SequenceSlice(msgspec.Struct, frozen=True):
    """Run `token_ids` at positions [start, start + len) of a sequence whose KV is in `pages`.

    KV of [0, start) is in the pool already; the pass writes that of the slice. A whole prompt, a chunk and a single
    decode step differ only in length. With a HiSparse cache the request has a `hot_slot`.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    hot_slot: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ForwardBatch:
    """Concatenated slices: T tokens of B slices."""

    slices: tuple[SequenceSlice, ...]  # empty in a CUDA graph, where they differ between replays
    token_ids: torch.Tensor  # [T] int64 or int32
    positions: torch.Tensor  # [T] int64
    page_ids: torch.Tensor  # [T] int64, the page for each token's KV ...
    offsets: torch.Tensor  # [T] int64, ... and its row in that page
    last_rows: torch.Tensor | None  # [B] int64, the last token of each slice; None if every slice is one token
    attention: AttentionPlan | None  # of layers with full attention
    windowed: AttentionPlan | None = None  # of layers with a sliding window
    hot_slots: torch.Tensor | None = None  # [T] int32, the hot slot of each token's sequence (HiSparse)
    all_resident: bool = False  # in a CUDA graph: all its sequences are fully resident
    ranks: Sequence[RankTokens] | None = None  # tokens of all ranks of the stage (data-parallel attention)

    @staticmethod
    def build(
        slices: Sequence[SequenceSlice],
        *,
        page_size: int,
        num_kv_heads: int | None,
        device: torch.device,
        num_heads: int | None = None,
        window: int | None = None,
        token_ids: torch.Tensor | None = None,
        ranks: Sequence[RankTokens] | None = None,
    ) -> "ForwardBatch":
        """Make the tensors; raises ValueError for an empty slice, or for pages that end before the slice does.

        `token_ids` on the device, one per slice, replace those of slices of a single token. Dense attention is
        planned for `num_kv_heads` and `num_heads` (of queries); None for models without dense attention. `window` is
        the sliding window of the model, if it has one.
        """
        for piece in slices:
            if not piece.token_ids or piece.start < 0 or piece.end > len(piece.pages) * page_size:
                raise ValueError(
                    f"tokens [{piece.start}, {piece.end}) do not fit {len(piece.pages)} pages of {page_size} tokens"
                )
        ends = list(accumulate(len(piece.token_ids) for piece in slices))
        total = ends[-1]
        if token_ids is not None and len(token_ids) != len(slices):
            raise ValueError(f"{len(token_ids)} token ids for {len(slices)} slices: one each is needed")
        index = upload_array(token_rows(slices, page_size), device)
        if token_ids is not None and total != len(slices):
            single = [at for at, piece in enumerate(slices) if len(piece.token_ids) == 1]
            where = upload([single, [ends[at] - 1 for at in single]], torch.long, device)
            index[0, where[1]] = token_ids[where[0]]
            token_ids = None
        hot_slots = [slot for piece in slices if (slot := piece.hot_slot) is not None for _ in piece.token_ids]
        assert len(hot_slots) in (0, total), "all sequences of a batch have a hot slot, or none has"
        attention = windowed = None
        if num_kv_heads is not None:
            kv_lens = [piece.end for piece in slices]
            plan = partial(
                plan_attention,
                [len(piece.token_ids) for piece in slices],
                kv_lens,
                [piece.pages for piece in slices],
                page_size=page_size,
                num_kv_heads=num_kv_heads,
                num_heads=num_heads,
                device=device,
            )
            attention = plan()
            if window is not None:  # a window that holds all tokens has no effect
                windowed = attention if max(kv_lens) <= window else plan(window=window)
        last_rows = upload([end - 1 for end in ends], torch.long, device) if total != len(slices) else None
        return ForwardBatch(
            slices=tuple(slices),
            token_ids=index[0] if token_ids is None else token_ids,
            positions=index[1],
            page_ids=index[2],
            offsets=index[1] % page_size,
            last_rows=last_rows,
            attention=attention,
            windowed=windowed,
            hot_slots=upload(hot_slots, torch.int32, device) if hot_slots else None,
            ranks=ranks,
        )


def token_rows(slices: Sequence[SequenceSlice], page_size: int) -> npt.NDArray[np.int64]:
    """[3, T]: the id, the position and the page of every token. It reads only the entries of these tokens in the page
    lists, which have many thousands of other pages in a step of long sequences.
    """
    if all(len(piece.token_ids) == 1 for piece in slices):
        own_ids = [piece.token_ids[0] for piece in slices]
        starts = [piece.start for piece in slices]
        return np.array([own_ids, starts, [piece.pages[piece.start // page_size] for piece in slices]], dtype=np.int64)
    parts = []
    for piece in slices:
        positions = np.arange(piece.start, piece.end, dtype=np.int64)
        first, end = piece.start // page_size, ceil_div(piece.end, page_size)
        pages = np.asarray(piece.pages[first:end], dtype=np.int64)
        parts.append(np.stack((piece.token_ids, positions, pages[positions // page_size - first])))
    return np.concatenate(parts, axis=1)
