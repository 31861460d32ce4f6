"""What a scheduler wants done. It decides with plain integers and returns these; the engine loop carries them out.

Those with an `command_id` go to the ranks, which do them in this order and in line with the steps (`commands.py`).
Those with the number of a `copy` are begun in that line and go on beside the steps (`background_copies.py`).
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from ...memory.index_spaces import HotPage, KvPage, RequestSlot
from ...transfer.data.chunks import ChunkWrite, PartScatter, PartWrite
from ...transfer.protocol.messages import AnyMessage, InstanceId, TransferKey
from .frontend import ToFrontend


@dataclasses.dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a control message, with integer arrays behind it."""

    instance: InstanceId
    message: AnyMessage
    arrays: tuple[Sequence[int], ...] = ()


class SendToFrontend(msgspec.Struct, frozen=True):
    """One for every token: a Struct is made in a tenth of the time that a frozen dataclass takes."""

    message: ToFrontend


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectPeer:
    """A request of `client` names a prefill server that may be new: HOST:PORT."""

    endpoint: str
    client: str = ""


class CopyPage(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Copy the KV of one page to another (a sample's own copy of the prompt's last page)."""

    command_id: int
    source: KvPage
    destination: KvPage


class SavePages(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Copy these pages to host memory under this name (retraction)."""

    copy: int
    rid: str
    pages: tuple[KvPage, ...]


class LoadPages(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Copy what was saved under this name to these pages, and forget it."""

    copy: int
    rid: str
    pages: tuple[KvPage, ...]


class DropPages(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Forget what was saved under this name, once it is saved."""

    rid: str


class OpenHot(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Set up the hot buffer of a request that is let in (HiSparse).

    Its first `tokens` rows are in host memory, in `pages`. Where they fit into `capacity` they are copied; that has the
    number `copy`.
    """

    copy: int | None
    slot: RequestSlot
    hot_pages: tuple[HotPage, ...]
    pages: tuple[KvPage, ...]
    tokens: int
    capacity: int


class ResizeHot(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The hot buffer of a request has these pages and this capacity from now on."""

    slot: RequestSlot
    hot_pages: tuple[HotPage, ...]
    capacity: int


class CancelChunks(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Stop writing for this transfer (prefill); each chunk under way still reports its end."""

    instance: InstanceId
    key: TransferKey


PageEffect = CopyPage | SavePages | LoadPages | DropPages
HotEffect = OpenHot | ResizeHot
StageEffect = PartWrite | PartScatter
Effect = SendToPeer | SendToFrontend | ConnectPeer | PageEffect | HotEffect | StageEffect | ChunkWrite | CancelChunks
"""A ChunkWrite is KV that prefill has computed and decode should get. A PartWrite is a part of it that is staged, and a
PartScatter brings it to its pages; each is for one rank, which does it out of line with the steps.
"""
