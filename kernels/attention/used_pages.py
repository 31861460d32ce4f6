"""The pages that the sequences of a batch use; every kind of attention plans with them."""

from collections.abc import Sequence

from ...common.arithmetic import ceil_div


def used_pages(
    query_lens: Sequence[int], kv_lens: Sequence[int], pages: Sequence[Sequence[int]], page_size: int
) -> list[tuple[int, ...]]:
    """The pages that hold the kv_lens[i] keys of each sequence; the last query_lens[i] tokens are queries. `pages[i]`
    may be longer than needed. Raises ValueError if the lengths do not fit.
    """
    used = [tuple(ids[: ceil_div(kv_len, page_size)]) for ids, kv_len in zip(pages, kv_lens, strict=True)]
    for query_len, kv_len, ids in zip(query_lens, kv_lens, used, strict=True):
        if not 1 <= query_len <= kv_len <= len(ids) * page_size:
            raise ValueError(
                f"a sequence of {query_len} queries and {kv_len} keys does not fit {len(ids)} pages of {page_size}"
            )
    return used
