"""Page-locked, zeroed host memory that the GPU accesses directly.

It is mmapped, in 2 MiB pages if the kernel has them, and registered with CUDA chunk by chunk, so that no single call
takes long and an error can report the progress. Kernels may read across the border of two chunks; cudaMemcpy refuses
copies across it, so a chunk is a whole number of units (the pages of a pool). Without a CUDA device it is plain memory.
"""

import contextlib
import logging
import math
import mmap
import sys

import torch

from ..common.errors import StartupError
from ..common.progress import ProgressLog
from .device import free_memory_bytes
from .sizing import GIB

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * GIB
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister flags: valid for every device, mapped into its address space


class PinnedMemory:
    """Owns `size_bytes` of zeroed host memory; `data` is a view of it as bytes. A copy stays within `chunk_bytes`.

    `close` unregisters the memory from CUDA but does not unmap it: that happens with its last view, which unregisters
    it if `close` has not. No GPU work may use it then. If a process ends without `close`, the driver cleans up, slowly.
    """

    def __init__(self, size_bytes: int, unit_bytes: int = 1) -> None:
        """Raises StartupError, with sizes in GiB, if there is too little memory or it cannot be page-locked."""
        available = free_memory_bytes(torch.device("cpu"))
        if size_bytes > available:
            raise StartupError(
                f"KV in host memory asks for {size_bytes / GIB:.2f} GiB, {available / GIB:.2f} GiB are available"
            )
        try:
            self._memory = _LockedMemory(max(size_bytes, 1))
        except OSError as error:
            raise StartupError(
                f"cannot map {size_bytes / GIB:.2f} GiB of host memory for KV: {error.strerror}; the limit on address "
                "space (ulimit -v) and the kernel's overcommit limit (vm.overcommit_memory) must allow it"
            ) from error
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)[:size_bytes]
        whole = math.lcm(unit_bytes, mmap.PAGESIZE)
        self.chunk_bytes = max(CHUNK_BYTES // whole, 1) * whole
        if torch.cuda.is_available():
            self._register(len(self._memory))

    def close(self) -> None:
        """Undo the page-locking. May be called twice."""
        self._memory.unlock()

    def _register(self, size_bytes: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        progress = ProgressLog(log, "host memory for KV: %.0f of %.0f GiB are page-locked", size_bytes / GIB)
        for start in range(0, size_bytes, self.chunk_bytes):
            length = min(self.chunk_bytes, size_bytes - start)
            status = cudart.cudaHostRegister(self.data.data_ptr() + start, length, _PORTABLE_AND_MAPPED)
            if int(status) != 0:
                self.close()
                raise StartupError(
                    f"cannot page-lock {size_bytes / GIB:.2f} GiB of host memory for KV: "
                    f"{cudart.cudaGetErrorString(status)} after {start / GIB:.2f} GiB; "
                    f"{free_memory_bytes(torch.device('cpu')) / GIB:.2f} GiB are available, and the locked-memory "
                    "limit (ulimit -l) must allow it"
                )
            self._memory.locked_chunks.append(self.data.data_ptr() + start)
            progress.add(length / GIB)


class _LockedMemory(mmap.mmap):
    """Unregisters itself before it is unmapped: the driver would refuse to register another mapping at the same
    addresses.
    """

    def __new__(cls, size_bytes: int) -> "_LockedMemory":
        # private: for shared memory the kernel uses large pages only if an administrator enables them
        return super().__new__(cls, -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, _size_bytes: int) -> None:
        self.locked_chunks: list[int] = []
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                self.madvise(mmap.MADV_HUGEPAGE)
            self.madvise(mmap.MADV_DONTFORK)  # after a fork, writes of this process would go to copies

    def unlock(self) -> None:
        while self.locked_chunks:
            torch.cuda.cudart().cudaHostUnregister(self.locked_chunks.pop())  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        mapped = hasattr(self, "locked_chunks")
        if mapped and not sys.is_finalizing():  # the driver cleans up after a process
            self.unlock()
