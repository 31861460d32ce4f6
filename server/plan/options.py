"""The settings of `pdserve plan`, as flags and as one checked object. Light: every command imports it."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...common.errors import StartupError
from ...configs.flags import add_flags, given_flags
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


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A decode server, the GPUs it may use, and the requests to fit. `hisparse`: None plans with and without it.
    `context`: None is DEFAULT_CONTEXT, or what the model supports. `choose_tp`: neither tp nor pp was given, so tp may
    be lowered from the number of GPUs to a divisor of it that the model allows. `assumed_gpus`: no GPUs were given.
    """

    config: DecodeConfig
    gpus: Gpus
    context: int | None
    reserve_gib: float
    hisparse: bool | None
    as_json: bool
    choose_tp: bool
    assumed_gpus: bool


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--gpus", metavar="NxGPU", help=f"{', '.join(GPU_GIB)} or a size as 8x80GiB (default: {DEFAULT_GPUS})"
    )
    plan.add_argument(
        "--context",
        metavar="N",
        help="tokens of a request, prompt and output (default: 64k, or less if the model supports less)",
    )
    plan.add_argument(
        "--reserve-gib",
        type=float,
        default=RESERVE_GIB,
        metavar="X",
        help="memory of each GPU for the CUDA context, activations and CUDA graphs, which a server measures at start "
        f"(default: {RESERVE_GIB:g})",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
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
    given = dict(given_flags(options, PLAN_SETTINGS))
    gpus = parse_gpus(DEFAULT_GPUS if options.gpus is None else options.gpus)
    choose_tp = "tp" not in given and "pp" not in given
    if choose_tp:
        given["tp"] = str(gpus.count)
    hisparse = given.get("enable_hisparse")
    config = build_config(DecodeConfig, (("from the command line", given),))
    if config.world_size > gpus.count:
        raise StartupError(f"tp x pp = {config.world_size} ranks need as many GPUs, --gpus has {gpus.count}")
    if options.reserve_gib < 0:
        raise StartupError(f"--reserve-gib = {options.reserve_gib:g} must not be negative")
    context = None if options.context is None else parse_tokens(options.context)
    return PlanOptions(
        config=config,
        gpus=gpus,
        context=context,
        reserve_gib=options.reserve_gib,
        hisparse=None if hisparse is None else bool(hisparse),
        as_json=options.json,
        choose_tp=choose_tp,
        assumed_gpus=options.gpus is None,
    )


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
