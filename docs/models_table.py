"""Write the tables of families and sizes in docs/models.md, from the functions of `pdserve models`; with --check, only
say whether they are true.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".dev"))

from generated_section import update_section  # noqa: E402

from pdserve.models.loading.catalog import GEOMETRIES, locate_geometry  # noqa: E402
from pdserve.server.plan.families import FamilyRow, family_rows  # noqa: E402
from pdserve.server.plan.models import GIB, kv_token_bytes, parameters, weight_bytes  # noqa: E402

BEGIN = "<!-- models: written by docs/models_table.py -->"
END = "<!-- end of models -->"


def families() -> str:
    rows = [(family, f"`{architecture}`", *rest) for family, architecture, *rest in family_rows()]
    return _table(FamilyRow._fields, rows)


def sizes() -> str:
    configs = [(file.stem, locate_geometry(file.stem).config) for file in GEOMETRIES.glob("*.json")]
    rows = [
        (
            name,
            parameters(config.parameters),
            f"{weight_bytes(config) / GIB:.1f}",
            f"{kv_token_bytes(config):,}",
            f"{config.context_length:,}",
        )
        for name, config in sorted(configs, key=lambda known: known[1].parameters)
    ]
    return _table(("model", "size", "GiB of weights", "KV bytes per token", "context"), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    sys.exit(update_section(ROOT / "docs" / "models.md", BEGIN, END, f"{families()}\n\n{sizes()}"))
