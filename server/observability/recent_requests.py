"""Keeps the last ended requests of a server for /server_info: outcome and time of each stage, no prompts or outputs."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from ...scheduler.messages.frontend import Failed, Finished

KEPT = 32
PROBE_PREFIX = "health-"
"""Prefix of the rids of requests that /health_generate makes."""


class RecentRequest(TypedDict):
    rid: str
    ended_at: Annotated[float, Field(description="Unix time.")]
    outcome: Annotated[str, Field(description="stop, length, or the code of an error.")]
    elapsed_s: float
    prompt_tokens: int
    cached_tokens: Annotated[int, Field(description="0 if the request failed.")]
    completion_tokens: int
    kv_path: str
    timeline: Annotated[Mapping[str, float], Field(description="Seconds in each stage, in order.")]


class RecentRequests:
    """The last KEPT requests that have ended, the newest last."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Finished | Failed, float, float, int, int]] = deque(maxlen=KEPT)

    def add(self, end: Finished | Failed, elapsed_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """`output_tokens` is the number of tokens that have arrived. The message of a failed request has no counts."""
        if not end.rid.startswith(PROBE_PREFIX):  # probes may come every few seconds
            self._ended.append((end, time.time(), elapsed_s, prompt_tokens, output_tokens))

    def list(self) -> list[RecentRequest]:
        return [_shown(*entry) for entry in self._ended]


def _shown(
    end: Finished | Failed, ended_at: float, elapsed_s: float, prompt_tokens: int, output_tokens: int
) -> RecentRequest:
    done = end if isinstance(end, Finished) else None
    return {
        "rid": end.rid,
        "ended_at": ended_at,
        "outcome": end.code if isinstance(end, Failed) else end.reason.type,
        "elapsed_s": elapsed_s,
        "prompt_tokens": done.prompt_tokens if done else prompt_tokens,
        "cached_tokens": done.cached_tokens if done else 0,
        "completion_tokens": done.completion_tokens if done else output_tokens,
        "kv_path": done.kv_path if done else "",
        "timeline": done.timeline if done else {},
    }
