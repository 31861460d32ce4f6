"""The nodes of regular expressions are the same in every supported Python, although its parser is private."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
from pdserve.server.text.regex_syntax import *
def shown(nodes):
    def one(node):
        match node:
            case Character(accepts): return "".join(c for c in "aAbB1_ \nÄä" if accepts(c))
            case Position(name, multiline, is_ascii): return (name, multiline, is_ascii)
            case Repeat(least, most, nodes): return (least, most, shown(nodes))
            case Branch(options): return [shown(option) for option in options]
            case Group(nodes): return {"group": shown(nodes)}
            case Other(name): return name
    return [one(node) for node in nodes]
for pattern in (r"a.[^b]\w\s", r"(?i:ä)(?a:\w)", r"(?s:.)", r"x*?|(b){2,3}y+", r"(?m)^a$\b\B\A\Z", r"(?=a)(?<!b)",
                r"(a)\1", r"(?>a)a*+", r"(a)?(?(1)b|a)"):
    print(shown(parse_regex(pattern, 20)))
for pattern in ("(", "a{2,1}", "a" * 21):
    try:
        parse_regex(pattern, 20)
    except (RegexSyntaxError, RegexTooLargeError) as error:
        print(type(error).__name__, error)
"""
EXPECTED = r"""
['a', 'aAbB1_ Ää', 'aAB1_ \nÄä', 'aAbB1_Ää', ' \n']
[{'group': ['Ää']}, {'group': ['aAbB1_']}]
[{'group': ['aAbB1_ \nÄä']}]
[[[(0, None, [''])], [(2, 3, [{'group': ['b']}]), (1, None, [''])]]]
[('AT_BEGINNING', True, False), 'a', ('AT_END', True, False), ('AT_BOUNDARY', True, False), ('AT_NON_BOUNDARY', True, False), ('AT_BEGINNING_STRING', True, False), ('AT_END_STRING', True, False)]
['ASSERT', 'ASSERT_NOT']
[{'group': ['a']}, 'GROUPREF']
['ATOMIC_GROUP', 'POSSESSIVE_REPEAT']
[(0, 1, [{'group': ['a']}]), 'GROUPREF_EXISTS']
RegexSyntaxError missing ), unterminated subpattern at position 0
RegexSyntaxError min repeat greater than max repeat at position 2
RegexTooLargeError 
"""  # noqa: E501, W291


@pytest.mark.parametrize("version", ["this", "3.11", "3.12", "3.13"])
def test_nodes(version: str) -> None:
    python = sys.executable if version == "this" else shutil.which(f"python{version}")
    # a shim of pyenv exists for versions that it does not run
    if python is None or subprocess.run([python, "-S", "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"python{version} is not installed")
    command = [python, "-S", "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == EXPECTED.removeprefix("\n")
