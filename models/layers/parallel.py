"""Communication between the ranks of a server during computation.

Within a stage, tensor-parallel ranks sum their parts of a result and gather their parts of the logits
(stage_collectives.py); with data-parallel attention, they exchange rows instead (token_exchange.py). Between stages,
each rank sends hidden states to the rank of the same `tp_rank` in the next stage. All ranks make the same calls in the
same order.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch does not mark it so

from ...common.errors import StartupError
from ..config.sharding import WHOLE, Shard
from .stage_collectives import StageCollectives, choose_collectives

log = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]

_MOST_SENDS = 4
"""Hidden states in flight to the next stage; beyond this number the sender waits, because the next stage is slower."""


class Parallel:
    """A rank's shard and its connections to the others. With a single rank (`ALONE`) every method returns at once, and
    torch.distributed is not needed.

    NCCL enqueues on the CUDA stream and needs a GPU per rank. gloo blocks; stages that share a GPU send hidden states
    over it, through host memory.
    """

    def __init__(self, shard: Shard, *, device: torch.device | None = None, backend: Backend = "gloo") -> None:
        """For WHOLE; all others are made by `connect`."""
        self.shard = shard
        self._device = device or torch.device("cpu")
        self._nccl = backend == "nccl"
        self._through_host = backend == "gloo" and self._device.type != "cpu"
        """gloo does not send tensors of a GPU."""
        self._control_device = self._device if backend == "nccl" else torch.device("cpu")
        self._stage: StageCollectives | None = None
        """None for a stage of a single rank, and with data-parallel attention."""
        self._stage_group: dist.ProcessGroup | None = None
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.waited_s = 0.0
        """Time spent waiting for the previous stage (gloo; NCCL waits on the device)."""

    @classmethod
    def connect(
        cls,
        shard: Shard,
        *,
        store_host: str,
        store_port: int,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
    ) -> "Parallel":
        """Join the process group at `store_host`:`store_port`, where rank 0 listens.

        Raises StartupError if not all ranks join within `timeout_s`, which is also the timeout of later collectives. A
        process can be one rank at a time.
        """
        parallel = cls(shard, device=device, backend=backend)
        if shard.world_size == 1:
            return parallel
        if parallel._through_host:
            log.warning("several ranks share %s: slow, for tests only", device)
        timeout = timedelta(seconds=timeout_s)
        try:
            if backend == "gloo":
                _choose_gloo_interface(store_host, store_port)
            listening = None
            if shard.rank == 0:
                listening = listen(store_host, store_port).detach()
            dist.init_process_group(
                backend,
                store=_open_store(shard, store_host, store_port, listening, timeout),
                rank=shard.rank,
                world_size=shard.world_size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
            parallel._make_groups()
            if listening is not None and backend == "gloo":  # NCCL's threads may connect to the store later
                _close_listener(listening)
        except (OSError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
            if dist.is_initialized():
                dist.destroy_process_group()
            raise StartupError(
                f"rank {shard.rank} of {shard.world_size} could not join the process group at "
                f"{store_host}:{store_port} within {timeout_s:g} s: {(str(error) or repr(error)).splitlines()[0]}"
            ) from error
        return parallel

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the collectives of a stage. Transfers between stages are never captured."""
        return self.shard.tp_size == 1 or (self._stage is not None and self._stage.on_device)

    @property
    def on_device(self) -> bool:
        """Whether all communication is enqueued on the device; otherwise some of it blocks."""
        within_stage = self._nccl if self.shard.dp_attention else self.capturable
        return within_stage and (self.shard.stages == 1 or self._nccl)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the stage, in place."""
        if self.shard.attention.tp_size > 1:
            assert self._stage is not None, "several ranks are made by `connect`"
            self._stage.all_reduce(tensor)
        return tensor

    def gather_last_dim(self, tensor: torch.Tensor, size: int | None = None) -> torch.Tensor | None:
        """Gather equal parts of the stage's ranks on tp_rank 0, cut to `size` if given; None on the others."""
        gathered: torch.Tensor | None = tensor
        if self._stage is not None:
            gathered = self._stage.gather(tensor.contiguous())
        if gathered is None:
            return None
        return gathered if size is None or size == gathered.shape[-1] else gathered[..., :size].contiguous()

    def broadcast_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` of the stage's tp_rank 0 to all its ranks, in place."""
        if self._stage is not None:
            self._stage.broadcast(tensor)
        return tensor

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a collective on the device has given up waiting for a rank. Does not wait."""
        if self._stage is not None:
            self._stage.check()

    def start_serving(self) -> None:
        """From now on, collectives have a short timeout, and a late rank counts as lost. Called by all ranks when they
        are ready.
        """
        if self._stage is not None:
            self._stage.start_serving()

    def exchange_rows(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """All-to-all of the stage's ranks: the first `sent[0]` of the rows go to tp_rank 0, the next `sent[1]` to
        tp_rank 1, ...; returns the rows of all ranks for this one, `received[0]` of tp_rank 0 first.
        """
        device = torch.device("cpu") if self._through_host else self._device
        result = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype, device=device)
        rows = rows.to(device).contiguous()
        dist.all_to_all_single(result, rows, list(received), list(sent), group=self._stage_group)
        return result.to(self._device)

    def send_hidden(self, tensor: torch.Tensor) -> None:
        """Send `tensor` to the next stage without waiting. The caller must not change `tensor` any more."""
        while self._sends and (len(self._sends) >= _MOST_SENDS or self._sends[0][0].is_completed()):
            self._sends.popleft()[0].wait()
        tensor = (tensor.cpu() if self._through_host else tensor).contiguous()
        work = dist.isend(tensor, dst=self.shard.rank + self.shard.tp_size)
        assert work is not None, "the next stage is part of the group"
        self._sends.append((work, tensor))

    def receive_hidden(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Receive [rows, width] from the previous stage."""
        device = torch.device("cpu") if self._through_host else self._device
        tensor = torch.empty(rows, width, dtype=dtype, device=device)
        started = time.monotonic()
        dist.recv(tensor, src=self.shard.rank - self.shard.tp_size)
        self.waited_s += time.monotonic() - started
        return tensor.to(self._device)

    def agree_minimum(self, value: int) -> int:
        """The minimum of the values of all ranks of the server."""
        if self.shard.world_size == 1:
            return value
        tensor = torch.tensor(value, device=self._control_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def close(self) -> None:
        """Leave the group, after the next stage has received all data. No method may be called afterwards."""
        if self.shard.world_size == 1:
            return
        with suppress(RuntimeError):  # a peer that is gone receives nothing any more
            for work, _ in self._sends:
                work.wait()
            if self._stage is not None and self._stage.on_device:
                torch.cuda.synchronize(self._device)
                self.agree_minimum(0)  # a barrier: no rank reads the memory of another one any more
                self._stage.close()
        self._sends.clear()
        dist.destroy_process_group()

    def _make_groups(self) -> None:
        shard = self.shard
        if shard.tp_size > 1:
            for stage in range(shard.stages):  # every rank must take part in making every group
                ranks = list(range(stage * shard.tp_size, (stage + 1) * shard.tp_size))
                group = dist.new_group(ranks)
                if stage == shard.stage:
                    self._stage_group = group
            if not shard.dp_attention:
                self._stage = choose_collectives(self._stage_group, shard, self._device, nccl=self._nccl)
        # connections are made on first use: without this, the first send would wait for the receiver
        if not shard.first:
            self.receive_hidden(1, 1, torch.float32)
        if not shard.last:
            self.send_hidden(torch.zeros(1, 1, device=self._device))
        self.agree_minimum(0)


ALONE = Parallel(WHOLE)
"""The communication of a server with a single rank: none."""


def nccl_available() -> bool:
    """Whether this build of torch has NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def listen(host: str, port: int) -> socket.socket:
    """The socket on which rank 0 accepts the others, at a port that may be reserved; 0: a free one. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, reuse_port=True)


def reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps a port, for `listen` in another process of the same user. It accepts no connections. Raises
    OSError.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


def _open_store(shard: Shard, host: str, port: int, listening: int | None, timeout: timedelta) -> TCPStore:
    """Rank 0 listens on `host` only: by default it would listen on every interface, without authentication."""
    if listening is None:
        return TCPStore(host, port, shard.world_size, is_master=False, timeout=timeout)
    return TCPStore(
        host,
        port,
        shard.world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _close_listener(listening: int) -> None:
    """Stop listening once all ranks have joined: the store would accept and keep data of unauthenticated peers. It
    continues to serve its connections. The store closes the descriptor itself, so it now refers to an unused socket.
    """
    with socket.socket() as unused:
        os.dup2(unused.fileno(), listening)


def _choose_gloo_interface(store_host: str, store_port: int) -> None:
    """Let gloo listen on the interface that reaches the store, unless the user set GLOO_SOCKET_IFNAME.

    By default gloo uses what the host name resolves to: often nothing, or an address that other machines cannot reach.
    """
    family, *_, address = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel only picks the route
        local = ipaddress.ip_address(probe.getsockname()[0])
    for _, name in socket.if_nameindex():
        if local == _ipv4_address(name) or (local.is_loopback and name == "lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _ipv4_address(interface: str) -> ipaddress.IPv4Address | None:
    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, get_address, struct.pack("256s", interface.encode()))
        except OSError:  # the interface has no address
            return None
    return ipaddress.IPv4Address(answer[20:24])
