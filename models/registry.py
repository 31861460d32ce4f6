"""All families of models, and which one a configuration names. No torch."""

from pathlib import Path

from ..common.errors import StartupError
from .config.model import ModelConfig
from .families.deepseek import DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA
from .families.family import Family
from .families.gemma3 import GEMMA3
from .families.gpt_oss import GPT_OSS
from .families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from .families.moe import MIXTRAL, QWEN3_MOE
from .families.olmo2 import OLMO2
from .formats.bounds import MOST_EXPERT_MLPS, MOST_PARAMETERS, most_of
from .formats.gguf_file import GgufFile
from .formats.json_fields import Json, bare, read_json, shown, unusable_values

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA3,
    GPT_OSS,
    OLMO2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
)
_OF_NAME = {family.name: family for family in FAMILIES}
_OF_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def family_of(config: ModelConfig) -> Family:
    return _OF_NAME[config.architecture]


def read_config_file(path: Path) -> ModelConfig:
    """Parse a config.json, and the generation_config.json beside it, if there is one; raises StartupError."""
    raw = read_json(path)
    with unusable_values(path):
        config = _named(path, raw).read(path, raw)
        _check_size(path, config)
        return config


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Parse the metadata of a GGUF file; raises StartupError."""
    check_gguf(file.path, file.architecture)
    config = _OF_NAME[file.architecture].read_gguf(file)
    _check_size(file.path, config)
    return config


def check_gguf(path: Path | str, found: str) -> None:
    """Raise StartupError unless GGUF files of this architecture are supported."""
    supported = [family.name for family in FAMILIES if family.gguf]
    if found not in supported:
        names = ", ".join(supported)
        raise StartupError(f"{path}: architecture {bare(found)} is not supported in GGUF files; supported are {names}")


def _named(path: Path, raw: Json) -> Family:
    """The family that a config.json names."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StartupError(f"{path}: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if name in _OF_ARCHITECTURE:
            return _OF_ARCHITECTURE[name]
    model_type = raw.get("model_type")
    if not names and isinstance(model_type, str) and model_type in _OF_NAME:
        return _OF_NAME[model_type]
    found = bare(", ".join(names) or str(raw.get("model_type", "none")))
    supported = ", ".join(_OF_ARCHITECTURE)
    raise StartupError(f"{path}: architecture {found} is not supported; supported are {supported}")


def _check_size(path: Path, config: ModelConfig) -> None:
    """Raise StartupError for a model that is too large although each of its numbers is in its bounds (bounds.py)."""
    if config.context_length > (most := most_of("context_length")):
        raise StartupError(f"{path}: the context length must be at most {most}, got {config.context_length}")
    mlps = sum(config.mixed) * config.moe.num_experts if config.moe is not None else 0
    if mlps > MOST_EXPERT_MLPS:
        raise StartupError(f"{path}: the layers must have at most {MOST_EXPERT_MLPS} experts together, got {mlps}")
    if config.parameters > MOST_PARAMETERS:
        raise StartupError(f"{path}: the model must have at most {MOST_PARAMETERS} weights, got {config.parameters}")
