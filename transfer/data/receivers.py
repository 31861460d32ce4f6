"""The receive engines of one decode rank: one per transport."""

from collections.abc import Sequence

from ...common.errors import StartupError
from ...configs.schema import ServerConfig
from ..mooncake.engine import ReceiveEngine
from ..mooncake.library import Transport
from ..mooncake.sockets import Region
from ..mooncake.transports import open_receiver, places, resolve_transport
from .local_pool import LocalPool, RegisteredMemory


class Receivers:
    """Lets prefill ranks write into this rank's pools and ring. Owns the engines; the memory stays alive until close().

    TCP is always available and serves every pool, nvlink serves pools on a GPU, RDMA serves all. `local_rank` is the
    index of this rank's GPU on its machine. Raises StartupError.
    """

    def __init__(
        self,
        config: ServerConfig,
        pools: Sequence[LocalPool],
        *,
        local_rank: int,
        ring: RegisteredMemory | None = None,
    ) -> None:
        local = resolve_transport(config, local_rank)
        held = [pool.memory for pool in pools] + ([ring] if ring is not None else [])
        memory = [Region(part.base_address, part.registered_bytes) for part in held]
        on_gpu = [region for part, region in zip(held, memory, strict=True) if part.on_gpu]
        if config.transport == "nvlink" and not on_gpu:
            raise StartupError(
                "transport nvlink moves KV between GPUs; the KV pool is in host memory: use --transport tcp"
            )
        wanted: list[tuple[Transport, list[Region]]] = [("tcp", memory)]
        if config.transport in ("auto", "nvlink") and on_gpu:
            wanted.append(("nvlink", on_gpu))
        if local.rdma_devices:
            wanted.append(("rdma", memory))
        self._engines: dict[Transport, ReceiveEngine] = {}
        try:
            for transport, regions in wanted:
                where = "GPU memory" if transport == "nvlink" else places(part.on_gpu for part in held)
                engine = open_receiver(transport, local, regions, where)
                if engine is not None:
                    self._engines[transport] = engine
        except StartupError:
            self.close()
            raise

    @property
    def sessions(self) -> dict[Transport, str]:
        """The address of each engine, for the announcement of the rank."""
        return {transport: engine.session for transport, engine in self._engines.items()}

    def close(self) -> None:
        """Stop receiving. Afterwards no peer writes into the pools. May be called twice."""
        for engine in self._engines.values():
            engine.close()
