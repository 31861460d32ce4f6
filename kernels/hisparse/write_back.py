"""Writes the rows of new tokens from the hot buffer to host memory, all layers in one launch.

    host[p // S, layer, p % S] = hot[q // S, layer, q % S]      with p = host_rows[t], q = hot_rows[layer, t]

for every layer and every batch row t whose p is not -1 (padding). Shapes: hot and host [pages, layers, S, row_bytes]
uint8, host pinned if hot is on a GPU; rows contiguous, other strides free; hot_rows [layers, batch] int32 (stride 0 if
layers share it); host_rows [batch] int32, distinct except padding. `SlotTables.newest_rows` returns the hot rows.

It runs on torch's current stream, which the caller chooses. A row must be read before the next step's copy_misses of
its layer, which may evict it, and be in host memory before the copy_misses of the step after that.
"""

import torch

from ...common.arithmetic import ceil_div
from ..backends.nvrtc import CudaImpl, device_address, load_kernel, use_cuda
from .slot_tables import HotRows, KvRows

THREADS = 256


def write_back_reference(hot: torch.Tensor, hot_rows: HotRows, host: torch.Tensor, host_rows: KvRows) -> None:
    page_size, real = host.shape[2], host_rows >= 0
    targets = host_rows[real].to(host.device).long()
    for layer, sources in enumerate(hot_rows[:, real].long()):
        rows = hot[sources // page_size, layer, sources % page_size]
        host[targets // page_size, layer, targets % page_size] = rows.to(host.device)


def write_back(
    hot: torch.Tensor,
    hot_rows: HotRows,
    host: torch.Tensor,
    host_rows: KvRows,
    *,
    impl: CudaImpl = "auto",
) -> None:
    """Copy in place; see the module docstring. Readers of `host` outside the stream must synchronise with it first."""
    layers, batch = hot_rows.shape
    if hot.dtype != torch.uint8 or host.dtype != torch.uint8 or hot.shape[1:] != host.shape[1:]:
        raise ValueError(
            f"hot {list(hot.shape)} {hot.dtype} and host {list(host.shape)} {host.dtype} are not pages of equal bytes"
        )
    if host.shape[1] != layers or host_rows.shape != (batch,):
        raise ValueError(
            f"host {list(host.shape)} and host_rows {list(host_rows.shape)} do not fit hot_rows {list(hot_rows.shape)}"
        )
    indices = (hot_rows, host_rows)
    if any(tensor.dtype != torch.int32 or tensor.device != hot.device for tensor in indices):
        raise ValueError(f"indices must be int32 on {hot.device}, got {[(t.dtype, t.device) for t in indices]}")
    if hot.stride(3) != 1 or host.stride(3) != 1 or hot_rows.stride(1) != 1 or host_rows.stride(0) != 1:
        raise ValueError("rows and the last dimension of all indices must be contiguous")
    if not use_cuda(impl, hot.device):
        write_back_reference(hot, hot_rows, host, host_rows)
        return
    items = layers * batch
    if items == 0:
        return
    constants = (("PAGE_SIZE", host.shape[2]), ("ROW_BYTES", hot.shape[3]), ("THREADS", THREADS))
    load_kernel("hisparse/write_back.cu", "write_back", hot.device, constants).launch(
        device_address(hot),
        *hot.stride()[:3],
        hot_rows.data_ptr(),
        hot_rows.stride(0),
        device_address(host),
        *host.stride()[:3],
        host_rows.data_ptr(),
        batch,
        layers,
        blocks=ceil_div(items * 32, THREADS),
        threads=THREADS,
    )
