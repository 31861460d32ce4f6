"""Write the tables in docs/models.md with the functions of `pdserve models`; with --check, only say whether they are
true.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".dev"))

from generated_section import update_section  # noqa: E402

from pdserve.models.config.model import ARCHITECTURES, GGUF_ARCHITECTURES, SPARSE_ARCHITECTURES  # noqa: E402
from pdserve.models.loading.catalog import GEOMETRIES, locate_geometry  # noqa: E402
from pdserve.server.plan.models import GIB, kv_token_bytes, parameters, weight_bytes  # noqa: E402

MODELS = ROOT / "docs" / "models.md"
BEGIN = "<!-- models: written by docs/models_table.py -->"
END = "<!-- end of models -->"


def tables() -> str:
    lines = ["| family | architecture | formats | attention |", "|---|---|---|---|"]
    for name, family in ARCHITECTURES.items():
        formats = "safetensors, GGUF" if family in GGUF_ARCHITECTURES else "safetensors"
        attention = "sparse (HiSparse)" if family in SPARSE_ARCHITECTURES else "full"
        lines.append(f"| {family} | `{name}` | {formats} | {attention} |")
    lines += ["", "| model | size | GiB of weights | KV bytes per token | context |", "|---|---|---|---|---|"]
    configs = [(file.stem, locate_geometry(file.stem).config) for file in GEOMETRIES.glob("*.json")]
    for name, config in sorted(configs, key=lambda known: known[1].parameters):
        weights = f"{weight_bytes(config) / GIB:.1f}"
        cells = (
            name,
            parameters(config.parameters),
            weights,
            f"{kv_token_bytes(config):,}",
            f"{config.context_length:,}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(update_section(MODELS, BEGIN, END, tables()))
