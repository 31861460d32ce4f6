"""How a checkpoint stores its matrices, from `quantization_config` of config.json. No torch.

A scheme is what config.json says; the file of this folder that it names has the format: what loads and multiplies it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ...common.errors import StartupError
from ..formats.json_fields import Json, bare

SUPPORTED = (
    "fp8 with a weight_block_size of rows and columns, or with a scale per matrix; fbgemm_fp8; compressed-tensors in "
    "fp8 (float-quantized); 4-bit awq (gemm), gptq and compressed-tensors (pack-quantized); NVFP4 of "
    "compressed-tensors (nvfp4-pack-quantized) and modelopt"
)
_COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How matrices are stored that are not in 16 or 32 bits."""

    file: ClassVar[str]
    """The file of the format."""
    bits: ClassVar[int]
    """Of an element."""

    @property
    def protocol3(self) -> Json:
        """What protocol3_fingerprint.py covers of it: frozen, and empty for schemes that came after that."""
        return {}


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """Matrices in fp8."""

    file, bits = "fp8", 8
    block: tuple[int, int] | None  # rows and columns that share a scale; None: a scale per row or per matrix

    @property
    def protocol3(self) -> Json:
        return {"row_scaled_fp8": True} if self.block is None else {"weight_block": self.block}


@dataclass(frozen=True)
class Packed4Scheme(Scheme):
    """Matrices of 4-bit integers with a scale and a zero point per group of columns."""

    file, bits = "packed4", 4
    method: Literal["awq", "gptq", "compressed-tensors"]
    group: int | None  # columns; None: all columns of a row
    zero_offset: int = 0  # added to the stored zero points

    @property
    def protocol3(self) -> Json:
        return {"int4": {"method": self.method, "group": self.group, "zero_offset": self.zero_offset}}


@dataclass(frozen=True)
class Mxfp4Scheme(Scheme):
    """Experts in MXFP4."""

    file, bits = "mxfp4", 4

    @property
    def protocol3(self) -> Json:
        return {"mxfp4_experts": True}


@dataclass(frozen=True)
class Nvfp4Scheme(Scheme):
    """Matrices in NVFP4."""

    file, bits = "nvfp4", 4
    method: Literal["compressed-tensors", "modelopt"]


def read_scheme(path: Path, raw: Json) -> Scheme | None:
    """None if all matrices are in 16 or 32 bits. Raises StartupError for schemes that are not supported."""
    config: Json | None = raw.get("quantization_config")
    if not config:
        return None
    method, block = config.get("quant_method", "unknown"), config.get("weight_block_size")
    match method, block:
        case "awq", _:
            return _awq(path, config)
        case "gptq", _:
            return _gptq(path, config)
        case "compressed-tensors", _:
            return _compressed_tensors(path, config)
        case "modelopt", _:
            return _modelopt(path, config)
        case "fbgemm_fp8", _:
            return Fp8Scheme(None)
        case "fp8", [int(rows), int(columns)] if rows > 0 and columns > 0:
            _check_fp8(path, config)
            return Fp8Scheme((rows, columns))
        case "fp8", None:
            _check_fp8(path, config)
            return Fp8Scheme(None)
    raise _unsupported(path, method, f"weight_block_size {block}")


def read_mxfp4_experts(path: Path, raw: Json) -> Scheme | None:
    """The same for gpt-oss, whose experts may be in MXFP4."""
    config: Json = raw.get("quantization_config") or {}
    method = config.get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise StartupError(f"{path}: quantized weights ({bare(method)}) are not supported; supported are mxfp4 experts")
    return Mxfp4Scheme() if config else None


def _check_fp8(path: Path, config: Json) -> None:
    """fp8 with a scale per block or per matrix. Scales of activations are not used: see fp8.py."""
    _require(path, "fp8", config, "activation_scheme", ("dynamic", "static"), missing=True)
    _require(path, "fp8", config, "fmt", ("e4m3", "float8_e4m3fn"), missing=True)
    _require(path, "fp8", config, "kv_cache_scheme", (None, {}), missing=True)


def _awq(path: Path, config: Json) -> Packed4Scheme:
    _require(path, "awq", config, "bits", (4,))
    _require(path, "awq", config, "version", ("gemm", "GEMM"), missing=True)
    _require(path, "awq", config, "zero_point", (True,), missing=True)
    return Packed4Scheme("awq", _group(path, "awq", config.get("group_size", 128)))


