"""`pdserve plan`: prints the sizes of a decode server on given GPUs."""

import contextlib
import dataclasses
import json

from ...common.errors import StartupError
from ...configs.schema import DecodeConfig
from ...models.loading.catalog import ModelSource, locate_geometry
from ...models.loading.hub import find_on_hub
from ..launch.startup_checks import check_layout
from .options import DEFAULT_CONTEXT, DEFAULT_GPUS, GIB, PlanOptions
from .sizes import Sizes, plan_sizes


def run_plan(options: PlanOptions) -> int:
    model, revision = options.config.model, options.config.revision
    found_on_hub = find_on_hub(model, revision)
    source = locate_geometry(model) if found_on_hub is None else found_on_hub.source()
    if source is None:
        raise StartupError(f"model {model!r}: plan needs a config.json; give the model in its original format")
    if options.choose_tp:
        options = dataclasses.replace(options, config=_with_fitting_tp(options, source))
    check_layout(options.config, source)
    device_bytes = int((options.gpus.gib - options.reserve_gib) * GIB)
    context = options.context or min(DEFAULT_CONTEXT, source.config.context_length)
    found = plan_sizes(
        options.config,
        source,
        context=context,
        device_bytes=device_bytes,
        fp8=options.gpus.fp8,
        hisparse=options.hisparse,
    )
    print(_as_json(options, context, found) if options.as_json else _as_text(options, source, context, found))
    return 0


def _with_fitting_tp(options: PlanOptions, source: ModelSource) -> DecodeConfig:
    """With the largest tp that divides the number of GPUs and that the model allows; unchanged if there is none."""
    for tp in range(options.gpus.count, 0, -1):
        config = options.config.model_copy(update={"tp": tp})
        with contextlib.suppress(StartupError):
            if options.gpus.count % tp == 0:
                check_layout(config, source)
                return config
    return options.config


def _servers(options: PlanOptions) -> int:
    return options.gpus.count // options.config.world_size


def _as_json(options: PlanOptions, context: int, found: list[Sizes]) -> str:
    config, gpus = options.config, options.gpus
    document = {
        "model": config.model,
        "gpus": dataclasses.asdict(gpus),
        "tp": config.tp,
        "pp": config.pp,
        "dp_attention": config.dp_attention,
        "page_size": config.page_size,
        "context": context,
        "reserve_gib": options.reserve_gib,
        "servers": _servers(options),
        "sizes": [dataclasses.asdict(sizes) for sizes in found],
    }
    return json.dumps(document, indent=2)


def _as_text(options: PlanOptions, source: ModelSource, context: int, found: list[Sizes]) -> str:
    config, gpus = options.config, options.gpus
    ranks = config.world_size
    attention = ", data-parallel attention" if config.dp_size > 1 else ""
    lines = [
        f"{source.name} ({source.config.architecture}), tp {config.tp}, pp {config.pp}{attention}, on {ranks} of "
        f"{gpus.count} x {gpus.name} with {gpus.gib:.1f} GiB each, {options.reserve_gib:g} GiB of it for the CUDA "
        f"context and steps; pages of {config.page_size}",
        "",
    ]
    in_host_memory = any(sizes.hisparse for sizes in found)
    rows: list[tuple[str, list[str]]] = [
        ("", ["HiSparse" if sizes.hisparse else "on the GPU" for sizes in found]),
        ("weights per GPU", [_gib(sizes.weight_bytes) for sizes in found]),
        ("KV per token and GPU", [f"{sizes.device_token_bytes:,} B" for sizes in found]),
        *(
            [("KV per token in host memory, per rank", [f"{sizes.host_token_bytes:,} B" for sizes in found])]
            if in_host_memory
            else []
        ),
        (
            f"GPU memory of a request of {context:,} tokens",
            [_gib(sizes.device_request_bytes) for sizes in found],
        ),
        ("requests that fit", [f"{sizes.requests:,}" for sizes in found]),
        *([("of them on each rank", [f"{sizes.requests_per_rank:,}" for sizes in found])] if attention else []),
        ("limited by", [sizes.limit for sizes in found]),
    ]
    if in_host_memory:
        rows += [
            ("their KV in host memory, per rank", [_gib(sizes.host_request_bytes) for sizes in found]),
            ("the same, all ranks", [_gib(ranks * sizes.host_request_bytes) for sizes in found]),
        ]
    width, cells = max(len(name) for name, _ in rows), max(len(cell) for _, row in rows for cell in row)
    lines += [f"{name:{width}}  " + "  ".join(f"{cell:>{cells}}" for cell in row) for name, row in rows]
    if not any(sizes.requests for sizes in found):
        fp8 = "" if found[0].limit == "weights" else ", or --kv-dtype fp8_e4m3"
        lines += ["", f"no request fits: use more or larger GPUs, another --tp or --pp{fp8}"]
    elif config.max_running_requests is None:
        lines += ["", *(_advice(sizes, len(found) > 1) for sizes in found if sizes.requests)]
    if _servers(options) > 1:
        lines += ["", f"{_servers(options)} such servers fit on {gpus.count} GPUs"]
    if options.assumed_gpus:
        lines += ["", f"--gpus was not given: {DEFAULT_GPUS} are assumed, not the GPUs of this machine"]
    return "\n".join(lines)


def _advice(sizes: Sizes, compared: bool) -> str:
    """The settings for a server of these sizes. `compared`: the plan has two servers, with and without HiSparse."""
    if not sizes.hisparse:
        label = "without HiSparse" if compared else "settings"
        return f"{label}: --max-running-requests {sizes.max_running_requests}"
    host_gib = -(-sizes.host_request_bytes // GIB)
    return (
        f"with HiSparse: --enable-hisparse --max-running-requests {sizes.max_running_requests} and at least "
        f"--host-memory-gib {host_gib}, which is for each rank"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
