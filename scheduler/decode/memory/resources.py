"""What all parts of a decode scheduler use: its limits, its memory, its measured rates, its counters and its outbox."""

import collections
import dataclasses

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator
from ....memory.prefix_cache import PrefixCache
from ...messages.effects import Outbox
from ...rates import Rates
from ...store.kv_store import KvStore
from ..requests.limits import DecodeLimits
from ..requests.request import LocalPrompt
from .request_memory import RequestMemory


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """Made by the scheduler, which passes it to its parts."""

    limits: DecodeLimits
    allocator: PageAllocator[KvPage]
    cache: PrefixCache
    memory: RequestMemory
    kv_store: KvStore[LocalPrompt] | None
    counters: collections.Counter[str]
    outbox: Outbox
    rates: Rates = dataclasses.field(default_factory=Rates)
