"""What a scheduler wants done. It decides with plain integers and returns these; the engine loop carries them out."""

import dataclasses
from collections.abc import Sequence

from ..transfer.messages import AnyMessage, InstanceId, TransferKey
from .front import ToFront


@dataclasses.dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a control message, with integer arrays behind it."""

    instance: InstanceId
    message: AnyMessage
    arrays: tuple[Sequence[int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SendToFront:
    message: ToFront


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectPeer:
    """A request names a prefill server that may be new: HOST:PORT."""

    endpoint: str


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy the KV of one page to another (a sample's own copy of the prompt's last page)."""

    source: int
    destination: int


@dataclasses.dataclass(frozen=True, slots=True)
class SavePages:
    """Copy these pages to host memory under this name; they have other owners right after (retraction)."""

    rid: str
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPages:
    """Copy what was saved under this name to these pages, and forget it."""

    rid: str
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DropPages:
    """Forget what was saved under this name."""

    rid: str


@dataclasses.dataclass(frozen=True, slots=True)
class SendChunk:
    """Write KV of tokens [token_start, token_end) into decode's memory (prefill)."""

    instance: InstanceId
    key: TransferKey
    token_start: int
    token_end: int
    source_pages: tuple[int, ...]
    destination_indices: Sequence[int]
    granularity: str
    prefix_tokens: int
    verify: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CancelChunks:
    """Stop writing for this transfer; each chunk under way still reports its end."""

    instance: InstanceId
    key: TransferKey


Effect = (
    SendToPeer | SendToFront | ConnectPeer | CopyPage | SavePages | LoadPages | DropPages | SendChunk | CancelChunks
)
