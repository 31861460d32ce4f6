"""A measured pair: the settings and step times of one prefill and one decode server, as a file that people can edit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ....common.errors import StartupError
from ....configs.load import build_config
from ....configs.schema import DecodeConfig, PrefillConfig
from ....memory.sizing import GIB
from ....scheduler.decode.requests.limits import DecodeLimits
from ....scheduler.prefill.limits import PrefillLimits
from ....scheduler.simulation.cluster import ServerSettings
from ....scheduler.simulation.step_times import StepTimes

_SCHEDULING = (
    "page_size",
    "max_queued_requests",
    "growth_tokens",
    "queue_timeout_s",
    "prefill_wait_s",
    "prefill_timeout_s",
    "request_timeout_s",
    "quarantine_s",
    "retract_memory_gib",
    "prefix_cache",
    "pp",
    "dispatch",
    "local_prefill",
    "slo_ttft_ms",
    "slo_itl_ms",
    "max_running_requests",
    "max_step_tokens",
    "chunk_size",
)
"""Settings that schedulers depend on."""


VOCABULARY = 1 << 31
"""Vocabulary size for simulated prompts: their token ids are arbitrary numbers."""


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV pool and the settings of one server."""

    num_pages: int
    page_bytes: int
    settings: dict[str, Any]


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `pdserve plan` measures, and `--rates FILE` reads."""

    model: str
    device: str
    context_length: int
    vocab_size: int
    prefill: Server
    decode: Server
    step_cores: int = 1
    """Cores that a step of either server uses, if its device is a CPU."""
    machine_cores: int | None = None
    """Cores of the machine that all servers share; null if each server has its device to itself."""
    times: StepTimes

    def server_settings(self, bounds: Mapping[str, float]) -> ServerSettings:
        """The servers get these settings of latency instead of their own. Raises StartupError for settings that a
        server would refuse.
        """
        decode = build_config(DecodeConfig, (("of the measured decode server", {**self.decode.settings, **bounds}),))
        ttft = {name: bound for name, bound in bounds.items() if name in PrefillConfig.model_fields}
        prefill = build_config(PrefillConfig, (("of the measured prefill server", {**self.prefill.settings, **ttft}),))
        on_gpu = self.device != "cpu"
        if decode.max_running_requests is None or decode.max_step_tokens is None or prefill.chunk_size is None:
            raise StartupError(
                "settings of the measured pair: max_running_requests, max_step_tokens and chunk_size must be numbers"
            )
        return ServerSettings(
            decode=DecodeLimits.of(
                decode,
                max_running_requests=decode.max_running_requests,
                retract_pages=int(decode.retract_memory_gib * GIB) // self.decode.page_bytes,
                overlap=decode.pp == 1,
                max_step_tokens=decode.max_step_tokens,
                on_gpu=on_gpu,
                window=None,
            ),
            decode_pages=self.decode.num_pages,
            prefill=PrefillLimits.of(
                prefill,
                chunk_size=prefill.chunk_size,
                context_length=self.context_length,
                vocab_size=VOCABULARY,
                on_gpu=on_gpu,
                window=None,
            ),
            prefill_pages=self.prefill.num_pages,
            cores=self.step_cores,
        )


def server_of(info: dict[str, Any]) -> Server:
    """From a response of /server_info."""
    config = info["config"]
    if info["dp_size"] > 1 or config.get("enable_hisparse"):
        raise StartupError("dp_attention and enable_hisparse are not simulated: measure a pair without them")
    pages = info["pool"]["num_pages"]
    settings = {name: config[name] for name in _SCHEDULING if name in config and config[name] is not None}
    return Server(pages, max(rank["device_kv_bytes"] for rank in info["ranks"]) // pages, settings)


def read_pair(path: Path) -> MeasuredPair:
    try:
        pair = msgspec.json.decode(path.read_bytes(), type=MeasuredPair)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"--rates {path}: {error}") from None
    sizes = [size for size, _ in pair.times.decode_steps]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise StartupError(f"--rates {path}: times.decode_steps must have ascending numbers of requests, got {sizes}")
    return pair


def write_pair(path: Path, pair: MeasuredPair) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(pair), indent=2) + b"\n")
