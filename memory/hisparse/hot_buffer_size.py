"""How many rows the hot buffer of a request has (HiSparse). No torch: asked before anything is loaded."""

from ...configs.errors import StartupError
from ...configs.schema import DecodeConfig


def resolve_hot_rows(config: DecodeConfig, top_k: int) -> int:
    """Rows of a hot buffer: as configured, or half more than a step reads; raises StartupError when they cannot work.

    With more rows fewer requests fit, and with fewer rows more are fetched: 1.5 measured best (benchmarks/RESULTS.md).
    """
    page_size = config.page_size
    hot_rows = config.hot_rows if config.hot_rows is not None else -(-3 * top_k // (2 * page_size)) * page_size
    least = -(-top_k // page_size) * page_size
    if hot_rows < top_k:
        raise StartupError(
            f"hot_rows = {hot_rows} is below the model's index_topk = {top_k}: a step reads that many rows; give "
            f"{least} or a larger multiple of page_size = {page_size}"
        )
    if hot_rows % page_size:
        below = hot_rows // page_size * page_size
        fitting = f"{below} or {below + page_size}" if below >= least else f"{below + page_size}"
        raise StartupError(f"hot_rows = {hot_rows} must be a multiple of page_size = {page_size}: give {fitting}")
    return hot_rows
