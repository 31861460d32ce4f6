"""The checks of `pdserve doctor`. Each is a pure function from facts to findings."""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from ...configs.schema import LOOPBACK_HOSTS
from .facts import INITIAL_IPC_NAMESPACE, INITIAL_PID_NAMESPACE, Facts, RdmaDevice

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")

GIB = 1 << 30
PYTHONS = ("3.11", "3.12", "3.13")
MIN_OPEN_FILES = 4096
MIN_CAPABILITY = (8, 0)
DMABUF_KERNEL = (5, 12)
DRIVER_OF_CUDA = {"12": 525, "13": 580}
"""The oldest driver branch for each major release of CUDA."""
SLOW_GIB_PER_S = {"tcp": 0.1, "nvlink": 5.0, "rdma": 1.0}


class Finding(msgspec.Struct, frozen=True):
    """What a check has found, and what to do about it."""

    level: Level
    check: str
    message: str
    remedy: str = ""


Check = Callable[[Facts], Iterator[Finding]]


def check_all(facts: Facts) -> list[Finding]:
    """All findings, in the order of the checks. A server on the CPU does not use the GPUs of its machine."""
    if facts.settings.device == "cpu":
        facts = msgspec.structs.replace(facts, gpus=())
    return [finding for check in CHECKS for finding in check(facts)]


