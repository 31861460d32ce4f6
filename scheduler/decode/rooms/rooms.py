"""All rooms of a decode scheduler."""

from collections.abc import Sequence

from ...chunking.grammar_queue import GrammarQueue
from ...messages.lifecycle import State
from ..memory.request_memory import RequestMemory
from ..memory.resources import Resources
from ..placement.peers import PrefillPeers
from ..requests.request import Prompt, Request
from .batch import Batch, RequestQueue, SlowMasks
from .computing import Computing
from .prefilling import Prefilling
from .queued import PromptQueue
from .staging import RankRing


class Rooms:
    """A room holds the requests of some states, and never calls up: the transitions move requests between rooms.

    COMPILING                           `compiling`
    QUEUED                              `queued`
    PREFILLING, VERIFYING               `prefilling`; LOADING too, if only its cached prefix is not in its hot buffer
    LOADING, COMPUTING                  `computing`
    ARRIVED, OPENING, READY, RUNNING    `batch`
    SAVING, SAVED                       `retracted`
    RESTORING                           none, until its copy has ended
    """

    def __init__(self, resources: Resources, rings: Sequence[RankRing], peers: PrefillPeers) -> None:
        self.compiling: GrammarQueue[Prompt] = GrammarQueue(resources.outbox)
        self.queued = PromptQueue()
        self.prefilling = Prefilling(resources, rings, peers)
        self.computing = Computing(resources.limits, resources.rates, resources.counters)
        self.batch = Batch(resources.limits, SlowMasks(resources.outbox))
        self.retracted = RequestQueue()
        """In the order in which they get pages."""

    @property
    def queue_length(self) -> int:
        """Prompts that wait for their grammar or in the queue, retracted requests, and requests whose KV is here and
        that do not run.
        """
        return len(self.compiling) + len(self.queued) + len(self.retracted.requests) + self.batch.waiting

    def states_of(self, request: Request, memory: RequestMemory) -> list[State]:
        """The state of a request by the rooms that hold it: one, or the rooms contradict each other."""
        prompt, state, copies = request.prompt, request.state, memory.copies
        waits, local = request in prompt.waiting, prompt.local
        sent = waits and prompt in self.prefilling.prompts.values()
        held_as = (
            (State.COMPILING, waits and prompt in self.compiling),
            (State.QUEUED, waits and prompt in self.queued),
            (state, sent and state in (State.PREFILLING, State.VERIFYING, State.LOADING)),
            (State.LOADING, waits and local in self.computing.prompts and local not in self.computing.queue),
            (State.COMPUTING, waits and local is not None and local in self.computing.queue),
            (State.ARRIVED, request in self.batch.arrived),
            (State.OPENING, request in self.batch.opening and copies.is_in(request, "open")),
            (State.READY, request in self.batch.ready),
            (State.RUNNING, request in self.batch.running),
            (State.SAVING, request in self.retracted and copies.is_in(request, "save")),
            (State.SAVED, request in self.retracted and copies.of(request) is None),
            (State.RESTORING, copies.is_in(request, "restore")),
        )
        return [held for held, is_held in held_as if is_held]
