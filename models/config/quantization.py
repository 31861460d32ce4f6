"""How a checkpoint stores its matrices, from `quantization_config` of config.json. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...configs.errors import StartupError
from ..formats.json_fields import Json

SUPPORTED = (
    "fp8 with a weight_block_size of rows and columns; 4-bit awq (gemm), gptq and compressed-tensors (pack-quantized)"
)


@dataclass(frozen=True)
class Int4Format:
    """Matrices of 4-bit integers with a scale and a zero point per group of columns."""

    method: Literal["awq", "gptq", "compressed-tensors"]
    group: int | None  # columns; None: all columns of a row
    zero_offset: int = 0  # added to the stored zero points


@dataclass(frozen=True)
class Quantization:
    """At most one of these; neither in a checkpoint of 16 or 32 bits."""

    weight_block: tuple[int, int] | None = None  # rows and columns that share a scale in block-scaled fp8
    int4: Int4Format | None = None


def read_quantization(path: Path, raw: Json) -> Quantization:
    """Raises StartupError for schemes that are not supported."""
    config: Json | None = raw.get("quantization_config")
    if not config:
        return Quantization()
    match config.get("quant_method", "unknown"):
        case "awq":
            return Quantization(int4=_awq(path, config))
        case "gptq":
            return Quantization(int4=_gptq(path, config))
        case "compressed-tensors":
            return Quantization(int4=_compressed_tensors(path, config))
    method, block = config.get("quant_method", "unknown"), config.get("weight_block_size")
    match block:
        case [int(rows), int(columns)] if method == "fp8" and rows > 0 and columns > 0:
            return Quantization(weight_block=(rows, columns))
    raise _unsupported(path, method, f"weight_block_size {block}")


def _awq(path: Path, config: Json) -> Int4Format:
    _require(path, "awq", config, "bits", (4,))
    _require(path, "awq", config, "version", ("gemm", "GEMM"), missing=True)
    _require(path, "awq", config, "zero_point", (True,), missing=True)
    return Int4Format("awq", _group(path, "awq", config.get("group_size", 128)))


def _gptq(path: Path, config: Json) -> Int4Format:
    """Checkpoints of the first format store zero points minus 1."""
    _require(path, "gptq", config, "bits", (4,))
    _require(path, "gptq", config, "checkpoint_format", ("gptq", "gptq_v2"), missing=True)
    group = _group(path, "gptq", config.get("group_size", 128))
    if group is not None and not config.get("static_groups", False):
        _require(path, "gptq", config, "desc_act", (False,), missing=True)
    return Int4Format("gptq", group, zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1)


def _compressed_tensors(path: Path, config: Json) -> Int4Format:
    method = "compressed-tensors"
    _require(path, method, config, "format", ("pack-quantized",))
    for field in ("kv_cache_scheme", "transform_config"):
        _require(path, method, config, field, (None, {}), missing=True)
    groups: set[int | None] = set()
    for name, scheme in (config.get("config_groups") or {}).items():
        weights: Json = scheme.get("weights") or {}
        for field in ("input_activations", "output_activations"):
            _require(path, f"{method}, {name}", scheme, field, (None,), missing=True)
        _require(path, f"{method}, {name}", weights, "num_bits", (4,))
        _require(path, f"{method}, {name}", weights, "type", ("int",))
        _require(path, f"{method}, {name}", weights, "strategy", ("group", "channel"))
        _require(path, f"{method}, {name}", weights, "actorder", (None, False, "weight", "static"), missing=True)
        groups.add(_group(path, method, weights.get("group_size") if weights["strategy"] == "group" else -1))
    if len(groups) != 1:
        raise _unsupported(path, method, f"{len(groups)} group sizes")
    return Int4Format("compressed-tensors", groups.pop())


def _group(path: Path, method: str, size: object) -> int | None:
    """Columns of a group; None for -1, one group."""
    if size == -1:
        return None
    if not isinstance(size, int) or size < 32 or size % 32:
        raise _unsupported(path, method, f"group_size {size}, which must be -1 or a multiple of 32")
    return size


def _require(
    path: Path, method: str, config: Json, field: str, values: tuple[object, ...], *, missing: bool = False
) -> None:
    """Refuse other values of a field. `missing`: a configuration without it has the first of them."""
    found = config.get(field, values[0] if missing else None)
    if found not in values:
        raise _unsupported(path, method, f"{field} {found}")


def _unsupported(path: Path, method: str, found: str) -> StartupError:
    return StartupError(f"{path}: quantised weights ({method}, {found}) are not supported; supported are {SUPPORTED}")
