"""CPU quotas in the files of cgroups, as recorded on machines with version 1 and version 2."""

import os
from pathlib import Path

import pytest

from pdserve.common.machine.cpus import cpu_quota, usable_cpus

V1_CONTAINER = {  # docker run --cpus 1.5, cgroupfs: the host's path, but its own files are at the top
    "proc/self/cgroup": "12:devices:/docker/3ff1\n4:memory:/docker/3ff1\n2:cpu,cpuacct:/docker/3ff1\n0::/docker/3ff1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
V1_SERVICE = {  # CPUQuota=50% of a systemd service, below a slice with 200 %
    "proc/self/cgroup": "3:cpu:/system.slice/pdserve.service\n1:name=systemd:/system.slice/pdserve.service\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/system.slice/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/system.slice/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/system.slice/pdserve.service/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/system.slice/pdserve.service/cpu.cfs_period_us": "100000\n",
}
V1_FREE = {
    "proc/self/cgroup": "1:cpu:/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
V2_CONTAINER = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}
V2_PARENT = {  # the limit of a Kubernetes pod, above that of its container
    "proc/self/cgroup": "0::/kubepods.slice/pod.slice/container.scope\n",
    "sys/fs/cgroup/kubepods.slice/cpu.max": "max 100000\n",
    "sys/fs/cgroup/kubepods.slice/pod.slice/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/kubepods.slice/pod.slice/container.scope/cpu.max": "max 100000\n",
}
V2_FREE = {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V1_CONTAINER, 1.5),
        (V1_SERVICE, 0.5),
        (V1_FREE, None),
        (V2_CONTAINER, 1.0),
        (V2_PARENT, 4.0),
        (V2_FREE, None),
        ({}, None),
    ],
)
def test_cpu_quota_is_the_lowest_of_all_cgroups(files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert cpu_quota(tmp_path) == expected


def test_usable_cpus_are_not_more_than_those_of_the_affinity_mask() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