def worst(findings: list[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def check_python(facts: Facts) -> Iterator[Finding]:
    release = ".".join(facts.python.split(".")[:2])
    if release in PYTHONS:
        yield Finding("ok", "python", f"Python {facts.python} on {facts.machine}, Linux {facts.kernel}")
    else:
        remedy = "create the virtual environment with Python 3.11, 3.12 or 3.13, for which Mooncake has wheels"
        yield Finding("fail", "python", f"Python {facts.python} is not supported", remedy)


def check_torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        yield Finding("fail", "torch", "torch is not installed", 'pip install ".[cpu]", or cuda12, cuda13')
    else:
        built = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
        yield Finding("ok", "torch", f"torch {facts.torch} ({built})")


def check_cuda(facts: Facts) -> Iterator[Finding]:
    """Whether torch, the driver and the GPUs fit each other and the setting `device`."""
    wanted = facts.settings.device.startswith("cuda")
    if facts.driver is not None and facts.settings.device == "cpu":
        yield Finding("ok", "cuda", f"driver {facts.driver}, not used: device is cpu")
        return
    if facts.driver is None:
        if wanted:
            remedy = "install the NVIDIA driver (in a container: start it with --gpus all), or use --device cpu"
            yield Finding("fail", "cuda", f"no NVIDIA driver, and device is {facts.settings.device}", remedy)
        else:
            yield Finding("ok", "cuda", "no NVIDIA driver: this machine serves on the CPU")
        return
    major = (facts.torch_cuda or "").split(".")[0]
    needed = DRIVER_OF_CUDA.get(major, 0)
    if facts.torch_cuda is None:
        remedy = "install torch's CUDA build: make setup EXTRA=cuda13 (or cuda12)"
        yield Finding("fail" if wanted else "warn", "cuda", f"driver {facts.driver}, but torch is a CPU build", remedy)
    elif _number(facts.driver) < needed:
        message = f"driver {facts.driver} is too old for torch's CUDA {facts.torch_cuda}"
        yield Finding("fail", "cuda", message, f"install driver {needed} or newer, or torch for CUDA 12")
    elif not facts.gpus:
        remedy = "nvidia-smi shows the state of the GPUs; CUDA_VISIBLE_DEVICES may hide them"
        yield Finding("fail", "cuda", f"torch finds no GPU: {facts.cuda_problem or 'no device'}", remedy)
    else:
        yield Finding("ok", "cuda", f"driver {facts.driver}, {len(facts.gpus)} x {facts.gpus[0].name}")


def check_gpus(facts: Facts) -> Iterator[Finding]:
    ranks = facts.settings.local_ranks
    if facts.gpus and facts.settings.device in ("auto", "cuda") and len(facts.gpus) < ranks:
        remedy = "lower --tp or --pp, or add machines with --nnodes"
        yield Finding("fail", "gpus", f"{ranks} ranks need a GPU each; {len(facts.gpus)} are visible", remedy)
    for number, gpu in enumerate(facts.gpus):
        if gpu.capability < MIN_CAPABILITY:
            shown = ".".join(map(str, gpu.capability))
            remedy = "kernels are tested from compute capability 8.0 (A100) on; expect errors"
            yield Finding("warn", "gpus", f"GPU {number} ({gpu.name}) has compute capability {shown}", remedy)
        if gpu.free_bytes < gpu.total_bytes / 2:
            message = f"GPU {number}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
            yield Finding("warn", "gpus", message, "nvidia-smi lists the processes that hold the rest")
    if facts.gpus and not facts.c_compiler:
        yield Finding(
            "fail", "gpus", "no C compiler, which Triton needs", "install gcc and Python's headers, or set CC"
        )


def check_mooncake(facts: Facts) -> Iterator[Finding]:
    wheels = [f"{name} {version}" for name, version in facts.mooncake.items()]
    if not wheels:
        remedy = 'in the checkout: pip install ".[cpu]", or cuda12, cuda13'
        yield Finding("fail", "mooncake", "the Mooncake transfer engine is not installed", remedy)
    elif len(wheels) > 1:
        remedy = "uninstall all of them, then install one: they overwrite each other's files"
        yield Finding("fail", "mooncake", f"several Mooncake wheels are installed: {', '.join(wheels)}", remedy)
    elif facts.mooncake_problem is not None:
        yield Finding("fail", "mooncake", f"{wheels[0]} does not load: {facts.mooncake_problem}", _LIBRARIES)
    elif facts.gpus and "non-cuda" in wheels[0]:
        remedy = "pip install the extra cuda12 or cuda13 instead: KV between GPUs of one machine then uses CUDA IPC"
        yield Finding("warn", "mooncake", f"{wheels[0]} has no CUDA support, and this machine has GPUs", remedy)
    else:
        yield Finding("ok", "mooncake", wheels[0])
    if facts.forbidden_variables:
        remedy = "unset them; pdserve chooses Mooncake's settings"
        yield Finding("warn", "mooncake", f"{', '.join(facts.forbidden_variables)} set in the environment", remedy)


def check_model(facts: Facts) -> Iterator[Finding]:
    if facts.model_problem is not None:
        remedy = "correct --model; 'pdserve models' lists what is supported"
        yield Finding("fail", "model", facts.model_problem, remedy)
    elif facts.model is not None:
        yield Finding("ok", "model", f"{facts.model}: supported, and its files are here")


def check_attention(facts: Facts) -> Iterator[Finding]:
    """Whether ranks should divide attention or requests; docs/operations.md says when."""
    tp, heads = facts.settings.tp, facts.kv_heads
    if heads is None or tp == 1:
        return
    if facts.settings.dp_attention:
        if not facts.has_experts:
            message = "dp_attention needs a model with experts, and this one has none"
            yield Finding("fail", "attention", message, "leave --dp-attention out")
        elif facts.settings.role == "prefill":
            message = f"each of {tp} ranks computes prompts of its own: a single one takes longer than with plain tp"
            yield Finding("ok", "attention", message)
        else:
            message = f"each of {tp} ranks has requests of its own: with fewer than {tp} at a time some have none"
            yield Finding("ok", "attention", message)
    elif facts.has_experts and tp > heads:
        message = f"{tp} ranks share {heads} KV head{'s' * (heads != 1)}: each is stored {tp // heads} times"
        if facts.settings.role == "decode":
            message += "; --dp-attention stores it once, for many requests at a time"
        yield Finding("ok", "attention", message)


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """RDMA devices, their GIDs, and whether they reach GPU memory."""
    wanted = facts.settings.transport == "rdma"
    if not facts.libibverbs:
        level: Level = "fail" if wanted or facts.rdma_devices else "warn"
        yield Finding(level, "rdma", "libibverbs.so.1 is missing", _LIBRARIES)
    if not facts.rdma_devices:
        if wanted:
            remedy = "load the drivers of the HCA (ibv_devices lists it), or use --transport tcp"
            yield Finding("fail", "rdma", "no RDMA device, and transport is rdma", remedy)
        else:
            yield Finding("ok", "rdma", "no RDMA device: KV goes over TCP, or CUDA IPC between GPUs of one machine")
        return
    for device in facts.rdma_devices:
        yield _check_device(device, facts.settings.gid_index, wanted=wanted)
    if facts.gpus:
        yield _check_gpu_memory(facts)


def _check_device(device: RdmaDevice, gid_index: int | None, *, wanted: bool) -> Finding:
    level: Level = "fail" if wanted else "warn"
    name = f"{device.name} ({device.link_layer})" if device.link_layer else device.name
    if device.state != "ACTIVE":
        remedy = "check the cable and the switch port, or leave it out of --ib-device"
        return Finding("warn", "rdma", f"{name} is {device.state}", remedy)
    if device.link_layer == "Ethernet" and not device.roce_v2_gids:
        return Finding(level, "rdma", f"{name} has no GID for RoCE v2", "give its network interface an IP address")
    if not device.gids:
        return Finding(level, "rdma", f"{name} has no GID", "configure its port: the GID table is empty")
    if gid_index is not None and gid_index not in device.gids:
        remedy = f"choose one of {', '.join(map(str, device.gids))}, or leave --ib-gid-index out"
        return Finding(level, "rdma", f"{name} has no GID at index {gid_index}", remedy)
    chosen = device.roce_v2_gids or device.gids
    return Finding("ok", "rdma", f"{name} is ACTIVE, GID index {', '.join(map(str, chosen[:4]))}")


def _check_gpu_memory(facts: Facts) -> Finding:
    """nvidia_peermem, or dmabuf: a kernel from 5.12 on and the open kernel modules of the driver."""
    if facts.peermem:
        return Finding("ok", "rdma", "nvidia_peermem is loaded: HCAs reach GPU memory")
    if facts.open_driver and _release(facts.kernel) >= DMABUF_KERNEL:
        return Finding("ok", "rdma", "dmabuf is available: HCAs reach GPU memory (WITH_NVIDIA_PEERMEM=0)")
    remedy = "modprobe nvidia_peermem, or use the driver's open kernel modules on Linux 5.12 or newer (dmabuf)"
    level: Level = "fail" if facts.settings.transport == "rdma" else "warn"
    return Finding(level, "rdma", "HCAs cannot reach GPU memory: neither nvidia_peermem nor dmabuf", remedy)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Limits of locked memory and of open files."""
    locks = bool(facts.rdma_devices or facts.gpus)
    limit = facts.memlock_bytes
    if limit is None:
        yield Finding("ok", "limits", "locked memory is unlimited")
    elif locks and limit < max(facts.settings.host_memory_bytes, GIB):
        remedy = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1"
        level: Level = "fail" if facts.settings.transport == "rdma" else "warn"
        message = (
            f"at most {_gib(limit)} of memory can be locked; RDMA and page-locked KV lock all memory that they use"
        )
        yield Finding(level, "limits", message, remedy)
    elif locks:
        yield Finding("ok", "limits", f"{_gib(limit)} of memory can be locked")
    else:
        yield Finding("ok", "limits", "locked memory is limited, and not needed without a GPU or RDMA device")
    if facts.open_files < MIN_OPEN_FILES:
        remedy = "ulimit -n 65536; systemd: LimitNOFILE=65536: every client needs a file descriptor"
        yield Finding("warn", "limits", f"at most {facts.open_files} files can be open", remedy)


def check_namespaces(facts: Facts) -> Iterator[Finding]:
    """CUDA IPC opens memory only within one PID and one IPC namespace."""
    own = [
        name
        for name, actual, initial in (
            ("PID", facts.pid_namespace, INITIAL_PID_NAMESPACE),
            ("IPC", facts.ipc_namespace, INITIAL_IPC_NAMESPACE),
        )
        if actual != initial
    ]
    if own and facts.gpus:
        message = f"a {' and '.join(own)} namespace of its own: KV between containers of this machine goes over TCP"
        remedy = "Docker: --pid host --ipc host; Kubernetes: hostPID and hostIPC, or both servers in one pod"
        yield Finding("warn", "namespaces", message, remedy)
    else:
        shown = f"{' and '.join(own)} namespace of its own" if own else "PID and IPC namespaces of the machine"
        yield Finding("ok", "namespaces", shown)


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Free host memory against the settings."""
    wanted, free = facts.settings.host_memory_bytes, facts.free_bytes
    within = "the container's limit" if facts.limited_by_cgroup else f"{_gib(facts.total_bytes)}"
    if wanted > free:
        remedy = "lower --host-memory-gib or --retract-memory-gib, or free memory"
        message = f"the settings ask for {_gib(wanted)} of host memory, and {_gib(free)} of {within} is free"
        yield Finding("fail", "memory", message, remedy)
    else:
        yield Finding("ok", "memory", f"{_gib(free)} of {within} free, the settings ask for {_gib(wanted)}")


def check_numa(facts: Facts) -> Iterator[Finding]:
    if facts.numa_nodes_allowed < facts.numa_nodes:
        message = f"{facts.numa_nodes_allowed} of {facts.numa_nodes} NUMA nodes may be used"
        nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None}
        level: Level = "warn" if len(nodes) > facts.numa_nodes_allowed else "ok"
        yield Finding(
            level, "numa", message, "allow the nodes of all GPUs (numactl, cpuset)" if level == "warn" else ""
        )
        return
    far = [
        device.name
        for device in facts.rdma_devices
        if device.numa_node is not None and facts.gpus and device.numa_node not in {gpu.numa_node for gpu in facts.gpus}
    ]
    if far:
        remedy = "name the HCAs beside the GPUs with --ib-device"
        yield Finding("warn", "numa", f"no GPU is on the NUMA node of {', '.join(far)}", remedy)
    else:
        yield Finding("ok", "numa", f"{facts.numa_nodes} NUMA node{'s' * (facts.numa_nodes != 1)}, all usable")


def check_ports(facts: Facts) -> Iterator[Finding]:
    settings = facts.settings
    for port in facts.ports:
        where = f"port {port.port} on {port.host} ({port.flag})"
        if port.problem is None:
            yield Finding("ok", "ports", f"{where} is free")
        else:
            remedy = f"choose another with {port.flag}"
            problem = port.problem.removesuffix(f"; {remedy}")
            yield Finding("warn", "ports", problem, f"{remedy}, unless a pdserve server that runs already uses it")
    loopback = settings.host in LOOPBACK_HOSTS or settings.host.startswith("127.")
    if not loopback and not settings.has_cluster_key:
        remedy = "export PDSERVE_CLUSTER_KEY_FILE=...; create the key with openssl rand -hex 32"
        yield Finding("warn", "ports", f"host {settings.host} is not loopback, and no cluster key is set", remedy)


def check_clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_synchronized is False:
        remedy = "run chrony or systemd-timesyncd: logs and traces of several machines are compared by time"
        yield Finding("warn", "clock", "the clock is not synchronized", remedy)
    elif facts.clock_synchronized is None:
        yield Finding("ok", "clock", "the kernel does not say whether the clock is synchronized")
    else:
        yield Finding("ok", "clock", "the clock is synchronized")


def check_transfers(facts: Facts) -> Iterator[Finding]:
    for transfer in facts.transfers:
        name, wanted = transfer.transport, facts.settings.transport
        level: Level = "fail" if name in ("tcp", wanted) else "warn"
        if transfer.gib_per_s is None:
            remedy = "the checks above name what is missing; --transport tcp works without it"
            if name == "tcp":
                remedy = "Mooncake needs ports 15000 to 17000 and an IPv4 address of this machine: check --host"
            yield Finding(level, "transfer", f"{name}: no transfer: {transfer.problem}", remedy)
            continue
        message = f"{name}: {transfer.gib_per_s:.2f} GiB/s between two engines of this machine, at {transfer.host}"
        if transfer.gib_per_s < SLOW_GIB_PER_S.get(name, 0.0):
            yield Finding("warn", "transfer", message, "slow: the machine may be busy; measure again")
        else:
            yield Finding("ok", "transfer", message)


def check_peers(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer.reached:
            yield Finding(
                "ok", "peer", f"{peer.endpoint}: handshake in {1000 * (peer.seconds or 0):.0f} ms, {peer.detail}"
            )
        else:
            remedy = "docs/troubleshooting.md explains this message"
            if "has no cluster_key" in peer.detail:
                remedy = (
                    "set PDSERVE_CLUSTER_KEY_FILE to the key of that server; 'pdserve up' makes a random one of its own"
                )
            named = peer.detail.startswith(peer.endpoint)
            yield Finding("fail", "peer", peer.detail if named else f"{peer.endpoint}: {peer.detail}", remedy)


CHECKS: tuple[Check, ...] = (
    check_python,
    check_torch,
    check_cuda,
    check_gpus,
    check_mooncake,
    check_model,
    check_attention,
    check_rdma,
    check_limits,
    check_namespaces,
    check_memory,
    check_numa,
    check_ports,
    check_clock,
    check_transfers,
    check_peers,
)
_LIBRARIES = "apt-get install libibverbs1 libnuma1 libcurl4, or your distribution's packages"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def _number(driver: str) -> int:
    """The branch of a driver release: 580 of 580.65.06."""
    branch = driver.split(".")[0]
    return int(branch) if branch.isdecimal() else 0


def _release(kernel: str) -> tuple[int, int]:
    """(6, 8) of 6.8.0-45-generic."""
    major, _, rest = kernel.partition(".")
    minor = "".join(character for character in rest.split(".")[0] if character.isdecimal())
    return (int(major) if major.isdecimal() else 0, int(minor) if minor else 0)
