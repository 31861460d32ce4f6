"""Device memory that several processes of one machine share: each allocates some, exports it (CUDA IPC) and maps that
of the others. The processes may be on one GPU, or on several with peer access.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...common.arithmetic import round_up
from ..backends.nvrtc import cuda_packages

_HANDLE_BYTES = 64
_BLOCK_BYTES = 2 << 20
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

Exchange = Callable[[bytes], list[bytes]]
"""Gives a message of this process to all processes of the group, and returns those of all, in the order of their ranks.
Messages of one exchange have the same length.
"""


class IpcError(RuntimeError):
    """The memory of a group of processes cannot be shared."""


class IpcMemory:
    """Zeroed memory of this process, and that of the others, mapped here: `addresses`, by rank."""

    def __init__(self, size_bytes: int, rank: int, device: torch.device, exchange: Exchange) -> None:
        """All processes of the group call it at the same time. Either all of them succeed, or all raise IpcError."""
        self._device = device
        self._own = 0
        self._mapped: list[int] = []
        problem, message = "", bytes(_HANDLE_BYTES)
        try:
            self._driver = self._connect_driver()
            self._own = self._allocate(size_bytes)
            message = self._export()
        except (RuntimeError, ImportError) as error:
            problem = str(error)
        messages = exchange(_machine() + message)
        machines, handles = zip(*((each[:-_HANDLE_BYTES], each[-_HANDLE_BYTES:]) for each in messages), strict=True)
        if not problem and len(set(machines)) > 1:
            problem = "the ranks are on several machines"
        self.addresses: list[int] = []
        if not problem and all(map(any, handles)):
            try:
                self.addresses = [self._own if at == rank else self._open(each) for at, each in enumerate(handles)]
            except RuntimeError as error:
                problem = str(error)
        if not all(map(any, exchange(bytes([bool(self.addresses)])))):
            self.close()
            raise IpcError(problem or "another rank cannot map the memory of its peers")

    def close(self) -> None:
        """Unmap the memory of the others and free the own. No process may use either any more."""
        for address in self._mapped:
            self._driver.cuIpcCloseMemHandle(address)
        self._mapped.clear()
        if self._own:
            self._driver.cuMemFree(self._own)
        self._own, self.addresses = 0, []

    def _connect_driver(self) -> Any:  # Any: cuda-bindings is an optional package
        core, driver = cuda_packages()
        core.Device(self._device.index).set_current()
        return driver

    def _allocate(self, size_bytes: int) -> int:
        """Allocate with the driver: torch's allocator returns parts of larger allocations, or memory without a handle.
        The size is in whole blocks of the driver, because a handle always covers whole blocks.
        """
        size_bytes = round_up(size_bytes, _BLOCK_BYTES)
        address = self._call("cuMemAlloc", size_bytes)
        self._call("cuMemsetD8", address, 0, size_bytes)
        torch.cuda.synchronize(self._device)
        return int(address)

    def _export(self) -> bytes:
        return bytes(self._call("cuIpcGetMemHandle", self._own).reserved)

    def _open(self, exported: bytes) -> int:
        handle = self._driver.CUipcMemHandle()
        handle.reserved = exported
        address = int(self._call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS))
        self._mapped.append(address)
        return address

    def _call(self, name: str, *args: Any) -> Any:
        status, *results = getattr(self._driver, name)(*args)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {status!r}")
        return results[0] if results else None


def _machine() -> bytes:
    """An id that is the same in all processes under one operating system kernel, also in containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
