"""The grammar compiler of a frontend: a child process that is killed when a grammar takes too long."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.configs.errors import ServerError
from pdserve.configs.sampling import Grammar
from pdserve.server.engine.grammar_checker import GrammarChecker
from tests.cluster.servers import python_path, wait_until
from tests.server.http_harness import write_byte_model

GOOD, BAD = Grammar("regex", "a+"), Grammar("regex", "(")
HOSTILE = Grammar(
    "json_schema", json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(4000)}})
)


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarChecker]:
    monkeypatch.setenv("PYTHONPATH", python_path())
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=2.0)
    yield checker
    checker._kill()


def process_id(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


async def test_answers_are_cached(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    checker._kill()
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    assert checker._process is None, "neither was compiled again"


async def test_process_is_killed_and_started_again(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    first = process_id(checker)
    assert "takes longer than 2 s to compile" in (await checker.check(HOSTILE) or "")
    wait_until(lambda: not Path(f"/proc/{first}").exists(), 5, "the first process has ended")
    assert await checker.check(Grammar("regex", "b+")) is None
    assert process_id(checker) != first


async def test_process_that_cannot_start_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with pytest.raises(ServerError, match="the grammar compiler has failed: the compiler has exited with status 1"):
        await GrammarChecker("/no/such/model", "auto").check(GOOD)


def test_process_ends_with_its_pipe_while_it_compiles(checker: GrammarChecker) -> None:
    """As when the frontend is killed."""
    process = checker._start()
    assert process.stdin is not None
    process.stdin.write(b'["json_schema", ' + json.dumps(HOSTILE.text).encode() + b"]\n")
    process.stdin.close()
    assert process.wait(5) == 0
