"""Collects the facts of this machine. Nothing here judges them."""

import ctypes
import os
import platform
import re
import resource
import shutil
from pathlib import Path

from typing_extensions import TypedDict

from ...common.errors import StartupError
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...memory.cgroup import cgroup_free_bytes
from ...models.loading.catalog import locate_model
from ...models.loading.hub import may_be_on_hub
from ...transfer.mooncake.infiniband import SYSFS, port_states
from ...transfer.mooncake.library import FORBIDDEN
from ..launch.ports import check_port
from ..observability.versions import mooncake_wheels
from .facts import Facts, Gpu, Peer, Port, RdmaDevice, Settings, Transfer

GIB = 1 << 30
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_TIMEX_BYTES = 512
"""More than the kernel's struct timex has."""
_UNSYNCHRONIZED = 5
"""TIME_ERROR of adjtimex(2)."""


def settings_of(config: AnyServerConfig) -> Settings:
    """The settings that matter for the checks."""
    wanted = 0.0
    if isinstance(config, DecodeConfig):
        wanted += config.retract_memory_gib
        wanted += (config.host_memory_gib or 0.0) if config.enable_hisparse else 0.0
    if config.device == "cpu":
        wanted += config.kv_memory_gib or 0.0
    return Settings(
        role=config.role,
        device=config.device,
        transport=config.transport,
        host=config.host,
        local_ranks=len(config.local_ranks),
        tp=config.tp,
        dp_attention=config.dp_attention,
        has_cluster_key=config.cluster_key is not None,
        host_memory_bytes=int(wanted * GIB),
        gid_index=config.ib_gid_index,
    )


class ModelFacts(TypedDict, total=False):
    model: str
    model_problem: str
    kv_heads: int
    has_experts: bool


def _model(config: AnyServerConfig) -> ModelFacts:
    """Whether the model can be served, by its files on this machine. Weights are not read."""
    if "model" not in config.model_fields_set or may_be_on_hub(config.model):
        return {}
    try:
        model = locate_model(config.model, config.load_format).config
    except StartupError as error:
        return {"model": config.model, "model_problem": str(error)}
    return {"model": config.model, "kv_heads": model.num_kv_heads, "has_experts": any(model.mixed)}


def collect(
    config: AnyServerConfig, *, transfers: tuple[Transfer, ...], mooncake_problem: str | None, peers: tuple[Peer, ...]
) -> Facts:
    """The facts of this machine for a server with this configuration."""
    total, free, limited = _host_memory()
    torch_version, torch_cuda, cuda_problem, gpus = _torch()
    driver, open_driver = _driver()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        python=platform.python_version(),
        machine=platform.machine(),
        kernel=platform.release(),
        settings=settings_of(config),
        torch=torch_version,
        torch_cuda=torch_cuda,
        cuda_problem=cuda_problem,
        driver=driver,
        open_driver=open_driver,
        gpus=gpus,
        c_compiler=any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")),
        mooncake=mooncake_wheels(),
        mooncake_problem=mooncake_problem,
        libibverbs=_loads("libibverbs.so.1"),
        rdma_devices=rdma_devices(),
        peermem=any(Path("/sys/module", name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        pid_namespace=_namespace("pid"),
        ipc_namespace=_namespace("ipc"),
        in_container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        free_bytes=free,
        total_bytes=total,
        limited_by_cgroup=limited,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        numa_nodes_allowed=_allowed_nodes(Path("/proc/self/status").read_text(encoding="ascii")),
        ports=_ports(config),
        clock_synchronized=_clock_synchronized(),
        **_model(config),
        forbidden_variables=tuple(name for name in FORBIDDEN if name in os.environ),
        transfers=transfers,
        peers=peers,
    )


def rdma_devices(sysfs: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """The HCAs of this machine, with the GIDs of their first port."""
    found = []
    for name, state in port_states(sysfs).items():
        port = next(iter(sorted((sysfs / name / "ports").glob("[0-9]*"))), None)
        gids: list[int] = []
        roce_v2: list[int] = []
        for entry in sorted((port / "gids").glob("[0-9]*"), key=lambda path: int(path.name)) if port else ():
            if _read(entry) in ("", NO_GID):
                continue
            gids.append(int(entry.name))
            if port is not None and "v2" in _read(port / "gid_attrs" / "types" / entry.name):
                roce_v2.append(int(entry.name))
        layer = _read(port / "link_layer") if port is not None else ""
        found.append(RdmaDevice(name, state, layer, tuple(gids), tuple(roce_v2), _numa_node(sysfs / name / "device")))
    return tuple(found)


def _read(path: Path) -> str:
    """The content of a file of the kernel; empty if it cannot be read, as an unused entry of a GID table."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _numa_node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: unknown


def _torch() -> tuple[str | None, str | None, str | None, tuple[Gpu, ...]]:
    """Its version, its CUDA release, why it cannot use a GPU, and the GPUs."""
    try:
        import torch
    except ImportError:
        return None, None, None, ()
    version, cuda = str(torch.__version__), torch.version.cuda
    try:
        if not torch.cuda.is_available():
            return version, cuda, "no usable CUDA device", ()
        return version, cuda, None, tuple(map(_gpu, range(torch.cuda.device_count())))
    except RuntimeError as error:
        return version, cuda, str(error).splitlines()[0], ()


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    # torch's type stubs lack them
    domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    node = _numa_node(Path("/sys/bus/pci/devices", address))
    return Gpu(properties.name, total, free, (properties.major, properties.minor), node)


def _driver() -> tuple[str | None, bool]:
    """The release of the NVIDIA driver, and whether it has the open kernel modules."""
    text = _read(Path("/proc/driver/nvidia/version"))
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return (found[1] if found else None), "Open Kernel Module" in text


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _namespace(kind: str) -> int:
    return Path("/proc/self/ns", kind).stat().st_ino


def _host_memory() -> tuple[int, int, bool]:
    """Total bytes, free bytes, and whether a control group limits them."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    limited = cgroup_free_bytes()
    return (total, limited, True) if limited is not None and limited < available else (total, available, False)


def _allowed_nodes(status: str) -> int:
    """How many NUMA nodes this process may allocate memory on: `Mems_allowed_list:	0-1,3`."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    if found is None:
        return 1
    ranges = [part.partition("-") for part in found[1].split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _ports(config: AnyServerConfig) -> tuple[Port, ...]:
    wanted = [("--port", config.port)]
    if isinstance(config, PrefillConfig):
        wanted.append(("--bootstrap-port", config.bootstrap_port))
    found = []
    for flag, port in wanted:
        try:
            check_port(config.host, port, flag)
            found.append(Port(flag, config.host, port))
        except StartupError as error:
            found.append(Port(flag, config.host, port, str(error)))
    return tuple(found)


def _clock_synchronized() -> bool | None:
    try:
        state = ctypes.CDLL("libc.so.6").adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONIZED
