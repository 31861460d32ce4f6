"""The metrics that the leader reports: maps the name of each in Status to the exported name, labels and HELP text.

Exported names follow Prometheus' rules: base units (seconds, bytes, ratio), `_total` for counters, and labels for the
differences between series of one metric (rank, reason, path). /server_info shows the leader's names.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...scheduler.messages.counters import FIRST_TOKEN_STAGES, GAP_CAUSES, TRANSPORTS

PREFIX = "pdserve_"
_RANK_BUSY = re.compile(r"^rank_(\d+)_busy_seconds$")


class Exported(NamedTuple):
    """A metric. `name` is without PREFIX and `_total`; `labels` are those of the reported value."""

    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()


def _same_names(texts: Mapping[str, str]) -> dict[str, Exported]:
    return {name: Exported(name, text) for name, text in texts.items()}


GAUGES: Mapping[str, Exported] = _same_names(
    {
        "kv_pages": "Pages of the KV pool. With HiSparse, pages in host memory.",
        "kv_pages_held": "Pages of the KV pool that requests hold. Cached prefixes are not held.",
        "kv_pages_available": "Pages of the KV pool that are free or only cached.",
        "cached_pages": "Pages in the prefix cache.",
        "running_requests": "Requests in the decode batch; on prefill, in steps in flight.",
        "waiting_for_pages": "Requests whose prompt waits for KV pages, or behind one that does (decode).",
        "waiting_requests": "Prompts that are in no step (prefill).",
        "waiting_tokens": "Prompt tokens that are not computed yet (prefill).",
        "quarantined_pages": "KV pages in quarantine: a remote writer may still write to them.",
        "quarantined_hot_pages": "Pages of the hot pool in quarantine (HiSparse).",
        "saved_requests": "Retracted requests whose KV is in host memory.",
        "staging_parts": "Parts of chunks that wait for the staging ring of a decode server, or are in it (prefill).",
        "staging_parts_waiting": "Parts of chunks that wait for room in a staging ring of this server.",
        "staging_ring_bytes": "Size of all staging rings.",
        "local_prefill_tokens_per_second": "Measured rate at which this decode server computes prompts.",
        "remote_prefill_tokens_per_second": "Measured rate at which prefill servers compute prompts.",
        "remote_prefill_overhead_seconds": "Measured time of a remote prefill, without queueing and computing.",
        "local_prefill_short_tokens": "Prompt tokens that this server computes in any case: a step hardly gets longer.",
        "local_prefill_waiting_tokens": "Tokens of prompts that this decode server has yet to compute.",
        "decode_step_seconds": "Measured time of a decode step without prompt tokens.",
        "token_gap_limit_seconds": "Limit on the time between tokens of requests that have none of their own.",
        "loop_lag_seconds": "Longest lag of the engine loop in the last minute.",
        "last_step_seconds": "Time of the last step: from its start, or the end of the step before it, to its results.",
        "hot_pages": "Pages of the hot pool (HiSparse).",
        "hot_pages_available": "Free pages of the hot pool (HiSparse).",
        "hot_pages_borrowed": "Pages lent by the index pool to hot buffers (HiSparse).",
        "hot_buffers": "Hot buffers in use (HiSparse).",
        "hot_buffers_resident": "Hot buffers that hold all rows of their request (HiSparse).",
        "hot_buffers_unsaved": "Hot buffers whose rows are not in host memory yet (HiSparse).",
        "kv_store_available": "1 while the KV store is used, 0 while it does not answer.",
        "kv_store_loading_prompts": "Prompts whose prefix is being loaded from the KV store.",
        "kv_store_queued_blocks": "Blocks that are being written to the KV store, or wait for it.",
    }
) | {"staging_ring_bytes_granted": Exported("staging_ring_granted_bytes", "Bytes of staging rings in use.")}

_PLACEMENTS = "Prompts by the place that computes them (local: this decode server) and the reason."
_PLACEMENT_REASONS = {
    "local": ("always", "absent", "failed", "refused", "short", "late", "shared_device"),
    "remote": ("never", "unmeasured", "on_time", "late", "hot_rows"),
}
_LATE = (
    "Requests that were late, by limit (ttft: for the first token; itl: for a later one, by more than a tenth) and by "
    "what they waited for most."
)
_DISPATCHES = "Prompts sent to prefill servers, by what decided: prefix (the server has a part of it cached) or load."
_STORE = {
    "lookups": "Prompts whose prefix was looked up in the KV store.",
    "tokens_loaded": "Prompt tokens whose KV was loaded from the KV store.",
    "bytes_loaded": "Bytes loaded from the KV store.",
    "corrupt_cells": "Values of the KV store with a wrong length or checksum.",
    "skipped_as_slow": "Prompts whose prefix was not looked up in the KV store, because computing is faster.",
    "loads_late": "Loads that the KV store did not answer in time, on each rank.",
    "blocks_written": "Blocks written to the KV store.",
    "bytes_written": "Bytes written to the KV store.",
    "blocks_dropped": "Blocks that were not written, because too many wait or the KV store does not answer.",
    "blocks_refused": "Blocks that the KV store did not accept, because it is full.",
    "outages": "Times that the KV store stopped answering.",
}
_KV_PATHS = "Prompts by the memory that prefill writes their KV to, and the reason (HiSparse)."
_KV_PATH_REASONS = {"device": ("resident",), "host": ("peer", "samples", "one_token", "hot_rows", "in_use")}
_PATH_BYTES = "Bytes of KV transferred, by the memory they were written to on decode: device or host."

COUNTERS: Mapping[str, Exported] = (
    _same_names(
        {
            "requests_finished": "Requests that the engine has finished; on prefill, sent completely.",
            "requests_failed": "Requests that have failed in the engine.",
            "requests_aborted": "Requests that were aborted.",
            "grammars_too_complex": "Requests whose grammar has become too expensive while they ran.",
            "masks_prepared": "Slow masks of grammars, which were computed beside the steps.",
            "redispatches": "Prompts that were queued again after a failed attempt on a prefill server.",
            "retractions": "Times that a request was retracted: it gave up its KV memory to others.",
            "retractions_recomputed": "Retractions whose KV is computed again instead of copied.",
            "overtakes": "Prompts that were dispatched before an earlier one that waits for memory.",
            "prompts_moved": "Queued prompts that a data-parallel rank without pages has given to another one.",
            "transfers": "Transfers of KV that have completed.",
            "transfers_failed": "Transfers of KV that have failed, been refused or been given up by prefill.",
            "transfer_bytes": "Bytes of KV transferred.",
            "transfer_writes": "Write operations of KV transfers.",
            "chunks": "Chunks of KV transferred.",
            "chunks_verified": "Chunks whose checksum was compared (--verify-kv).",
            "checksum_errors": "Chunks whose checksum differed (--verify-kv).",
            "staged_parts": "Parts of chunks sent through a staging ring.",
            "staged_bytes": "Bytes sent through a staging ring.",
            "staged_grants_waited": "Parts that waited for room in the staging ring of decode (prefill).",
            "prompt_tokens": "Prompt tokens: on decode, of finished requests; on prefill, computed tokens.",
            "prefix_tokens_reused": "Prompt tokens that were found in the prefix cache.",
            "prefix_waits": "Times that a prompt waited for another one that computes the same prefix.",
            "generation_tokens": "Output tokens.",
            "decode_steps": "Steps with running requests.",
            "late_steps": "Steps that exceeded the limit on gaps by a tenth, because first tokens would be late.",
            "prefill_steps": "Steps of a prefill server.",
            "steps_failed": "Steps that have failed.",
            "dispatch_tokens_expected": "Prompt tokens that the chosen prefill server was expected to have cached.",
            "dispatch_tokens_reused": "Prompt tokens that the chosen prefill server had cached.",
            "peers_lost": "Times that a peer was lost.",
            "stale_messages": "Ignored messages: repeated, or about requests that have ended.",
            "event_errors": "Events that the engine loop could not handle.",
            "effect_errors": "Messages of the engine loop that could not be sent; their requests fail.",
            "log_lines_dropped": "Log lines of the leader that were dropped, because nobody has read the log.",
            "integrity_errors": "Errors in memory accounting, found by the integrity check of an idle server.",
            "hot_hits": "Rows of evicting sequences found in their hot buffers (HiSparse).",
            "hot_misses": "Rows of evicting sequences fetched from host memory (HiSparse).",
            "hot_write_backs": "Rows written to host memory (HiSparse).",
            "control_authentication_failures": "Control connections with a wrong cluster key.",
            "control_refused": "Pairings that were refused.",
            "control_messages_sent": "Control messages sent.",
            "control_messages_received": "Control messages received.",
            "control_messages_resent": "Control messages sent again after a connection was lost.",
            "control_messages_out_of_order": "Control messages received twice or out of order, and dropped.",
            "control_heartbeats_received": "Heartbeats received.",
            "control_peers_up": "Times that a peer was paired.",
            "control_peers_lost": "Times that the control thread lost a peer.",
            "control_peers_closed": "Control connections that peers have closed.",
            "control_complaints_received": "Error messages received from peers.",
            "control_malformed": "Control messages that could not be decoded.",
            "control_unknown_peer": "Control messages from peers that are not paired.",
            "control_connections_cut": "Control connections that were closed because of a limit.",
            "control_sends_to_unknown_instance": "Control messages to peers that are gone.",
            "control_sends_over_limit": "Control messages dropped with their connection: too many were unacknowledged.",
            "control_sends_dropped_by_zmq": "Control messages that ZMQ did not take.",
            "control_handler_errors": "Control messages whose handler failed.",
            "control_event_errors": "Events that the control thread could not handle.",
        }
    )
    | {
        "requests": Exported("requests_accepted", "Requests that the engine has accepted."),
        "requests_refused": Exported("engine_requests_refused", "Requests that the engine has refused."),
        "hot_bytes_swapped_in": Exported(
            "hot_swapped_in_bytes", "Bytes fetched from host memory for misses (HiSparse)."
        ),
    }
    | {f"store_{name}": Exported(f"kv_store_{name}", text) for name, text in _STORE.items()}
    | {f"path_bytes_{path}": Exported("path_bytes", _PATH_BYTES, (("path", path),)) for path in ("device", "host")}
    | {
        f"transport_bytes_{transport}": Exported(
            "transport_bytes", "Bytes of KV written to decode servers, by transport.", (("transport", transport),)
        )
        for transport in TRANSPORTS
    }
    | {f"dispatch_{by}": Exported("dispatches", _DISPATCHES, (("by", by),)) for by in ("prefix", "load")}
    | {
        f"{place}_prefill_{reason}": Exported("prefill_placements", _PLACEMENTS, (("place", place), ("reason", reason)))
        for place, reasons in _PLACEMENT_REASONS.items()
        for reason in reasons
    }
    | {
        f"late_first_token_{stage}": Exported("late_requests", _LATE, (("slo", "ttft"), ("cause", stage)))
        for stage in FIRST_TOKEN_STAGES
    }
    | {
        f"late_gap_{cause}": Exported("late_requests", _LATE, (("slo", "itl"), ("cause", cause)))
        for cause in GAP_CAUSES
    }
    | {
        f"kv_path_{path}_{reason}": Exported("kv_path_choices", _KV_PATHS, (("path", path), ("reason", reason)))
        for path, reasons in _KV_PATH_REASONS.items()
        for reason in reasons
    }
)


def exported_as(name: str, catalogue: Mapping[str, Exported]) -> Exported:
    """Returns how a gauge or counter of the leader is exported. If it is not in the catalogue, it keeps its name."""
    return catalogue.get(name) or Exported(name, f"Reported by the engine: {name}.")


def rank_counter(gauge: str) -> Exported | None:
    """Returns how a value of one rank is exported: as a counter, although the leader reports it as a gauge. None for
    other gauges.
    """
    found = _RANK_BUSY.match(gauge)
    if found is None:
        return None
    return Exported("rank_busy_seconds", "Time that each rank has spent on steps.", (("rank", found[1]),))
