"""Control messages of the staged path, where prefill and decode share heads out differently.

  P -> D  StageRequest, StageArrived, StageStopped
  D -> P  StageGrant, StageFree

A part goes StageRequest -> StageGrant -> (one write) -> StageArrived -> (scatter) -> StageFree. A part that is given up
goes to StageStopped -> StageFree from wherever it is. A part is named by its content and by the life of the ring it is
for, so every message can be repeated or late: the same request is answered with the same region, and what concerns a
part that is over, or of an earlier life, is answered with StageFree.
"""

import msgspec

from .messages import Message, TransferKey


class StageBlock(msgspec.Struct, array_like=True, frozen=True):
    """The layers and heads of a link: half-open ranges, global."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def cells(self) -> int:
        """Heads over all layers."""
        return (self.layer_end - self.layer_start) * (self.head_end - self.head_start)


class StagePart(msgspec.Struct, array_like=True, frozen=True):
    """What one write into a ring carries: tokens [token_start, token_end) of a block, from one rank to another.

    `epoch` is that of the destination's ring, from its Hello.
    """

    epoch: int
    key: TransferKey
    writer: int
    destination: int
    block: StageBlock
    token_start: int
    token_end: int

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    def __str__(self) -> str:
        return f"tokens [{self.token_start}, {self.token_end}) of transfer {self.key} from rank {self.writer}"


class StageRequest(Message, frozen=True):
    """Prefill asks for room in the ring of decode rank `part.destination`, ahead of computing the part."""

    part: StagePart
    size_bytes: int


class StageGrant(Message, frozen=True):
    """[offset, offset + size_bytes of the request) of the ring belongs to this part until its writer's last word."""

    part: StagePart
    region: int
    offset: int


class StageArrived(Message, frozen=True):
    """The part is in its region, complete, and its writer is done with it."""

    part: StagePart
    region: int


class StageStopped(Message, frozen=True):
    """The part will not come: its writer writes nothing more. With `late_writes`, bytes under way may still land."""

    part: StagePart
    late_writes: bool = False


class StageFree(Message, frozen=True):
    """The part is over on decode: scattered, given up or unknown. What was granted for it is the writer's no more."""

    part: StagePart


StageMessage = StageRequest | StageGrant | StageArrived | StageStopped | StageFree
