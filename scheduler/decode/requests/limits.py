"""The limits of a decode server."""

import dataclasses

from ....common.arithmetic import ceil_div
from ....configs.schema import DecodeConfig
from ....configs.setting_types import DispatchSetting, LocalPrefillSetting
from ...chunking.step_rule import LIMIT_STEPS, SLO_TTFT_S

MAX_ATTEMPTS = 2
"""One attempt and one retry, into fresh pages, on another prefill server if there is one."""

GPU_ITL_S = 0.050
CPU_ITL_S = 0.500
"""Limits on the time between tokens that suit most loads, on a GPU and on a CPU."""


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
    ranks: int = 1
    """Each of them reports what it has done."""
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
    slo_ttft_s: float = SLO_TTFT_S
    slo_itl_s: float | None = None
    """Longest time between tokens while this server computes prompts; 0 is no limit, None chooses one."""
    auto_itl_s: float = GPU_ITL_S
    """The smallest that is chosen."""
    window: int | None = None
    """The sliding window if all layers of the model have it. Requests hold no pages behind it."""

    def describe_gap_limit(self) -> str:
        """The limit on the time between tokens while prompts are computed beside them, and where it comes from."""
        if self.slo_itl_s is None:
            least_ms = round(1000 * self.auto_itl_s)
            return f"at most {least_ms} ms between tokens, or {LIMIT_STEPS:g} decode steps if longer (slo_itl_ms: auto)"
        if not self.slo_itl_s:
            return "no limit on the time between tokens (slo_itl_ms)"
        return f"at most {1000 * self.slo_itl_s:g} ms between tokens (slo_itl_ms)"

    @classmethod
    def of(
        cls,
        config: DecodeConfig,
        *,
        max_running_requests: int,
        retract_pages: int,
        overlap: bool,
        max_step_tokens: int,
        on_gpu: bool,
        window: int | None,
    ) -> "DecodeLimits":
        """The limits of each engine of a server. What the ranks have chosen replaces the settings."""
        return cls(
            page_size=config.page_size,
            max_running_requests=max_running_requests,
            max_queued_requests=ceil_div(config.max_queued_requests, config.dp_size),
            growth_tokens=config.growth_tokens,
            retract_pages=retract_pages,
            queue_timeout_s=config.queue_timeout_s,
            prefill_wait_s=config.prefill_wait_s,
            prefill_timeout_s=config.prefill_timeout_s,
            request_timeout_s=config.request_timeout_s,
            quarantine_s=config.quarantine_s,
            verify_kv=config.verify_kv,
            ranks=config.world_size // config.dp_size,
            prefix_cache=config.prefix_cache,
            hisparse=config.enable_hisparse,
            stages=config.pp,
            overlap=overlap,
            dispatch=config.dispatch,
            local_prefill=config.local_prefill,
            max_step_tokens=max_step_tokens,
            slo_ttft_s=config.slo_ttft_ms / 1000,
            slo_itl_s=config.slo_itl_ms / 1000 if config.slo_itl_ms is not None else None,
            auto_itl_s=GPU_ITL_S if on_gpu else CPU_ITL_S,
            window=window,
        )
