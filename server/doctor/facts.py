"""What `pdserve doctor` found on a machine. Plain data: tests use facts of other machines, and `--json` prints them."""

from typing import Literal

import msgspec

INITIAL_PID_NAMESPACE = 4026531836
INITIAL_IPC_NAMESPACE = 4026531839
"""Inode numbers that the kernel gives to the namespaces of the machine itself."""


class Gpu(msgspec.Struct, frozen=True):
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    numa_node: int | None = None


class RdmaDevice(msgspec.Struct, frozen=True):
    """An HCA. `gids` are the indices of usable entries of its GID table, `roce_v2_gids` those of RoCE v2."""

    name: str
    state: str
    link_layer: str = ""
    gids: tuple[int, ...] = ()
    roce_v2_gids: tuple[int, ...] = ()
    numa_node: int | None = None


class Port(msgspec.Struct, frozen=True):
    """A port that the server binds. `problem` says why it cannot."""

    flag: str
    host: str
    port: int
    problem: str | None = None


class Transfer(msgspec.Struct, frozen=True):
    """A measured transfer between two engines of this machine; `problem` if there was none."""

    transport: str
    host: str
    gib_per_s: float | None = None
    problem: str | None = None


class Peer(msgspec.Struct, frozen=True):
    """The result of a handshake with the control port of a prefill server."""

    endpoint: str
    reached: bool
    detail: str
    seconds: float | None = None


class Settings(msgspec.Struct, frozen=True):
    """The settings that the checks compare with the machine."""

    role: Literal["prefill", "decode"] = "decode"
    device: str = "auto"
    transport: str = "auto"
    host: str = "127.0.0.1"
    local_ranks: int = 1
    tp: int = 1
    dp_attention: bool = False
    has_cluster_key: bool = False
    host_memory_bytes: int = 0
    """Host memory that the settings ask for: KV of HiSparse and of retracted requests, KV pools of a CPU server."""
    gid_index: int | None = None


class Facts(msgspec.Struct, frozen=True):
    """One machine and one installation."""

    python: str
    machine: str
    kernel: str
    settings: Settings = Settings()
    torch: str | None = None
    torch_cuda: str | None = None
    """The CUDA release that torch was built for; None for a CPU build."""
    cuda_problem: str | None = None
    """Why torch cannot use a GPU."""
    driver: str | None = None
    """Release of the NVIDIA driver."""
    open_driver: bool = False
    """The open kernel modules, which support dmabuf."""
    gpus: tuple[Gpu, ...] = ()
    c_compiler: bool = True
    mooncake: dict[str, str] = {}
    """Installed wheels and their versions."""
    mooncake_problem: str | None = None
    """Why the wheel does not load."""
    libibverbs: bool = True
    rdma_devices: tuple[RdmaDevice, ...] = ()
    peermem: bool = False
    """The kernel module nvidia_peermem is loaded."""
    memlock_bytes: int | None = None
    """Limit of locked memory; None without one."""
    open_files: int = 1 << 20
    pid_namespace: int = INITIAL_PID_NAMESPACE
    ipc_namespace: int = INITIAL_IPC_NAMESPACE
    in_container: bool = False
    free_bytes: int = 0
    total_bytes: int = 0
    limited_by_cgroup: bool = False
    numa_nodes: int = 1
    numa_nodes_allowed: int = 1
    ports: tuple[Port, ...] = ()
    clock_synchronized: bool | None = True
    """None if the kernel does not say."""
    forbidden_variables: tuple[str, ...] = ()
    model: str | None = None
    """The model of the settings. None if they name none, or one of the Hugging Face Hub, which is not looked up."""
    model_problem: str | None = None
    kv_heads: int | None = None
    """Of the model, which is 1 with latent attention. None if it is not known."""
    has_experts: bool = False
    transfers: tuple[Transfer, ...] = ()
    peers: tuple[Peer, ...] = ()
