"""The ChunkWrite of a chunk: its tokens, and the pages on both sides that hold them."""

from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant, pages_holding
from ...transfer.data.chunks import ChunkWrite
from .request import PageSpace, PrefillRequest


def chunk_write(
    request: PrefillRequest,
    grant: PageGrant[KvPage],
    start: int,
    end: int,
    *,
    page_size: int,
    theirs: PageSpace,
    after: int | None = None,
) -> ChunkWrite | None:
    """Write those of tokens [start, end) that decode does not have; None if it has all of them.

    `grant` has our pages of the request, of `page_size` tokens each; `theirs` is the page space of decode; `after`
    is the step that computes the tokens, if it has not yet.
    """
    destination = request.destination
    prefix = destination.prefix_tokens
    start = max(start, prefix)  # decode has [0, prefix)
    if start >= end:
        return None
    pages, _ = pages_holding(grant.pages, page_size, start, end)

    def part(indices: list[int]) -> list[int]:
        if destination.granularity == "token":
            return indices[start - prefix : end - prefix]
        # the prefix ends on a page boundary of decode
        return pages_holding(indices, theirs.page_size, start - prefix, end - prefix)[0]

    to_hot_pool = theirs.hot_pages > 0 and request.path == "gpu"
    return ChunkWrite(
        instance=request.instance,
        key=request.key,
        token_start=start,
        token_end=end,
        source_pages=pages,
        indices=part(request.indices),
        granularity=destination.granularity,
        verify=destination.verify,
        after=after,
        hot_indices=part(request.hot_indices) if to_hot_pool else [],
    )
