"""The options of `pdserve plan`. Light: every command imports it."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ...common.errors import StartupError
from ...configs.flags import Flag, add_flags, fields_of, from_text, given_flags, read_options
from ...configs.load import build_config
from ...configs.schema import DecodeConfig
from .ratio.options import add_ratio_flags

GIB = 1 << 30

GPU_GIB: Mapping[str, float] = {
    "A100": 79.1,
    "A100-40GB": 39.4,
    "L40S": 44.4,
    "H100": 79.1,
    "H200": 139.8,
    "B200": 178.3,
}
"""Memory that torch reports (`total_memory`). Measured on the H200; the others are approximate."""
WITHOUT_FP8 = ("A100", "A100-40GB")
"""GPUs of a compute capability below 8.9: fp8 weights are expanded there, and indexer keys stay in 16 bits."""
DEFAULT_GPUS = "8xH200"
DEFAULT_CONTEXT = 65536
RESERVE_GIB = 4.0
"""Default of `--reserve-gib`. A server measures its steps at start; a plan cannot."""

PLAN_FLAGS = ("gpus", "context", "reserve_gib", "as_json")
PLAN_SETTINGS = (
    "model",
    "revision",
    "tp",
    "pp",
    "expert_parallel",
    "dp_attention",
    "dtype",
    "kv_dtype",
    "index_dtype",
    "page_size",
    "enable_hisparse",
    "hot_rows",
    "host_memory_gib",
    "kv_memory_fraction",
    "kv_memory_gib",
    "kv_tokens",
    "max_running_requests",
    "local_prefill",
)
"""Settings of a decode server that its memory depends on."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` GPUs of `gib` GiB each."""

    count: int
    name: str
    gib: float

    @property
    def fp8(self) -> bool:
        """Whether weights and indexer keys may be in fp8 there."""
        return self.name not in WITHOUT_FP8


def parse_gpus(text: str) -> Gpus:
    """`8xH200`, `H200`, `2x80GiB`, `2x80GB`; raises StartupError."""
    found = re.fullmatch(r"(?:([1-9][0-9]*)\s*x\s*)?(\S+)", text.strip(), re.IGNORECASE)
    if found is not None:
        count, name = int(found[1] or 1), found[2]
        for known, gib in GPU_GIB.items():
            if name.upper() == known.upper():
                return Gpus(count, known, gib)
        if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(GiB|GB)", name, re.IGNORECASE):
            unit = GIB if size[2].lower() == "gib" else 10**9
            return Gpus(count, name, float(size[1]) * unit / GIB)
    raise StartupError(f"--gpus {text!r}: give a number and {', '.join(GPU_GIB)} or a size, as 8xH200 or 8x80GiB")


def parse_tokens(text: str) -> int:
    """`65536`, `64k` (x 1024) or `1m`; raises StartupError."""
    found = re.fullmatch(r"([1-9][0-9]*)([km]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise StartupError(f"--context {text!r}: give a number of tokens, as 65536 or 64k")
    return int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2].lower()]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A decode server, the GPUs it may use, and the requests to fit. `hisparse`: None plans with and without it.
    `context`: None is DEFAULT_CONTEXT, or what the model supports. `choose_tp`: neither tp nor pp was given, so tp may
    be lowered from the number of GPUs to a divisor of it that the model allows. `assumed_gpus`: no GPUs were given.
    """

    config: DecodeConfig
    hisparse: bool | None
    choose_tp: bool
    assumed_gpus: bool
    gpus: Annotated[
        Gpus,
        from_text(parse_gpus),
        Flag(metavar="NxGPU", default=DEFAULT_GPUS),
        Field(description=f"{', '.join(GPU_GIB)} or a size as 8x80GiB"),
    ]
    context: Annotated[
        int | None,
        from_text(parse_tokens),
        Flag(metavar="N"),
        Field(description="tokens of a request, prompt and output (default: 64k, or less if the model supports less)"),
    ] = None
    reserve_gib: Annotated[
        float,
        Field(
            ge=0,
            description="memory of each GPU for the CUDA context, activations and CUDA graphs, which a server measures "
            "at start",
        ),
    ] = RESERVE_GIB
    as_json: Annotated[bool, Flag("--json", switch=True), Field(description="print JSON")] = False


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_argument_group("plan"), fields_of(PlanOptions), PLAN_FLAGS)
    decode = parser.add_argument_group(
        "settings of the decode server",
        "--model also takes a config.json, or the name of a built-in geometry, which 'pdserve models' lists",
    )
    add_flags(decode, DecodeConfig.model_fields, PLAN_SETTINGS)
    add_ratio_flags(parser)


def read_plan_options(options: argparse.Namespace) -> PlanOptions:
    """Raises StartupError for values that cannot be planned. Without `--tp` and `--pp`, tp is the number of GPUs, as
    far as the model allows.
    """
    flags, settings = given_flags(options, PLAN_FLAGS), given_flags(options, PLAN_SETTINGS)
    gpus = parse_gpus(str(flags.get("gpus", DEFAULT_GPUS)))
    choose_tp = "tp" not in settings and "pp" not in settings
    if choose_tp:
        settings["tp"] = str(gpus.count)
    config = build_config(DecodeConfig, (("from the command line", settings),))
    if config.world_size > gpus.count:
        raise StartupError(f"tp x pp = {config.world_size} ranks need as many GPUs, --gpus has {gpus.count}")
    found = {
        "config": config,
        "gpus": gpus,
        "hisparse": settings.get("enable_hisparse"),
        "choose_tp": choose_tp,
        "assumed_gpus": "gpus" not in flags,
    }
    return read_options(PlanOptions, flags | found)
