"""The commands in the README and the docs."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "deploy/**/*.md")
PROGRAMS = "|".join(
    (
        r"(?:\.venv/bin/|/tmp/smoke/bin/)?(?:pdserve|python3?|pip|pre-commit)",
        "make|curl|uv|docker|kubectl|openssl|export|source|git|hf|cd|echo",
    )
)
_COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) ")


class Documented(NamedTuple):
    page: str
    command: str


def documented_commands() -> list[Documented]:
    """Every command in a code block, fenced or indented, without comments; lines of one command are joined."""
    found = []
    for path in (path for pattern in PAGES for path in sorted(ROOT.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        fenced = re.findall(r"^( *)```(?:sh|bash)?\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
        blocks = [block for _, block in fenced]
        blocks += re.findall(r"(?:^(?:    .*)?\n)+", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S), re.M)
        page = path.relative_to(ROOT).as_posix()
        found += [Documented(page, command) for block in blocks for command in _commands(block)]
    return found


def arguments(command: str) -> list[str]:
    """The words of a command, without comments."""
    return shlex.split(command, comments=True)


def _commands(block: str) -> list[str]:
    commands: list[str] = []
    lines = iter(block.splitlines())
    for line in lines:
        command = line.strip()
        if not _COMMAND.match(command + " "):
            continue
        while command.count("'") % 2 or command.endswith("\\"):  # a body goes on in the next line
            command = f"{command.removesuffix(chr(92))} {next(lines).strip()}"
        commands.append(re.sub(r"\s+#.*$", "", command))
    return commands
