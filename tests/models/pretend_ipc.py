"""CUDA IPC memory between processes that each have a simulated GPU (pretend_gpu.py): launches are checked, and the
references of the collectives run on tensors that travel over the group which exchanges the handles.
"""

import itertools
from typing import Any

import pytest
import torch

from pdserve.kernels.collectives import ipc_collectives
from pdserve.kernels.collectives.ipc_collectives import IpcCollectives
from pdserve.kernels.collectives.ipc_memory import Exchange
from tests.kernels import cuda_sources
from tests.kernels.collectives.references import all_reduce_reference, gather_reference
from tests.models.pretend_gpu import PretendGpu

_FIRST_ADDRESS, _DISTANCE = 1 << 40, 1 << 30


class PretendIpcMemory:
    """Invalid addresses, which are only passed to launches."""

    def __init__(self, size_bytes: int, rank: int, _device: torch.device, exchange: Exchange) -> None:
        assert size_bytes <= _DISTANCE
        ranks = exchange(bytes([rank]))
        assert ranks == [bytes([at]) for at in range(len(ranks))], "exchange returns messages in the order of the ranks"
        self.exchange = exchange
        self.addresses = [_FIRST_ADDRESS + at * _DISTANCE for at in range(len(ranks))]

    def close(self) -> None:
        self.addresses = []


def patch_collectives(patches: pytest.MonkeyPatch, gpu: PretendGpu) -> list[str]:
    """Returns the launches of this process, in order."""
    launched: list[str] = []
    sum_tensor, copy_shares = IpcCollectives._sum, IpcCollectives._copy

    def launch_sum(self: IpcCollectives, tensor: torch.Tensor) -> None:
        sum_tensor(self, tensor)
        gpu.launch(reference_sum, self, tensor)

    def launch_copy(self: IpcCollectives, share: torch.Tensor, out: torch.Tensor | None, sources: range) -> None:
        copy_shares(self, share, out, sources)
        gpu.launch(reference_copy, self, share, out, sources)

    def reference_sum(self: Any, tensor: torch.Tensor) -> None:
        launched.append("sum")
        tensor.copy_(all_reduce_reference(_exchanged(self, tensor)))

    def reference_copy(self: Any, share: torch.Tensor, out: torch.Tensor | None, sources: range) -> None:
        launched.append("copy")
        shares = _exchanged(self, share)
        if out is not None:
            out.copy_(gather_reference(list(itertools.islice(shares, sources.start, sources.stop))))

    patches.setattr(ipc_collectives, "IpcMemory", PretendIpcMemory)
    patches.setattr(ipc_collectives, "load_kernel", cuda_sources.load_kernel)
    patches.setattr(ipc_collectives, "device_address", torch.Tensor.data_ptr)
    patches.setattr(IpcCollectives, "_sum", launch_sum)
    patches.setattr(IpcCollectives, "_copy", launch_copy)
    return launched


def _exchanged(ipc: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    messages = ipc._memory.exchange(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [torch.frombuffer(bytearray(each), dtype=tensor.dtype).view(tensor.shape) for each in messages]
