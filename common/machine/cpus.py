"""How many CPUs this process may use: those of its affinity mask, but not more than the CPU quota of its cgroups."""

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def usable_cpus() -> int:
    """At least 1. A quota that is not a whole number is rounded up."""
    quota = cpu_quota()
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The lowest quota of the cgroup and its parents in CPUs, such as that of `docker run --cpus`; None without one."""
    return min((quota for group in _groups(root) if (quota := _quota_of(group)) is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the CPU controller. In a container, only its own cgroup is mounted, at the top; the paths that
    /proc/self/cgroup has are those of the host with version 1.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        tops = [mounts / controllers, mounts / "cpu"] if "cpu" in controllers.split(",") else []
        for top in tops if controllers else [mounts, mounts / "unified"]:
            group = top / path.lstrip("/")
            yield from (parent for parent in (group, *group.parents) if parent == top or top in parent.parents)


def _quota_of(group: Path) -> float | None:
    if limit := _text(group / "cpu.max").split():  # version 2: QUOTA PERIOD, or max PERIOD
        return None if limit[0] == "max" else int(limit[0]) / int(limit[1])
    quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")  # version 1: -1 without one
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
