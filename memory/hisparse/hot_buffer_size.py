"""Rows of the hot buffer of a request (HiSparse). Imports no torch: the frontend calls it before anything is loaded."""

from ...common.arithmetic import ceil_div, round_up
from ...common.errors import StartupError
from ...configs.schema import DecodeConfig


def resolve_hot_rows(config: DecodeConfig, top_k: int) -> int:
    """Rows of a hot buffer: as configured, or 1.5 x what a step reads. Raises StartupError for an invalid number.

    More rows fit fewer requests, fewer rows cause more fetches: 1.5 measured best (benchmarks/RESULTS.md).
    """
    page_size = config.page_size
    hot_rows = config.hot_rows if config.hot_rows is not None else round_up(ceil_div(3 * top_k, 2), page_size)
    least = round_up(top_k, page_size)
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
