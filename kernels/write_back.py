"""Write the rows of new tokens from the hot buffer to host memory, all layers in one go.

    host[p // P, layer, p % P] = hot[layer, hot_rows[layer, t]]      with p = host_rows[t], P = page size

for every layer and every batch row t below live_rows. Shapes: hot [layers, rows, row_bytes] uint8; host
[pages, layers, P, row_bytes] uint8, pinned where hot is on a GPU; rows contiguous, other strides free; hot_rows
[layers, batch] int32 (stride 0 where layers share it); host_rows [batch] int32, distinct. `SlotTables.newest_rows` and
`host_rows` of slot_tables.py name the rows.

It runs on torch's current stream; which one is the caller's business. A row must have been read before the next step's
copy_misses on its layer, which may evict it, and be in host memory before the copy_misses of the step after.
"""

import torch

from .nvrtc import CudaImpl, device_address, load_kernel, use_cuda

THREADS = 256


def write_back_reference(
    hot: torch.Tensor, hot_rows: torch.Tensor, host: torch.Tensor, host_rows: torch.Tensor, live: int
) -> None:
    targets = host_rows[:live].to(host.device).long()
    pages, offsets = targets // host.shape[2], targets % host.shape[2]
    for layer in range(len(hot)):
        host[pages, layer, offsets] = hot[layer, hot_rows[layer, :live].long()].to(host.device)


def write_back(
    hot: torch.Tensor,
    hot_rows: torch.Tensor,
    host: torch.Tensor,
    host_rows: torch.Tensor,
    *,
    live_rows: torch.Tensor | None = None,
    impl: CudaImpl = "auto",
) -> None:
    """Copy in place; see the module docstring. Whoever reads `host` outside the stream synchronises with it first."""
    layers, batch = hot_rows.shape
    if hot.dtype != torch.uint8 or host.dtype != torch.uint8 or hot.shape[2] != host.shape[3]:
        raise ValueError(
            f"hot {list(hot.shape)} {hot.dtype} and host {list(host.shape)} {host.dtype} are not rows of equal bytes"
        )
    if hot.shape[0] != layers or host.shape[1] != layers or host_rows.shape != (batch,):
        raise ValueError(
            f"hot {list(hot.shape)}, host {list(host.shape)} and host_rows {list(host_rows.shape)} do not fit hot_rows "
            f"{list(hot_rows.shape)}"
        )
    indices = [hot_rows, host_rows, *([] if live_rows is None else [live_rows])]
    if any(tensor.dtype != torch.int32 or tensor.device != hot.device for tensor in indices):
        raise ValueError(f"indices must be int32 on {hot.device}, got {[(t.dtype, t.device) for t in indices]}")
    if hot.stride(2) != 1 or host.stride(3) != 1 or hot_rows.stride(1) != 1 or host_rows.stride(0) != 1:
        raise ValueError("rows and the last dimension of all indices must be contiguous")
    if not use_cuda(impl, hot.device):
        live = batch if live_rows is None else min(batch, int(live_rows))
        write_back_reference(hot, hot_rows, host, host_rows, live)
        return
    items = layers * batch
    if items == 0:
        return
    constants = (("PAGE_SIZE", host.shape[2]), ("ROW_BYTES", hot.shape[2]), ("THREADS", THREADS))
    load_kernel("write_back.cu", "write_back", hot.device, constants).launch(
        device_address(hot),
        hot.stride(0),
        hot.stride(1),
        hot_rows.data_ptr(),
        hot_rows.stride(0),
        device_address(host),
        host.stride(0),
        host.stride(1),
        host.stride(2),
        host_rows.data_ptr(),
        0 if live_rows is None else live_rows.data_ptr(),
        batch,
        layers,
        blocks=-(-items * 32 // THREADS),
        threads=THREADS,
    )
