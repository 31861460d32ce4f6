"""Checks of `pdserve doctor` with facts of other machines: a GPU host, an RDMA host, containers and broken ones."""

from typing import Any

import msgspec
import pytest

from pdserve.server.doctor import checks
from pdserve.server.doctor.checks import CHECKS, Finding, Level, check_all, worst
from pdserve.server.doctor.facts import Facts, Gpu, Peer, Port, RdmaDevice, Settings, Transfer

GIB = 1 << 30
CPU_HOST = Facts(
    python="3.12.4",
    machine="aarch64",
    kernel="6.8.0-45-generic",
    torch="2.13.0+cpu",
    mooncake={"mooncake-transfer-engine-non-cuda": "0.3.13.post1"},
    memlock_bytes=8 << 20,
    free_bytes=64 * GIB,
    total_bytes=128 * GIB,
    settings=Settings(host_memory_bytes=4 * GIB),
    ports=(Port("--port", "127.0.0.1", 8200),),
    transfers=(Transfer("tcp", "127.0.0.1", 3.2),),
)
H200 = Gpu("NVIDIA H200", 139 * GIB, 138 * GIB, (9, 0), numa_node=0)
GPU_HOST = msgspec.structs.replace(
    CPU_HOST,
    machine="x86_64",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    driver="580.65.06",
    gpus=(H200, msgspec.structs.replace(H200, numa_node=1)),
    numa_nodes=2,
    numa_nodes_allowed=2,
    mooncake={"mooncake-transfer-engine-cuda13": "0.3.13.post1"},
    memlock_bytes=None,
    transfers=(Transfer("tcp", "127.0.0.1", 3.2), Transfer("nvlink", "127.0.0.1", 120.0)),
)
ROCE = RdmaDevice("mlx5_0", "ACTIVE", "Ethernet", (0, 1, 2, 3), (1, 3), numa_node=0)
RDMA_HOST = msgspec.structs.replace(
    GPU_HOST,
    rdma_devices=(ROCE, RdmaDevice("mlx5_1", "ACTIVE", "InfiniBand", (0,), numa_node=1)),
    peermem=True,
    settings=Settings(transport="rdma", device="cuda", host="10.0.0.7", has_cluster_key=True),
    transfers=(*GPU_HOST.transfers, Transfer("rdma", "10.0.0.7", 40.0)),
    peers=(Peer("10.0.0.5:8998", True, "prefill serves DeepSeek-V3.2 (f00d)", 0.012),),
)


def changed(facts: Facts, **changes: Any) -> Facts:  # Any: fields of several types
    return msgspec.structs.replace(facts, **changes)


def with_settings(facts: Facts, **changes: Any) -> Facts:
    return changed(facts, settings=msgspec.structs.replace(facts.settings, **changes))


def findings_at(facts: Facts, level: Level) -> list[Finding]:
    return [finding for finding in check_all(facts) if finding.level == level]


@pytest.mark.parametrize("facts", [CPU_HOST, GPU_HOST, RDMA_HOST], ids=["cpu", "gpu", "rdma"])
def test_healthy_machines_have_only_ok_findings(facts: Facts) -> None:
    assert [finding for finding in check_all(facts) if finding.level != "ok"] == []
    assert worst(check_all(facts)) == "ok"


@pytest.mark.parametrize(
    ("settings", "model", "level", "words"),
    [
        ({"tp": 8}, {"kv_heads": 4, "has_experts": True}, "ok", "stored 2 times; --dp-attention"),
        (
            {"tp": 8, "role": "prefill"},
            {"kv_heads": 1, "has_experts": True},
            "ok",
            "share 1 KV head: each is stored 8 times",
        ),
        ({"tp": 8, "dp_attention": True}, {"kv_heads": 4, "has_experts": True}, "ok", "fewer than 8 at a time"),
        (
            {"tp": 4, "dp_attention": True, "role": "prefill"},
            {"kv_heads": 4, "has_experts": True},
            "ok",
            "of its own: a single",
        ),
        ({"tp": 2, "dp_attention": True}, {"kv_heads": 8}, "fail", "needs a model with experts"),
        ({"tp": 4}, {"kv_heads": 4, "has_experts": True}, None, ""),
        ({"tp": 8}, {"kv_heads": 4}, None, ""),
        ({}, {"kv_heads": 4, "has_experts": True}, None, ""),
        ({"tp": 8}, {}, None, ""),
    ],
)
def test_division_of_attention_is_judged_by_heads_and_experts(
    settings: dict[str, Any], model: dict[str, Any], level: Level | None, words: str
) -> None:
    facts = changed(with_settings(GPU_HOST, **settings), **model)
    found = [finding for finding in check_all(facts) if finding.check == "attention"]
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(words in finding.message for finding in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": (), "cuda_problem": "no device"},
        {"torch_cuda": None, "gpus": ()},
        {"driver": "535.161.08", "gpus": ()},
        {"c_compiler": False},
        {"gpus": (msgspec.structs.replace(H200, free_bytes=GIB),)},
        {"mooncake": CPU_HOST.mooncake},
    ],
    ids=["hidden GPUs", "CPU build of torch", "old driver", "no compiler", "busy GPU", "Mooncake without CUDA"],
)
def test_gpu_problems_are_ignored_with_device_cpu(changes: dict[str, Any]) -> None:
    facts = with_settings(changed(GPU_HOST, transfers=CPU_HOST.transfers, **changes), device="cpu")
    assert [finding for finding in check_all(facts) if finding.level != "ok"] == []