def _gptq(path: Path, config: Json) -> Packed4Scheme:
    """Checkpoints of the first format store zero points minus 1."""
    _require(path, "gptq", config, "bits", (4,))
    _require(path, "gptq", config, "checkpoint_format", ("gptq", "gptq_v2"), missing=True)
    group = _group(path, "gptq", config.get("group_size", 128))
    if group is not None and not config.get("static_groups", False):
        _require(path, "gptq", config, "desc_act", (False,), missing=True)
    return Packed4Scheme("gptq", group, zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1)


def _compressed_tensors(path: Path, config: Json) -> Scheme:
    """Modules that `ignore` names have no scales, which shows what is quantised: the list is not read."""
    method = _COMPRESSED_TENSORS
    packed, floats = "pack-quantized", ("float-quantized", "naive-quantized")
    _require(path, method, config, "format", (packed, *floats, "nvfp4-pack-quantized"))
    for field in ("kv_cache_scheme", "transform_config"):
        _require(path, method, config, field, (None, {}), missing=True)
    _require(
        path, f"{method}, sparsity_config", config.get("sparsity_config") or {}, "format", ("dense",), missing=True
    )
    schemes: dict[str, Json] = config.get("config_groups") or {}
    if config["format"] == packed:
        return _packed_scheme(path, schemes)
    if config["format"] not in floats:
        _check_nvfp4(path, method, schemes)
        return Nvfp4Scheme("compressed-tensors")
    blocks = {_float_scheme(path, f"{method}, {name}", scheme) for name, scheme in schemes.items()}
    if len(blocks) != 1:
        raise _unsupported(path, method, f"config_groups with {len(blocks)} kinds of scales")
    return Fp8Scheme(blocks.pop())


def _modelopt(path: Path, config: Json) -> Nvfp4Scheme:
    """Scales of activations and of KV are ignored: neither is quantised."""
    _require(path, "modelopt", config, "quant_algo", ("NVFP4",))
    _check_nvfp4(path, "modelopt", config.get("config_groups") or {})
    return Nvfp4Scheme("modelopt")


def _check_nvfp4(path: Path, method: str, schemes: dict[str, Json]) -> None:
    for name, scheme in schemes.items():
        weights = scheme.get("weights") or {}
        _require(path, f"{method}, {name}", weights, "num_bits", (4,))
        _require(path, f"{method}, {name}", weights, "type", ("float",))
        _require(path, f"{method}, {name}", weights, "group_size", (16,))
        _require(path, f"{method}, {name}", weights, "strategy", ("tensor_group",), missing=True)
        _require(path, f"{method}, {name}", weights, "symmetric", (True,), missing=True)
        _require(path, f"{method}, {name}", weights, "actorder", (None, False, "weight", "static"), missing=True)
    if not schemes:
        raise _unsupported(path, method, "config_groups missing")


def _packed_scheme(path: Path, schemes: dict[str, Json]) -> Packed4Scheme:
    groups: set[int | None] = set()
    for name, scheme in schemes.items():
        method, weights = f"{_COMPRESSED_TENSORS}, {name}", scheme.get("weights") or {}
        for field in ("input_activations", "output_activations"):
            _require(path, method, scheme, field, (None,), missing=True)
        _require(path, method, weights, "num_bits", (4,))
        _require(path, method, weights, "type", ("int",))
        _require(path, method, weights, "strategy", ("group", "channel"))
        _require(path, method, weights, "actorder", (None, False, "weight", "static"), missing=True)
        size = weights.get("group_size") if weights["strategy"] == "group" else -1
        groups.add(_group(path, _COMPRESSED_TENSORS, size))
    if len(groups) != 1:
        raise _unsupported(path, _COMPRESSED_TENSORS, f"{len(groups)} group sizes")
    return Packed4Scheme("compressed-tensors", groups.pop())


def _float_scheme(path: Path, method: str, scheme: Json) -> tuple[int, int] | None:
    """fp8 weights with activations in fp8 or 16 bits: rows and columns that share a scale; None for a scale per row or
    per matrix.
    """
    weights: Json = scheme.get("weights") or {}
    for part, values in (("weights", weights), ("input_activations", scheme.get("input_activations"))):
        if values is not None:
            _require(path, f"{method}, {part}", values, "num_bits", (8,))
            _require(path, f"{method}, {part}", values, "type", ("float",))
            _require(path, f"{method}, {part}", values, "symmetric", (True,), missing=True)
    _require(path, method, scheme, "output_activations", (None,), missing=True)
    _require(path, f"{method}, weights", weights, "strategy", ("tensor", "channel", "block"))
    match weights["strategy"], weights.get("block_structure"):
        case "block", [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case "block", found:
            raise _unsupported(path, f"{method}, weights", f"block_structure {found}")
    return None


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
    return StartupError(
        f"{path}: quantized weights ({bare(method)}, {bare(found)}) are not supported; supported are {SUPPORTED}"
    )
