"""The torch reference of KV writes: scatters new keys and values into the pages of a paged KV cache.

    key_pages[page_ids[t], h, offsets[t], :]   = key[t, h, :]      for every token t and head h
    value_pages[page_ids[t], h, offsets[t], :] = value[t, h, :]

Shapes: key_pages, value_pages [pages, heads, page_size, head_dim], any strides (a layer of a page-major pool);
key, value [tokens, heads, head_dim]; page_ids, offsets [tokens] int64. Two tokens never share a slot.

Pages have the dtype of key and value, or float8_e4m3fn: then rows are rounded to the nearest value, and values out of
range saturate at 448.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def can_store(pages: torch.dtype, rows: torch.dtype) -> bool:
    """Whether pages of one dtype can hold rows computed in another."""
    return pages in (rows, FP8)


def round_to_pages(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`rows` converted to the `dtype` of pages."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype == FP8 and rows.dtype != FP8 else rows


def kv_write_reference(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    key, value = round_to_pages(key, key_pages.dtype), round_to_pages(value, value_pages.dtype)
    if len(page_ids) == 1 and page_ids.device.type == "cpu":  # takes a third of the time of tensor indexing
        page, offset = int(page_ids), int(offsets)
        key_pages[page, :, offset] = key[0]
        value_pages[page, :, offset] = value[0]
        return
    key_pages[page_ids, :, offsets] = key
    value_pages[page_ids, :, offsets] = value
