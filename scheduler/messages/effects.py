"""Effects: what a scheduler decides. The engine loop performs them in order.

There are three kinds: a message to a peer or to the frontend, a connection to a prefill server, and a command for the
ranks (`ranks.py`). A command is an effect without a wrapper.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from ...transfer.data.chunks import ChunkWrite
from ...transfer.protocol.messages import AnyMessage, InstanceId
from .frontend import ToFrontend
from .ranks import CancelChunks, GrammarCommand, HotCommand, PageCommand, PartCommand, StoreCommand, VerifyKv


@dataclasses.dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a control message, followed by integer arrays. One that is `bytes` is sent as it is."""

    instance: InstanceId
    message: AnyMessage
    arrays: tuple[Sequence[int], ...] = ()


class SendToFrontend(msgspec.Struct, frozen=True):
    """Send a message to the frontend. There is one per token, so this is a Struct: to create one takes a tenth of the
    time of a frozen dataclass.
    """

    message: ToFrontend


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectPeer:
    """A request of `client` names a prefill server (HOST:PORT) that may be new."""

    endpoint: str
    client: str = ""


Effect = (
    SendToPeer
    | SendToFrontend
    | ConnectPeer
    | PageCommand
    | HotCommand
    | VerifyKv
    | PartCommand
    | ChunkWrite
    | CancelChunks
    | StoreCommand
    | GrammarCommand
)


Outbox = list[Effect]
"""What a scheduler has decided on, in order: it passes one outbox to all its parts."""
