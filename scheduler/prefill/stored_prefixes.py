"""Prompts of a prefill server and the KV store: loads prefixes before they are computed, offers computed pages."""

import collections

from ...memory.prefix_cache import PrefixCache
from ..messages.lifecycle import PrefillState
from ..messages.ranks import StoreLoaded, StorePinged, StoreWritten
from ..store.kv_store import KvStore
from .request import PrefillRequest


class StoredPrefixes:
    """The LOADING requests, and the store."""

    def __init__(
        self,
        store: KvStore[PrefillRequest],
        cache: PrefixCache,
        counters: "collections.Counter[str]",
    ) -> None:
        self.store = store
        self.loading: set[PrefillRequest] = set()
        self._cache = cache
        self._counters = counters

    def load(self, request: PrefillRequest, most: int, tokens_per_s: float | None) -> bool:
        """Start to load what the store has of the first `most` tokens of a request that has its pages. Returns False if
        no load was started.
        """
        request.chain = self.store.new_chain()
        begun = self.store.load(
            request,
            request.chain,
            request.prompt,
            request.granted.pages,
            cached=request.cached,
            freed=request.granted.freed,
            most=most,
            tokens_per_s=tokens_per_s,
        )
        if begun:
            self.loading.add(request)
        return begun

    def handle(self, report: StoreLoaded | StoreWritten | StorePinged, now: float) -> PrefillRequest | None:
        """Take the report of a rank. Returns the request if the last rank has ended its load."""
        loaded = self.store.handle(report, now)
        if loaded is None:
            return None
        request = loaded.owner
        self.loading.discard(request)
        tokens = loaded.tokens
        if request.state is PrefillState.LOADING and tokens > request.cached:
            request.stored = tokens - request.cached
            request.cached = tokens
            self._counters["store_tokens_loaded"] += request.stored
            grant = request.granted
            self._cache.insert(request.prompt, grant.pages, request.inserted, end=tokens, freed=grant.freed)
        return request

    def offer(self, request: PrefillRequest) -> None:
        """Pages of a request were inserted in the prefix cache: offer them to the store."""
        assert request.chain is not None, f"{request.ref} was computed without a chain of blocks"
        self.store.offer(request.chain, request.prompt, request.inserted)
