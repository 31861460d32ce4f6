"""How much memory the control groups that this process is in leave it: what a container was given, not the machine.

A group has a limit and counts what its processes use, with the files that the kernel caches for them; those it gives
up before it ends anybody. A limit holds for everything below, so the tightest on the way up counts. Versions 1 and 2 of
the interface name the same things differently.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple


class _Interface(NamedTuple):
    """Where a version of control groups has them, and how their files are called."""

    controller: str
    """As in /proc/self/cgroup."""
    folder: str
    limit: str
    usage: str
    cached: tuple[str, str]
    """Lines of memory.stat, of the group and all below it."""


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
    """What can still be allocated before a limit is reached; None where there is none, or no control groups."""
    if not membership.exists():
        return None
    rooms: list[int] = []
    for line in membership.read_text(encoding="utf-8").splitlines():  # number:controllers:path, or 0::path
        _, controllers, path = line.split(":", 2)
        for interface in _INTERFACES:
            if interface.controller in controllers.split(","):
                rooms += _rooms(mount / interface.folder, path, interface)
    return max(0, min(rooms)) if rooms else None


def _rooms(root: Path, path: str, interface: _Interface) -> list[int]:
    """What the group and each above it have left. In a container `path` may be that outside, of which its own group is
    all that can be seen here: at the root.
    """
    inner = Path(path.lstrip("/"))
    found = []
    for group in (root / inner, *(root / parent for parent in inner.parents)):
        with contextlib.suppress(OSError):  # not to be seen from here: nor is its limit
            limit = _read(group / interface.limit)
            if limit != "max":
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                cached = sum(int(stat[name]) for name in interface.cached)
                found.append(int(limit) - int(_read(group / interface.usage)) + cached)
    return found


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
