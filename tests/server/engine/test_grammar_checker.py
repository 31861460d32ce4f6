"""The grammar compiler of a frontend: a child process that is killed when a grammar takes too long."""

import asyncio
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.configs.errors import OverloadedError, ServerError
from pdserve.configs.sampling import Grammar
from pdserve.server.engine import grammar_checker
from pdserve.server.engine.grammar_checker import GrammarChecker
from pdserve.server.launch.frontend import raise_open_files_limit
from tests.cluster.servers import REPOSITORY, python_path, wait_until
from tests.server.http_harness import write_byte_model

GOOD, BAD = Grammar("regex", "a+"), Grammar("regex", "(")
HOSTILE = Grammar("json_schema", json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(8000)}}))
"""Takes 13 s to compile."""


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarChecker]:
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setattr(grammar_checker, "MAX_WAIT_S", 600.0)  # at the lowest priority, beside other tests
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=0.5)
    yield checker
    checker._kill()


def process_id(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


async def test_results_are_cached(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    checker._kill()
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    assert checker._process is None, "no grammar was compiled again"


async def test_files_of_the_working_directory_are_not_imported(
    checker: GrammarChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may start in any directory, also in one with a file that has the name of a module."""
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / ".dev"))
    assert await checker.check(GOOD) is None


async def test_slow_compiler_is_killed_and_started_again(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    first = process_id(checker)
    assert "takes longer than 0.5 s to compile" in (await checker.check(HOSTILE) or "")
    wait_until(lambda: not Path(f"/proc/{first}").exists(), 5, "the first process has ended")
    assert await checker.check(Grammar("regex", "b+")) is None
    assert process_id(checker) != first


async def test_compiler_has_a_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setattr(grammar_checker, "MAX_WAIT_S", 600.0)
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=60.0, max_bytes=64 << 20)
    try:
        assert await checker.check(HOSTILE) == "takes more than 64 MiB of memory to compile, the limit"
        assert await checker.check(GOOD) is None
    finally:
        checker._kill()


async def test_only_a_grammar_that_takes_long_has_the_lowest_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=60.0)
    assert await checker.check(GOOD) is None
    process = process_id(checker)
    assert lowest_priorities(process) == 0
    compiling = asyncio.create_task(checker.check(HOSTILE))
    while lowest_priorities(process) == 0:
        await asyncio.sleep(0.01)
    assert lowest_priorities(process) == 1, "the thread that reads, and the next grammar's, keep their priority"
    checker.close()
    with pytest.raises(ServerError):
        await compiling


def lowest_priorities(process: int) -> int:
    """The number of threads of a process that have the lowest priority."""
    threads = [int(entry.name) for entry in Path(f"/proc/{process}/task").iterdir()]
    return sum(os.getpriority(os.PRIO_PROCESS, thread) == 19 for thread in threads)


async def test_compiler_starts_while_a_thousand_clients_are_connected(checker: GrammarChecker) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files_limit()
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert await checker.check(GOOD) is None
        assert checker._process is not None
        assert checker._process.stdout is not None
        assert checker._process.stdout.fileno() >= 1024
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_compiler_that_cannot_start_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with pytest.raises(ServerError, match="the grammar compiler has failed: the compiler has exited with status 1"):
        await GrammarChecker("/no/such/model", "auto").check(GOOD)


def test_compiler_exits_when_its_pipe_closes_during_a_compilation(checker: GrammarChecker) -> None:
    """When the frontend is killed, its end of the pipe closes."""
    process = checker._start()
    assert process.stdin is not None
    process.stdin.write(b'["json_schema", ' + json.dumps(HOSTILE.text).encode() + b"]\n")
    process.stdin.close()
    assert process.wait(60) == 0


HANGS_ONCE = """
import pathlib, sys, time
hung = pathlib.Path(sys.argv[1])
print("null", flush=True)
for line in sys.stdin:
    if not hung.exists():
        hung.touch()
        while True:
            time.sleep(600) if "sleep" in sys.argv else None
    print("null", flush=True)
"""


WAITS_FOR_FILE = """
import json, os, sys, time
print("null", flush=True)
for number, _ in enumerate(sys.stdin):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    print(json.dumps(f"answer {number}"), flush=True)
"""


def scripted_checker(script: str, *arguments: str) -> GrammarChecker:
    """A checker with another program as its compiler."""
    checker = GrammarChecker("model", "auto", max_compile_s=30.0)
    checker._command = [sys.executable, "-c", script, *arguments]
    return checker


async def test_grammar_that_took_too_long_is_tried_again_later(tmp_path: Path) -> None:
    checker = scripted_checker(HANGS_ONCE, str(tmp_path / "hung"))
    try:
        checker._max_compile_s = 0.2
        for _ in range(2):
            problem = await checker.check(GOOD)
            assert problem is not None
            assert problem.startswith("takes longer than 0.2 s to compile")
            assert checker._process is None, "the second check starts no compiler: the first result is cached"
        checker._known[GOOD] = problem, 0.0  # the cached result has expired
        checker._max_compile_s = 30.0
        assert await checker.check(GOOD) is None
    finally:
        checker._kill()


async def test_grammar_is_not_refused_for_time_in_which_other_processes_run(tmp_path: Path) -> None:
    """A compiler that waits for the CPU uses none of it."""
    checker = scripted_checker(WAITS_FOR_FILE, str(tmp_path / "go"))
    checker._max_compile_s = 0.2
    checking = asyncio.create_task(checker.check(GOOD))
    try:
        await asyncio.wait([checking], timeout=1.0)
        (tmp_path / "go").touch()
        assert await checking == "answer 0"
    finally:
        checker._kill()


async def test_compiler_without_an_answer_is_replaced_and_its_client_is_told_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAIT_S", 0.2)
    checker = scripted_checker(HANGS_ONCE, str(tmp_path / "hung"), "sleep")
    try:
        with pytest.raises(OverloadedError, match=r"too little CPU time to answer within 0\.2 s; try again later"):
            await checker.check(GOOD)
        assert await checker.check(GOOD) is None
    finally:
        checker._kill()


async def test_compilation_ends_when_the_server_stops(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    checker = scripted_checker(HANGS_ONCE, str(hung), "sleep")
    checking = asyncio.create_task(checker.check(GOOD))
    while not hung.exists():
        await asyncio.sleep(0.01)
    checker.close()
    with pytest.raises(ServerError, match="the compiler has exited with status -9"):
        await asyncio.wait_for(checking, 10)


async def test_grammars_beyond_the_limit_are_refused_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)
    checker = scripted_checker(WAITS_FOR_FILE, str(tmp_path / "go"))
    try:
        grammars = [Grammar("regex", letter) for letter in "ab"]
        waiting = [asyncio.create_task(checker.check(grammar)) for grammar in (*grammars, *grammars)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=r"2 grammars wait to be compiled \(limit 2\)"):
            await checker.check(GOOD)
        (tmp_path / "go").touch()
        assert await asyncio.gather(*waiting) == ["answer 0", "answer 1"] * 2, "equal grammars are compiled once"
        assert await checker.check(GOOD) == "answer 2"
    finally:
        checker._kill()


async def test_compiler_that_does_not_start_in_time_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "START_S", 0.1)
    checker = scripted_checker("import time; time.sleep(600)")
    with pytest.raises(ServerError, match=r"the grammar compiler has not started within 0\.1 s"):
        await checker.check(GOOD)
    assert checker._process is None


async def test_cache_of_results_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_REMEMBERED_CHARACTERS", 1000)
    (tmp_path / "hung").touch()
    checker = scripted_checker(HANGS_ONCE, str(tmp_path / "hung"))
    try:
        grammars = [Grammar("regex", letter * 400) for letter in "abc"]
        for grammar in (*grammars, grammars[2], Grammar("regex", "d" * 2000), GOOD):
            assert await checker.check(grammar) is None
        assert list(checker._known) == [GOOD]
        assert checker._known_characters == len(GOOD.text)
    finally:
        checker._kill()
