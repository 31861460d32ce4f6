"""The limits of a decode server."""

import dataclasses

from ....configs.schema import DispatchSetting, LocalPrefillSetting

MAX_ATTEMPTS = 2
"""One attempt and one retry, into fresh pages, on another prefill server if there is one."""


@dataclasses.dataclass(frozen=True)
class DecodeLimits:
    """The limits of a decode scheduler."""

    page_size: int
    max_running_requests: int
    max_queued_requests: int
    growth_tokens: int
    retract_pages: int
    queue_timeout_s: float
    prefill_wait_s: float
    prefill_timeout_s: float
    request_timeout_s: float
    quarantine_s: float
    verify_kv: bool = False
    prefix_cache: bool = True
    hisparse: bool = False
    stages: int = 1
    """Pipeline stages: the number of batches in flight, each of different requests."""
    overlap: bool = False
    """Overlap scheduling, with one stage: the next step starts before the tokens of the last one are known."""
    dispatch: DispatchSetting = "prefix"
    local_prefill: LocalPrefillSetting = "never"
    max_step_tokens: int = 256
    """Prompt tokens that a step computes, if this server computes prompts."""
    itl_target_s: float | None = None
    """Longest step with prompt tokens; 0 is no limit, None follows the time of a decode step."""
