"""The counters of the schedulers, by their names in /metrics. All exist from the start, with value 0."""

STORE_COUNTERS = (
    "store_lookups",
    "store_tokens_loaded",
    "store_bytes_loaded",
    "store_corrupt_cells",
    "store_skipped_as_slow",
    "store_loads_late",
    "store_blocks_written",
    "store_bytes_written",
    "store_blocks_dropped",
    "store_blocks_refused",
    "store_outages",
)
"""Of servers with a KV store."""

FIRST_TOKEN_STAGES = ("queue", "prefill_queue", "prefill", "transfer", "control", "admit")
"""Stages of a request before its first token. The longest is the cause of a late one."""
GAP_CAUSES = ("prompts", "steps", "admit", "retracted", "grammar")

COMMON_COUNTERS = (
    "requests",
    "requests_refused",
    "requests_finished",
    "requests_failed",
    "requests_aborted",
    "transfer_bytes",
    "path_bytes_device",
    "path_bytes_host",
    "transfer_writes",
    "chunks",
    "staged_parts",
    "staged_bytes",
    "prompt_tokens",
    "prefix_tokens_reused",
    "prefix_waits",
    "steps_failed",
    "stale_messages",
    "event_errors",
    "effect_errors",
    "integrity_errors",
)
"""Of both roles."""

DECODE_COUNTERS = (
    *COMMON_COUNTERS,
    "grammars_too_complex",
    "masks_prepared",
    "redispatches",
    "dispatch_prefix",
    "dispatch_load",
    "dispatch_tokens_expected",
    "dispatch_tokens_reused",
    "local_prefill_always",
    "local_prefill_absent",
    "local_prefill_failed",
    "local_prefill_refused",
    "local_prefill_short",
    "local_prefill_late",
    "local_prefill_shared_device",
    "remote_prefill_never",
    "remote_prefill_unmeasured",
    "remote_prefill_on_time",
    "remote_prefill_late",
    "remote_prefill_hot_rows",
    "retractions",
    "retractions_recomputed",
    "overtakes",
    "prompts_moved",
    "transfers",
    "transfers_failed",
    "kv_path_device_resident",
    "kv_path_host_peer",
    "kv_path_host_samples",
    "kv_path_host_one_token",
    "kv_path_host_hot_rows",
    "kv_path_host_in_use",
    "chunks_verified",
    "checksum_errors",
    "generation_tokens",
    "decode_steps",
    "late_steps",
    *(f"late_first_token_{stage}" for stage in FIRST_TOKEN_STAGES),
    *(f"late_gap_{cause}" for cause in GAP_CAUSES),
    "peers_lost",
    "hot_hits",
    "hot_misses",
    "hot_bytes_swapped_in",
    "hot_write_backs",
)

TRANSPORTS = ("tcp", "nvlink", "rdma")
PREFILL_COUNTERS = (
    *COMMON_COUNTERS,
    *("staged_grants_waited", "prefill_steps"),
    *(f"transport_bytes_{transport}" for transport in TRANSPORTS),
)
