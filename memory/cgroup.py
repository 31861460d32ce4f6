"""Memory that the control groups (cgroups) of this process still allow: the limit of the container, not of the machine.

A group's usage includes the page cache of its processes, which the kernel drops before it kills a process, so it counts
as free. A limit applies to all groups below it: the tightest one on the path to the root counts. Versions 1 and 2 of
the interface differ in file names.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple


class _Interface(NamedTuple):
    """Mount folder and file names of one cgroup version."""

    controller: str
    """Name in /proc/self/cgroup."""
    folder: str
    limit: str
    usage: str
    cached: tuple[str, str]
    """Keys in memory.stat: page cache of the group and all groups below it."""


_INTERFACES = (
    _Interface("", "", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Interface(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def cgroup_free_bytes(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated before a limit is reached; None without a limit or without cgroups."""
    if not membership.exists():
        return None
    free_bytes: list[int] = []
    for line in membership.read_text(encoding="utf-8").splitlines():  # number:controllers:path, or 0::path
        _, controllers, path = line.split(":", 2)
        for interface in _INTERFACES:
            if interface.controller in controllers.split(","):
                free_bytes += _free_bytes(mount / interface.folder, path, interface)
    return max(0, min(free_bytes)) if free_bytes else None


def _free_bytes(root: Path, path: str, interface: _Interface) -> list[int]:
    """Free bytes of the group and of each group above it. In a container `path` may be the path outside it; then only
    the container's own group is visible, at the root.
    """
    inner = Path(path.lstrip("/"))
    found = []
    for group in (root / inner, *(root / parent for parent in inner.parents)):
        with contextlib.suppress(OSError):  # a group outside the container: its limit cannot be read
            limit = _read(group / interface.limit)
            if limit != "max":
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                cached = sum(int(stat[name]) for name in interface.cached)
                found.append(int(limit) - int(_read(group / interface.usage)) + cached)
    return found


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
