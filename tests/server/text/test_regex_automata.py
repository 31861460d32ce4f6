"""Stop expressions have the same matches and errors in every supported Python, whose private parser they use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
from pdserve.server.text.regex_automata import StopRegexError, compile_stop_regex
from pdserve.server.text.stop_regexes import StopRegexes
TEXTS = "aAbB1_ \nÄä", "xbby", "ab\nba b", "a" * 9
for pattern in (r"[^b]\w\s", r".\n", r"(?s:A.*\n)", r"(?i:ä)", r"(?a:\w)\w", r"x*?(b){2,3}y+|1_", r"(?m)^b", r"a$",
                r"\bb\b", r"b\B.", r"\Aab", r"ä\Z", r"a{3}", "(?:a?){4}a{4}", r"(?=a)",
                r"a(?<!b)", r"(a)\1", r"(?>a)", r"a*+",
                r"(a)?(?(1)b|a)", "(", "a{2,1}", "a{600}", "a*"):
    try:
        found = []
        for text in TEXTS:
            stops = StopRegexes((), (compile_stop_regex(pattern),))
            shown = stops.push(text)
            found.append(len(shown) if stops.matched else None)
        print(pattern, found)
    except StopRegexError as error:
        print(pattern, error)
"""
EXPECTED = r"""
[^b]\w\s [4, None, 0, None]
.\n [6, None, 1, None]
(?s:A.*\n) [1, None, None, None]
(?i:ä) [8, None, None, None]
(?a:\w)\w [0, 0, 0, 0]
x*?(b){2,3}y+|1_ [4, 0, None, None]
(?m)^b [None, None, 3, None]
a$ [None, None, None, 8]
\bb\b [None, None, 6, None]
b\B. [2, 1, 3, None]
\Aab [None, None, 0, None]
ä\Z [9, None, None, None]
a{3} [None, None, None, 0]
(?:a?){4}a{4} [None, None, None, 0]
(?=a) has look-around, which is not supported
a(?<!b) has look-around, which is not supported
(a)\1 has a back-reference, which is not supported
(?>a) has an atomic group, which is not supported
a*+ has a possessive repetition, which is not supported
(a)?(?(1)b|a) has a conditional group, which is not supported
( is not a valid regular expression: missing ), unterminated subpattern at position 0
a{2,1} is not a valid regular expression: min repeat greater than max repeat at position 2
a{600} is too large: with repetitions written out, it has more than 512 items
a* matches the empty text, so it would end every output at once
"""


@pytest.mark.parametrize("version", ["this", "3.11", "3.12", "3.13"])
def test_python_versions_agree_on_matches_and_errors(version: str) -> None:
    python = sys.executable if version == "this" else shutil.which(f"python{version}")
    # pyenv has shims for versions that are not installed
    if python is None or subprocess.run([python, "-S", "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"python{version} is not installed")
    command = [python, "-S", "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == EXPECTED.removeprefix("\n")