WRONG: list[tuple[str, Facts, Level, str, str]] = [
    ("old python", changed(CPU_HOST, python="3.10.2"), "fail", "Python 3.10.2", "3.11"),
    ("new python", changed(CPU_HOST, python="3.14.0"), "fail", "Python 3.14.0", "3.13"),
    ("no torch", changed(CPU_HOST, torch=None), "fail", "torch is not installed", "pip install"),
    ("no driver", with_settings(CPU_HOST, device="cuda"), "fail", "no NVIDIA driver", "--gpus all"),
    (
        "cpu torch on gpus",
        changed(GPU_HOST, torch_cuda=None, gpus=()),
        "warn",
        "but torch is a CPU build",
        "EXTRA=cuda13",
    ),
    ("old driver", changed(GPU_HOST, driver="535.161.08"), "fail", "too old for torch's CUDA 13.0", "580"),
    ("gpus hidden", changed(GPU_HOST, gpus=(), cuda_problem="no device"), "fail", "finds no GPU", "CUDA_VISIBLE"),
    ("too many ranks", with_settings(GPU_HOST, local_ranks=4), "fail", "4 ranks need a GPU each; 2", "--tp"),
    (
        "old gpu",
        changed(GPU_HOST, gpus=(msgspec.structs.replace(H200, name="V100", capability=(7, 0)),)),
        "warn",
        "GPU 0 (V100) has compute capability 7.0",
        "8.0",
    ),
    (
        "busy gpu",
        changed(GPU_HOST, gpus=(msgspec.structs.replace(H200, free_bytes=20 * GIB),)),
        "warn",
        "20.0 GiB of 139.0 GiB free",
        "nvidia-smi",
    ),
    ("no compiler", changed(GPU_HOST, c_compiler=False), "fail", "C compiler", "gcc"),
    ("no mooncake", changed(CPU_HOST, mooncake={}), "fail", "not installed", "pip install"),
    (
        "two wheels",
        changed(GPU_HOST, mooncake={"mooncake-transfer-engine": "1", "mooncake-transfer-engine-cuda13": "1"}),
        "fail",
        "several Mooncake wheels",
        "uninstall",
    ),
    (
        "cpu wheel on gpus",
        changed(GPU_HOST, mooncake=CPU_HOST.mooncake),
        "warn",
        "has no CUDA support",
        "cuda13",
    ),
    (
        "wheel does not load",
        changed(CPU_HOST, mooncake_problem="libcurl.so.4: cannot open shared object file"),
        "fail",
        "libcurl.so.4",
        "libcurl4",
    ),
    ("forbidden variable", changed(CPU_HOST, forbidden_variables=("MC_TCP_PROTO",)), "warn", "MC_TCP_PROTO", "unset"),
    ("no model", changed(CPU_HOST, model="/a", model_problem="model '/a': no such"), "fail", "no such", "--model"),
    ("no libibverbs", changed(RDMA_HOST, libibverbs=False), "fail", "libibverbs", "apt-get"),
    ("no hca", changed(RDMA_HOST, rdma_devices=()), "fail", "no RDMA device", "--transport tcp"),
    (
        "port down",
        changed(RDMA_HOST, rdma_devices=(ROCE, msgspec.structs.replace(ROCE, name="mlx5_9", state="DOWN"))),
        "warn",
        "mlx5_9 (Ethernet) is DOWN",
        "cable",
    ),
    (
        "no roce v2",
        changed(RDMA_HOST, rdma_devices=(msgspec.structs.replace(ROCE, roce_v2_gids=()),)),
        "fail",
        "no GID for RoCE v2",
        "IP address",
    ),
    (
        "no gid",
        changed(RDMA_HOST, rdma_devices=(RdmaDevice("mlx5_1", "ACTIVE", "InfiniBand"),)),
        "fail",
        "mlx5_1 (InfiniBand) has no GID",
        "GID table",
    ),
    (
        "wrong gid",
        with_settings(changed(RDMA_HOST, rdma_devices=(ROCE,)), gid_index=7),
        "fail",
        "no GID at index 7",
        "0, 1, 2, 3",
    ),
    ("no peermem", changed(RDMA_HOST, peermem=False), "fail", "cannot reach GPU memory", "nvidia_peermem"),
    ("memlock with rdma", changed(RDMA_HOST, memlock_bytes=64 << 10), "fail", "can be locked", "LimitMEMLOCK"),
    ("memlock without rdma", changed(GPU_HOST, memlock_bytes=64 << 10), "warn", "can be locked", "memlock=-1"),
    ("few files", changed(CPU_HOST, open_files=1024), "warn", "1024 files", "LimitNOFILE"),
    ("pid namespace", changed(GPU_HOST, pid_namespace=4026532201), "warn", "PID namespace", "--pid host"),
    (
        "both namespaces",
        changed(GPU_HOST, pid_namespace=4026532201, ipc_namespace=4026532200),
        "warn",
        "PID and IPC namespace",
        "--ipc host",
    ),
    (
        "little memory",
        changed(with_settings(CPU_HOST, host_memory_bytes=100 * GIB), limited_by_cgroup=True),
        "fail",
        "ask for 100.0 GiB of host memory, and 64.0 GiB of the container's limit",
        "--host-memory-gib",
    ),
    ("one numa node of two", changed(GPU_HOST, numa_nodes_allowed=1), "warn", "1 of 2 NUMA nodes", "cpuset"),
    (
        "hca on another numa node",
        changed(RDMA_HOST, rdma_devices=(ROCE, msgspec.structs.replace(ROCE, name="mlx5_7", numa_node=3))),
        "warn",
        "NUMA node of mlx5_7",
        "--ib-device",
    ),
    (
        "port in use",
        changed(CPU_HOST, ports=(Port("--port", "127.0.0.1", 8200, "port 8200 on 127.0.0.1 is in use"),)),
        "warn",
        "in use",
        "--port",
    ),
    ("no key", with_settings(CPU_HOST, host="10.0.0.7"), "warn", "no cluster key", "openssl rand"),
    ("clock not synchronized", changed(CPU_HOST, clock_synchronized=False), "warn", "not synchronized", "chrony"),
    (
        "no tcp transfer",
        changed(CPU_HOST, transfers=(Transfer("tcp", "10.0.0.7", problem="refused"),)),
        "fail",
        "tcp: no transfer: refused",
        "15000",
    ),
    (
        "no nvlink transfer",
        changed(GPU_HOST, transfers=(Transfer("nvlink", "10.0.0.7", problem="no handle"),)),
        "warn",
        "nvlink: no transfer",
        "--transport tcp",
    ),
    (
        "slow transfer",
        changed(RDMA_HOST, transfers=(Transfer("rdma", "10.0.0.7", 0.5),)),
        "warn",
        "rdma: 0.50 GiB/s",
        "again",
    ),
    (
        "other key",
        changed(CPU_HOST, peers=(Peer("p:8998", False, "authentication failed: cluster_key differs"),)),
        "fail",
        "p:8998: authentication failed",
        "troubleshooting.md",
    ),
    (
        "peer needs a key",
        changed(
            CPU_HOST,
            peers=(Peer("p:8998", False, "p:8998 closes connections of this server, which has no cluster_key"),),
        ),
        "fail",
        "p:8998 closes connections",
        "set PDSERVE_CLUSTER_KEY_FILE",
    ),
]


