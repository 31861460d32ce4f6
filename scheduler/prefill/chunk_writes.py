"""What the ranks are told of a chunk of a transfer: its tokens, and the pages of both sides that hold them."""

from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant, pages_holding
from ...transfer.data.chunks import ChunkWrite
from .request import PageSpace, PrefillRequest


def chunk_order(
    transfer: PrefillRequest, grant: PageGrant[KvPage], start: int, end: int, *, page_size: int, theirs: PageSpace
) -> ChunkWrite | None:
    """The order to write what decode lacks of tokens [start, end); None when it has them all.

    `grant` has our pages of the transfer, of `page_size` tokens each; `theirs` are decode's.
    """
    destination = transfer.destination
    prefix = destination.prefix_tokens
    start = max(start, prefix)  # [0, prefix) is on decode already
    if start >= end:
        return None
    pages, _ = pages_holding(grant.pages, page_size, start, end)
    if destination.granularity == "token":
        indices = transfer.indices[start - prefix : end - prefix]
    else:  # the prefix ends on a border of decode's pages
        indices, _ = pages_holding(transfer.indices, theirs.page_size, start - prefix, end - prefix)
    return ChunkWrite(
        instance=transfer.instance,
        key=transfer.key,
        token_start=start,
        token_end=end,
        source_pages=pages,
        indices=indices,
        granularity=destination.granularity,
        verify=destination.verify,
    )
