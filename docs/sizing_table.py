"""Write the table in docs/sizing.md with the functions of `pdserve plan`; with --check, only say whether it is true."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".dev"))

from generated_section import update_section  # noqa: E402

from pdserve.common.errors import StartupError  # noqa: E402
from pdserve.configs.schema import DecodeConfig  # noqa: E402
from pdserve.models.loading.catalog import locate_geometry  # noqa: E402
from pdserve.server.plan.options import GIB, RESERVE_GIB, parse_gpus  # noqa: E402
from pdserve.server.plan.sizes import Sizes, plan_sizes  # noqa: E402

SIZING = ROOT / "docs" / "sizing.md"
BEGIN = "<!-- sizes: written by docs/sizing_table.py -->"
END = "<!-- end of sizes -->"
GPUS = parse_gpus("8xH200")
CONTEXTS = (32768, 65536, 131072)
SERVERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("deepseek-v3.2", {"tp": 8, "page_size": 64}),
    ("deepseek-v3.2", {"tp": 8, "page_size": 64, "kv_dtype": "fp8_e4m3"}),
    ("deepseek-v3.2", {"tp": 8, "page_size": 64, "dp_attention": True}),
    ("glm-5", {"tp": 8, "page_size": 64}),
    ("glm-5", {"tp": 8, "page_size": 64, "kv_dtype": "fp8_e4m3"}),
    ("glm-5", {"tp": 8, "page_size": 64, "dp_attention": True}),
    ("qwen3-235b-a22b", {"tp": 8}),
    ("qwen3-235b-a22b", {"tp": 8, "dp_attention": True}),
    ("qwen3-30b-a3b", {"tp": 1}),
    ("qwen3-32b", {"tp": 8}),
    ("qwen3-32b", {"tp": 2}),
    ("qwen3-8b", {"tp": 8}),
    ("qwen3-8b", {"tp": 1}),
)
"""Models, and settings of a decode server."""


def table() -> str:
    """Markdown rows, one for each server and way of keeping its KV."""
    contexts = " | ".join(f"{context // 1024}k" for context in CONTEXTS)
    memory = "GiB of weights per GPU | KV bytes per token: GPU | host, per rank"
    lines = [
        f"| model | settings | {memory} | requests of {contexts} |",
        "|---|---|---|---|---|" + "---|" * len(CONTEXTS),
    ]
    for model, settings in SERVERS:
        found = {context: sizes(model, settings, context) for context in CONTEXTS}
        for variant, shown in enumerate(found[CONTEXTS[0]]):
            flags = [_flag(name, value) for name, value in settings.items()]
            flags += ["--enable-hisparse"] if shown.hisparse else []
            ranks = DecodeConfig.model_validate(settings).world_size
            counts = [_count(of_context[variant], ranks) if of_context else "" for of_context in found.values()]
            cells = (
                model,
                f"`{' '.join(flags)}`",
                f"{shown.weight_bytes / GIB:.1f}",
                f"{shown.device_token_bytes:,}",
                f"{shown.host_token_bytes:,}" if shown.hisparse else "",
                *counts,
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sizes(model: str, settings: dict[str, object], context: int) -> list[Sizes]:
    """Without HiSparse and, for a sparse model, with it; none if the model's context is shorter."""
    device_bytes = int((GPUS.gib - RESERVE_GIB) * GIB)
    config = DecodeConfig.model_validate(settings)
    try:
        return plan_sizes(
            config, locate_geometry(model), context=context, device_bytes=device_bytes, fp8=GPUS.fp8, hisparse=None
        )
    except StartupError:
        return []


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _count(found: Sizes, ranks: int) -> str:
    """Requests, and the host memory that their KV takes on all ranks."""
    if found.limit == "weights":
        return "weights do not fit"
    host_gib = ranks * found.host_request_bytes / GIB
    return f"{found.requests} ({host_gib:,.0f} GiB)" if found.hisparse else str(found.requests)


if __name__ == "__main__":
    sys.exit(update_section(SIZING, BEGIN, END, table()))
