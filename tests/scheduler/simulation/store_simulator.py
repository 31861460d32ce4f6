"""A simulated decode server with a KV store that loses, refuses, delays and damages what it holds."""

import collections
import random
from typing import Any

from pdserve.scheduler.messages.effects import Effect
from pdserve.scheduler.messages.ranks import StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten
from pdserve.scheduler.store.kv_store import StoreLimits, root_of
from tests.scheduler.simulation.simulator import PAGE_SIZE, Prefix, Simulator

BLOCK = 6
"""Tokens of a block here; tests set it in `kv_store`. Blocks and pages begin at different tokens, and prompts of 22
tokens have several.
"""
TIMEOUT_S = 1.0


class StoreSimulator(Simulator):
    """Stored blocks have the prefix of each of their rows. Loads and writes end at any later time, as whole blocks."""

    def __init__(self, seed: int, *, damage: float = 0.15, **options: Any) -> None:
        """`damage`: how likely a block is damaged when it is loaded."""
        super().__init__(**options, store=StoreLimits(root_of("model"), PAGE_SIZE, ranks=1, timeout_s=TIMEOUT_S))
        assert self.decode.kv_store is not None
        self.store = self.decode.kv_store
        self.values: dict[bytes, tuple[Prefix, ...]] = {}
        self.store_commands: collections.deque[StoreLoad | StoreWrite | StorePing] = collections.deque()
        self.store_seen: collections.Counter[str] = collections.Counter()
        self._chance = random.Random(seed)
        self._damage = damage

    def _of_decode(self, effect: Effect) -> None:
        if isinstance(effect, StoreWrite | StorePing):
            self.store_commands.append(effect)
        elif isinstance(effect, StoreLoad):
            self.commands.append(effect)  # begins after the steps before it
        else:
            super()._of_decode(effect)

    def rank_turn(self, eos: bool, *, fail: bool = False) -> None:
        if self.commands and isinstance(self.commands[0], StoreLoad):
            self.store_commands.append(self.commands[0])
            self.commands.popleft()
        else:
            super().rank_turn(eos, fail=fail)

    def store_turn(self) -> None:
        """The store carries out one of its commands; a load and a write run at the same time."""
        if not self.store_commands:
            return
        at = self._chance.randrange(len(self.store_commands))
        command = self.store_commands[at]
        del self.store_commands[at]
        match command:
            case StorePing():
                self.store.handle(StorePinged(0, self._problem(0.2)), self.now)
            case StoreWrite():
                self._store_write(command)
            case StoreLoad():
                self._store_load(command)
        self.act()

    def _problem(self, probability: float) -> str | None:
        return "the store does not answer" if self._chance.random() < probability else None

    def _store_write(self, command: StoreWrite) -> None:
        """Asserts that the pages still have the KV of their blocks."""
        for number, block in enumerate(command.blocks):
            start = command.offset + number * BLOCK
            rows = [(command.pages[at // PAGE_SIZE], at % PAGE_SIZE) for at in range(start, start + BLOCK)]
            value = tuple(self._in_host(row) for row in rows)
            assert value == tuple(self.memory[row] for row in rows), "keys and rows of different tokens are written"
            assert len({len(prefix) for prefix in value}) == BLOCK, "the pages of a write were overwritten"
            if self._chance.random() < 0.9:
                self.values.setdefault(block, value)
        self.store_seen["written"] += 1
        count = len(command.blocks)
        self.store.handle(StoreWritten(0, command.number, count, count, self._problem(0.02)), self.now)

    def _store_load(self, command: StoreLoad) -> None:
        """Load the blocks in order, up to the first that is lost or damaged."""
        loaded = corrupt = 0
        for block in command.blocks:
            value = self.values.get(block)
            if value is None:
                break
            if self._chance.random() < self._damage:
                corrupt = 1
                del self.values[block]
                break
            start = command.offset + loaded * BLOCK
            for at, prefix in enumerate(value):
                if loaded or at >= command.skip:
                    position = start + at
                    self._write((command.pages[position // PAGE_SIZE], position % PAGE_SIZE), prefix)
            loaded += 1
        problem = self._problem(0.03)
        self.store_seen["loaded"] += bool(loaded)
        self.store_seen["damaged"] += corrupt
        self.decode.handle(StoreLoaded(0, command.number, loaded, 0.001, loaded, corrupt, problem), self.now)

    def work_ranks(self, *, eos: bool = False) -> None:
        while self.commands or self.copies or self.store_commands:
            self.rank_turn(eos=eos)
            self.copy_turn()
            self.store_turn()
