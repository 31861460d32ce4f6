"""What a family of models says about itself. No torch: the frontend reads configurations too."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...common.errors import StartupError
from ..config.model import DtypeName, ModelConfig
from ..formats.gguf_file import GgufFile
from ..formats.json_fields import Json, bare, shown

if TYPE_CHECKING:
    from ..decoders.rank_memory import AttentionStep, RankMemory


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """Models whose config.json names one architecture. docs/adding_a_model.md walks through one."""

    name: str
    architecture: str  # in config.json
    attention: str  # as lists show it
    gguf: bool = False  # whether GGUF files are supported
    gguf_interleaved: bool = False  # llama.cpp interleaves the two halves of each q and k head
    quantized: str | None = None  # the only quantised weights that are supported; None: all formats

    @abstractmethod
    def read(self, path: Path, raw: Json) -> ModelConfig:
        """The fields of config.json. Raises StartupError for options that change the result and are not implemented."""

    def attention_step(self, memory: "RankMemory[Any]", name: str) -> "AttentionStep | None":  # noqa: ARG002 - families override it
        """What only this family does in attention of a layer, with weights in this memory, whose names begin so."""
        return None

    def read_gguf(self, file: GgufFile) -> ModelConfig:
        """The same of a GGUF file's metadata, of families that have `gguf`."""
        raise NotImplementedError(f"{file.path}: {self.name} has no GGUF files")

    def is_unused(self, name: str, config: ModelConfig) -> bool:  # noqa: ARG002 - families override it
        """Whether nothing uses this tensor of a checkpoint."""
        return False


def check_activation(path: Path, raw: Json) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise StartupError(f"{path}: hidden_act {shown(raw['hidden_act'])} is not supported; supported is 'silu'")


def read_dtype(path: Path, raw: Json) -> DtypeName:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise StartupError(f"{path}: dtype {bare(name)} is not supported; supported are float32, bfloat16, float16")
    return cast(DtypeName, name)
