"""Write the table of model families in README.md; with --check, only say whether it is true."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".dev"))

from generated_section import update_section  # noqa: E402

from pdserve.server.plan.families import FamilyRow, family_rows  # noqa: E402

BEGIN = "<!-- models: written by docs/models_table.py -->"
END = "<!-- end of models -->"


def table() -> str:
    """Markdown rows, one for each family."""
    rows = [FamilyRow._fields, ("---",) * len(FamilyRow._fields)]
    rows += [(family, f"`{architecture}`", *rest) for family, architecture, *rest in family_rows()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    sys.exit(update_section(ROOT / "README.md", BEGIN, END, table()))
