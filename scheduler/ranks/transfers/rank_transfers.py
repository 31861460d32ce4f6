"""The KV transfers of one rank: a prefill rank writes chunks, a decode rank receives them."""

from collections.abc import Callable, Sequence

from ....configs.schema import DecodeConfig, PrefillConfig
from ....memory.ring_memory import RingMemory, may_stage, ring_bytes
from ....transfer.data.chunk_writer import ChunkWriter
from ....transfer.data.chunks import ChunkWrite, ChunkWritten, PartWrite
from ....transfer.data.local_pool import LocalPool
from ....transfer.data.part_scatterer import PartScatterer
from ....transfer.data.receivers import Receivers
from ....transfer.plan.staged_regions import STAGED_KIND
from ...messages.ranks import (
    CancelChunks,
    ChunkReport,
    ClosePeer,
    OpenPeer,
    PartReport,
    PartScattered,
    PeerRoutes,
    RankFailed,
    RankReport,
)
from .early_writes import EarlyWrites


class PrefillTransfers:
    """Writes the chunks of a prefill rank. `peer_rank` is the number of `rank` for peers."""

    def __init__(
        self,
        config: PrefillConfig,
        pools: Sequence[LocalPool],
        rank: int,
        report: Callable[[RankReport], None],
        *,
        peer_rank: int,
        local_rank: int,
    ) -> None:
        def on_written(written: ChunkWritten) -> None:
            report(ChunkReport(rank, written))

        self.writer = ChunkWriter(
            peer_rank,
            pools,
            config,
            local_rank=local_rank,
            on_written=on_written,
            on_part_written=lambda written: report(PartReport(rank, written)),
            on_routed=lambda *routes: report(PeerRoutes(rank, *routes)),
        )
        self.early_writes = EarlyWrites(self.writer.write, on_written)

    def run(self, command: ChunkWrite | PartWrite | CancelChunks | OpenPeer | ClosePeer) -> None:
        """Start, cancel or prepare writes. Does not wait for them."""
        match command:
            case PartWrite():
                self.writer.write_part(command)
            case ChunkWrite():
                if command.after is None:
                    self.writer.write(command)
                else:
                    self.early_writes.add(command)
            case CancelChunks(instance=instance, key=key):
                self.early_writes.cancel(instance, key)
                self.writer.cancel(instance, key)
            case OpenPeer(hello=hello, welcome=welcome):
                self.writer.open(hello, welcome)
            case ClosePeer(instance=instance):
                self.writer.close(instance)

    def close(self) -> None:
        self.writer.close_all()


class DecodeTransfers:
    """The receive engines of a decode rank, and its staging ring if the KV has heads (`kv_heads` in the whole model).
    The ring is registered before peers know this rank.
    """

    def __init__(
        self,
        config: DecodeConfig,
        pools: Sequence[LocalPool],
        rank: int,
        report: Callable[[RankReport], None],
        *,
        kv_heads: int,
        local_rank: int,
    ) -> None:
        self.ring: RingMemory | None = None
        self.scatterer: PartScatterer | None = None
        dense = next((pool for pool in pools if pool.layout.kind == STAGED_KIND), None)
        if dense is not None and may_stage(config, kv_heads):
            self.ring = RingMemory(ring_bytes(config, dense.layout.token_bytes), dense.memory.data.device)
            self.scatterer = PartScatterer(
                self.ring.data,
                dense.memory.data,
                dense.layout,
                on_scattered=lambda part: report(PartScattered(rank, part)),
                on_failed=lambda reason: report(RankFailed(rank, reason)),
            )
        self.receivers = Receivers(config, pools, local_rank=local_rank, ring=self.ring)

    def close(self) -> None:
        self.receivers.close()
        if self.scatterer is not None:
            self.scatterer.close()
