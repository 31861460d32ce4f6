"""Write the table in docs/settings.md from the configuration schema; with --check, only say whether it is true."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".dev"))

from generated_section import update_section  # noqa: E402

from pdserve.configs.flags import default_of, flag_of, limits_of, meaning_of  # noqa: E402
from pdserve.configs.schema import DecodeConfig, PrefillConfig, ServerConfig  # noqa: E402

SETTINGS = ROOT / "docs" / "settings.md"
BEGIN = "<!-- settings: written by docs/settings_table.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    """Markdown rows: role, flag, default, range, meaning."""
    lines = ["| server | flag | default | range | meaning |", "|---|---|---|---|---|"]
    for role, model in (("both", ServerConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)):
        for name, field in model.model_fields.items():
            if name == "role" or (role != "both" and name in ServerConfig.model_fields):
                continue
            default = default_of(field) and f"`{default_of(field)}`"
            cells = (role, f"`{flag_of(name)}`", default, limits_of(field), meaning_of(name, field))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(update_section(SETTINGS, BEGIN, END, table()))