@pytest.mark.parametrize(
    ("facts", "level", "message", "remedy"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG]
)
def test_findings_name_the_problem_and_the_remedy(facts: Facts, level: Level, message: str, remedy: str) -> None:
    findings = [finding for finding in check_all(facts) if message in finding.message]
    assert [finding.level for finding in findings] == [level], check_all(facts)
    assert remedy in findings[0].remedy
    assert worst(check_all(facts)) == level


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_server_on_loopback_needs_no_cluster_key(host: str) -> None:
    assert findings_at(with_settings(CPU_HOST, host=host), "warn") == []


def test_dmabuf_replaces_peermem() -> None:
    facts = changed(RDMA_HOST, peermem=False, open_driver=True)
    assert not findings_at(facts, "fail")
    assert findings_at(changed(facts, kernel="5.4.0-150-generic"), "fail"), "the kernel is too old"


def test_every_warning_and_failure_has_a_remedy() -> None:
    for _, facts, *_ in WRONG:
        assert all(finding.remedy for finding in check_all(facts) if finding.level != "ok")


def test_facts_are_equal_after_json() -> None:
    for facts in (CPU_HOST, RDMA_HOST):
        assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts


def test_every_check_is_called_once() -> None:
    defined = {name for name in vars(checks) if name.startswith("check_")} - {"check_all"}
    assert sorted(check.__name__ for check in CHECKS) == sorted(defined)
