"""Free memory within cgroup limits, read from file trees like the kernel's."""

from pathlib import Path

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.memory import device
from pdserve.memory.cgroup import cgroup_free_bytes
from pdserve.memory.pinned import PinnedMemory

GIB = 1 << 30
UNLIMITED = 9223372036854771712
"""How cgroup version 1 writes "no limit"."""


class Machine:
    """A file tree of control groups, and the groups that a process is in."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "sys"
        self._membership = folder / "cgroup"
        self.mount.mkdir()

    def join(self, *lines: str) -> None:
        self._membership.write_text("".join(f"{line}\n" for line in lines))

    def limit(self, path: str, limit: int | str, used: int, *, cached: int = 0) -> None:
        """Add a group of version 2; half of its page cache is active."""
        self._write(
            path,
            {
                "memory.max": limit,
                "memory.current": used,
                "memory.stat": f"anon {used - cached}\nactive_file {cached // 2}\ninactive_file {cached // 2}",
            },
        )

    def limit_v1(self, path: str, limit: int, used: int, *, cached: int = 0) -> None:
        own = f"cache 0\nactive_file 0\ninactive_file 0\nhierarchical_memory_limit {limit}"
        self._write(
            f"memory{path}",
            {
                "memory.limit_in_bytes": limit,
                "memory.usage_in_bytes": used,
                "memory.stat": f"{own}\ntotal_active_file 0\ntotal_inactive_file {cached}",
            },
        )

    def free(self) -> int | None:
        return cgroup_free_bytes(self._membership, self.mount)

    def _write(self, path: str, files: dict[str, int | str]) -> None:
        group = self.mount / path.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_page_cache_counts_as_free(machine: Machine) -> None:
    machine.join("0::/pod")
    machine.limit("/pod", 64 * GIB, 20 * GIB)
    assert machine.free() == 44 * GIB
    machine.limit("/pod", 64 * GIB, 20 * GIB, cached=6 * GIB)
    assert machine.free() == 50 * GIB


def test_least_free_memory_of_all_ancestors_counts(machine: Machine) -> None:
    machine.join("0::/slice/pod/container")
    machine.limit("/slice/pod/container", "max", 3 * GIB)
    machine.limit("/slice/pod", 32 * GIB, 30 * GIB)
    machine.limit("/slice", 64 * GIB, 40 * GIB)
    assert machine.free() == 2 * GIB
    machine.limit("/slice/pod", "max", 30 * GIB)
    assert machine.free() == 24 * GIB


def test_cgroup_version_1_is_read(machine: Machine) -> None:
    machine.join("5:cpu,cpuacct:/", "4:memory:/docker/c", "1:name=systemd:/", "0::/")
    machine.limit_v1("", UNLIMITED, 90 * GIB)
    machine.limit_v1("/docker/c", 16 * GIB, 9 * GIB, cached=GIB)
    assert machine.free() == 8 * GIB


def test_group_of_a_container_is_read_at_the_mount_root(machine: Machine) -> None:
    machine.join("4:memory:/docker/0123456789ab")
    machine.limit_v1("", 16 * GIB, 9 * GIB)
    assert machine.free() == 7 * GIB


def test_no_memory_is_free_over_the_limit(machine: Machine) -> None:
    machine.join("0::/pod")
    machine.limit("/pod", 2 * GIB, 3 * GIB)
    assert machine.free() == 0


def test_without_a_limit_the_machine_memory_counts(machine: Machine) -> None:
    assert machine.free() is None  # no control groups
    machine.join("0::/")
    assert machine.free() is None  # the root group has no limit
    machine.join("0::/slice")
    machine.limit("/slice", "max", GIB)
    assert machine.free() is None


def test_memory_beyond_the_container_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has more memory, but the kernel would kill the process when it writes there."""
    monkeypatch.setattr(device, "cgroup_free_bytes", lambda: 5 << 20)
    assert device.free_memory_bytes(torch.device("cpu")) == 5 << 20
    PinnedMemory(5 << 20).close()
    with pytest.raises(StartupError, match=r"asks for 0\.01 GiB, 0\.00 GiB are available"):
        PinnedMemory(6 << 20)
    monkeypatch.setattr(device, "cgroup_free_bytes", lambda: 1 << 60)
    assert device.free_memory_bytes(torch.device("cpu")) < 1 << 60
