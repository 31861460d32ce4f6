"""Whose work is next, of clients whose work waits for something that does one piece after another."""

from collections import OrderedDict
from typing import Generic, TypeVar

MOST_OVERTAKEN = 16
"""Work that so many cheaper pieces of its client have overtaken is next."""

WorkT = TypeVar("WorkT")


class Turns(Generic[WorkT]):
    """Turns go round the clients, and each client's cheapest work is first. Several clients may wait for the same work:
    it is done in the first of their turns.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, dict[WorkT, int]] = OrderedDict()
        """The work of each client, oldest first, and how often it was overtaken. The first client is next."""
        self._costs: dict[WorkT, int] = {}

    def __len__(self) -> int:
        return len(self._costs)

    def __contains__(self, work: WorkT) -> bool:
        return work in self._costs

    def add(self, client: str, work: WorkT, cost: int) -> None:
        self._costs[work] = cost
        self._clients.setdefault(client, {}).setdefault(work, 0)

    def take(self, without: set[str]) -> tuple[str, WorkT] | None:
        """The next work, which waits no longer, and its client; none of the clients `without`."""
        client = next((client for client in self._clients if client not in without), None)
        if client is None:
            return None
        waiting = self._clients[client]
        oldest, overtaken = next(iter(waiting.items()))
        work = oldest if overtaken >= MOST_OVERTAKEN else min(waiting, key=self._costs.__getitem__)
        for other in waiting:
            if other is work:
                break
            waiting[other] += 1
        self._clients.move_to_end(client)
        self.remove(work)
        return client, work

    def remove(self, work: WorkT) -> None:
        del self._costs[work]
        for client in [client for client, waiting in self._clients.items() if work in waiting]:
            del self._clients[client][work]
            if not self._clients[client]:
                del self._clients[client]

    def costliest_of_another(self, client: str) -> WorkT | None:
        """The costliest work of the client with most of it, to make room for one more of `client`; None if `client` has
        as much.
        """
        most = max(self._clients, key=lambda one: len(self._clients[one]), default=client)
        if len(self._clients.get(most, ())) <= len(self._clients.get(client, ())) + 1:
            return None
        return max(self._clients[most], key=self._costs.__getitem__)
