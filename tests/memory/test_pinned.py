"""Page-locked memory: page size, fork behaviour, and unlocking with and without `close`."""

import errno
import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.memory import pinned
from pdserve.memory.pinned import PinnedMemory


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_pinned_memory_allows_huge_pages_and_is_not_mapped_in_forked_processes() -> None:
    memory = PinnedMemory(8 << 20)
    flags = flags_of(memory.data.data_ptr())
    assert {"hg", "dc"} <= flags  # MADV_HUGEPAGE and MADV_DONTFORK
    assert "sh" not in flags  # the kernel does not back shared memory with huge pages by default
    memory.close()


def test_kernel_without_huge_pages_maps_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a real-time kernel refuses MADV_HUGEPAGE."""
    refused = []

    def madvise(memory: mmap.mmap, advice: int) -> None:
        if advice == mmap.MADV_HUGEPAGE:
            refused.append(advice)
            raise OSError(errno.EINVAL, "Invalid argument")
        mmap.mmap.madvise(memory, advice)

    monkeypatch.setattr(pinned._LockedMemory, "madvise", madvise, raising=False)
    memory = PinnedMemory(8 << 20)
    assert len(refused) == 1
    assert "dc" in flags_of(memory.data.data_ptr())
    memory.close()


def test_failed_mmap_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual cause is `ulimit -v`. Here, the size is larger than any address space."""
    monkeypatch.setattr(pinned, "free_memory_bytes", lambda _: 1 << 60)
    with pytest.raises(StartupError, match=r"cannot map 1048576\.00 GiB .*: Cannot allocate memory; .*ulimit -v"):
        PinnedMemory(1 << 50)


@pytest.mark.gpu
def test_dropped_memory_is_unlocked_and_its_addresses_can_be_locked_again() -> None:
    addresses = set()
    for _ in range(8):
        memory = PinnedMemory(3 << 20)
        addresses.add(memory.data.data_ptr())
        del memory
    gc.collect()
    assert len(addresses) < 8, "the kernel is expected to map a range again that has just become free"


@pytest.mark.gpu
def test_view_keeps_memory_locked() -> None:
    memory = PinnedMemory(1 << 20)
    view = memory.data[4096:8192]
    del memory
    gc.collect()
    view.fill_(7)
    on_gpu = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    on_gpu.copy_(view, non_blocking=True)
    torch.cuda.synchronize()
    assert view.is_pinned()
    assert bool((on_gpu == 7).all())
