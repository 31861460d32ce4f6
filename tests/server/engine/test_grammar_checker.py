"""The grammar compiler of a frontend: child processes that are killed when they take too long, and replaced when they
end.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from pdserve.common.errors import OverloadedError, ServerError, UnavailableError
from pdserve.common.sampling import Grammar
from pdserve.models.grammar.check_messages import STOPPED, Report, state_and_cpu_s
from pdserve.server.engine import grammar_checker
from pdserve.server.engine.grammar_checker import GrammarChecker
from pdserve.server.launch.frontend import raise_open_files_limit
from tests.cluster.servers import REPOSITORY, python_path, wait_until
from tests.server.http_harness import write_byte_model

GOOD, BAD = Grammar("regex", "a+"), Grammar("regex", "(")
OTHERS = [Grammar("regex", f"a+b{{{number}}}") for number in range(1, 21)]


def slow(name: str, properties: int = 8000) -> Grammar:
    """With 8,000 properties, takes 13 s to compile; with 1,600, half a second."""
    schema = {"type": "object", "properties": {f"{name}{number}": {} for number in range(properties)}}
    return Grammar("json_schema", json.dumps(schema))


HOSTILE = slow("k")


@pytest_asyncio.fixture
async def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarChecker]:
    """One that gives a grammar enough time."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=60.0)
    yield checker
    await end(checker)


async def end(checker: GrammarChecker) -> None:
    checker.close()
    await checker.closed()


def process_id(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


async def child_of(checker: GrammarChecker, beside: int | None = None) -> int:
    """The process that compiles a grammar; a new one, if `beside` is given."""
    async with asyncio.timeout(60):
        while True:
            if checker._ready and (found := [one for one in children(process_id(checker)) if one != beside]):
                return found[0]
            await asyncio.sleep(0.005)


async def test_results_are_cached(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    number = checker._number
    assert await checker.check(GOOD) is None
    assert "unclosed group" in (await checker.check(BAD) or "")
    assert checker._number == number, "no grammar was compiled again"


async def test_files_of_the_working_directory_are_not_imported(
    checker: GrammarChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may start in any directory, also in one with a file that has the name of a module."""
    (tmp_path / "llguidance.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / ".dev"))
    assert await checker.check(GOOD) is None


async def test_slow_compilation_is_killed_and_tried_again_later(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None
    first = process_id(checker)
    checker._max_compile_s = 0.5
    checker._command[-1] = "0.5"
    os.kill(first, signal.SIGKILL)
    assert await checker.check(HOSTILE) == "takes longer than 0.5 s to compile, the limit"
    process, number = process_id(checker), checker._number
    assert await checker.check(HOSTILE) == "takes longer than 0.5 s to compile, the limit"
    assert checker._number == number, "the result is cached"
    checker._known[HOSTILE] = "expired", 0.0
    await checker.check(HOSTILE)
    assert checker._number == number + 1
    assert await checker.check(Grammar("regex", "b+")) is None
    assert process_id(checker) == process, "only the compilation was ended"


async def test_compilation_has_a_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    checker = GrammarChecker(str(write_byte_model(tmp_path)), "auto", max_compile_s=60.0, max_bytes=16 << 20)
    grammars = [HOSTILE, *OTHERS]
    problems = await asyncio.gather(*map(checker.check, grammars))
    assert problems == ["takes more than 16 MiB of memory to compile, the limit"] + [None] * len(OTHERS)
    await end(checker)


async def test_only_a_grammar_that_takes_long_has_the_lowest_priority(checker: GrammarChecker) -> None:
    compiling = asyncio.create_task(checker.check(HOSTILE))
    child = await child_of(checker)
    async with asyncio.timeout(60):
        while os.getpriority(os.PRIO_PROCESS, child) != 19:
            await asyncio.sleep(0.01)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own < 19, "this test does not run at the lowest priority"
    assert os.getpriority(os.PRIO_PROCESS, process_id(checker)) == own
    compiling.cancel()


async def test_compiler_starts_while_a_thousand_clients_are_connected(checker: GrammarChecker) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files_limit()
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert await checker.check(GOOD) is None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_compiler_starts_before_the_first_grammar(checker: GrammarChecker) -> None:
    checker.start()
    async with asyncio.timeout(60):
        while not checker._ready:
            await asyncio.sleep(0.005)
    process = process_id(checker)
    checker.start()
    assert await checker.check(GOOD) is None
    assert process_id(checker) == process


async def test_compiler_that_cannot_start_early_is_started_for_a_grammar(
    checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    command, checker._command = checker._command, ["/bin/false"]
    checker.start()
    assert checker._attending is not None
    await checker._attending
    assert caplog.text.count("the grammar compiler has ended with status 1") == 1
    checker._command = command
    assert await checker.check(GOOD) is None


async def test_compiler_does_not_start_after_the_server_has_stopped(checker: GrammarChecker) -> None:
    checker.start()
    attending = checker._attending
    assert attending is not None
    checker.close()
    await attending
    checker.start()
    assert checker._process is None
    assert checker._attending is None


async def test_compiler_that_cannot_start_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with pytest.raises(ServerError, match="the grammar compiler has failed"):
        await GrammarChecker("/no/such/model", "auto").check(GOOD)


async def test_compiler_that_does_not_start_in_time_is_a_server_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_checker, "START_S", 0.1)
    checker = GrammarChecker("model", "auto")
    checker._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(ServerError, match="the grammar compiler has failed"):
        await checker.check(GOOD)
    assert caplog.text.count("the grammar compiler has not started") == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["compiler", "its child"])
async def test_requests_that_waited_are_tried_again(
    checker: GrammarChecker, number: signal.Signals, victim: str
) -> None:
    """One grammar is in compilation and 20 wait."""
    grammar = slow("k", 1600)
    checks = [asyncio.create_task(checker.check(one)) for one in (grammar, *OTHERS)]
    child = await child_of(checker)
    process = process_id(checker)
    os.kill(child if victim == "its child" else process, number)
    assert await asyncio.wait_for(asyncio.gather(*checks), 120) == [None] * 21
    if victim == "compiler":
        assert process_id(checker) != process
        wait_until(lambda: not Path(f"/proc/{child}").exists(), 5, "the child has ended with the compiler")
    else:
        assert process_id(checker) == process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_grammar_that_ends_the_compiler_twice_is_refused(checker: GrammarChecker, number: signal.Signals) -> None:
    """The second time it is compiled with no other, so that only it is refused."""
    checks = [asyncio.create_task(checker.check(HOSTILE, "a")), asyncio.create_task(checker.check(slow("j"), "b"))]
    child = await child_of(checker)
    await child_of(checker, beside=child)
    os.kill(process_id(checker), number)
    died = process_id(checker)
    while not (checker._ready and process_id(checker) != died):
        await asyncio.sleep(0.01)
    second = await child_of(checker)
    others = [asyncio.create_task(checker.check(one, "c")) for one in OTHERS]
    await asyncio.sleep(0.2)
    assert children(process_id(checker)) == [second], "nothing is compiled beside it"
    os.kill(second, number)
    assert await checks[0] == "ended the grammar compiler twice; it is refused for 60 s"
    assert await checker.check(HOSTILE) == "ended the grammar compiler twice; it is refused for 60 s"
    third = await child_of(checker, beside=second)
    os.kill(third, number)
    assert (await checks[1] or "").startswith("ended the grammar compiler twice")
    assert await asyncio.gather(*others) == [None] * len(OTHERS)


async def test_compiler_that_is_killed_while_idle_is_replaced(checker: GrammarChecker) -> None:
    for number, grammar in ((signal.SIGKILL, OTHERS[0]), (signal.SIGSTOP, OTHERS[1]), (signal.SIGKILL, OTHERS[2])):
        assert await checker.check(grammar) is None
        process = process_id(checker)
        os.kill(process, number)
        if number == signal.SIGSTOP:
            wait_until(lambda process=process: state_and_cpu_s(process)[0] in STOPPED, 5, "it has stopped")  # type: ignore[misc]
    assert await checker.check(GOOD) is None


async def test_calls_end_when_the_server_stops(checker: GrammarChecker) -> None:
    checking = asyncio.create_task(checker.check(HOSTILE))
    child = await child_of(checker)
    checker.close()
    with pytest.raises(UnavailableError, match="the server has stopped"):
        await asyncio.wait_for(checking, 10)
    with pytest.raises(UnavailableError, match="the server has stopped"):
        await asyncio.wait_for(checker.check(GOOD), 10)
    wait_until(lambda: not Path(f"/proc/{child}").exists(), 5, "the compilation has ended")


async def test_compiler_exits_when_its_pipe_closes_during_a_compilation(checker: GrammarChecker) -> None:
    """When the frontend is killed, its end of the pipe closes."""
    compiling = asyncio.create_task(checker.check(HOSTILE))
    child, process = await child_of(checker), process_id(checker)
    assert checker._process is not None
    assert checker._process.stdin is not None
    checker._closed = True
    checker._process.stdin.close()
    await asyncio.wait_for(checker.closed(), 10)
    for ended in (child, process):
        wait_until(lambda ended=ended: not Path(f"/proc/{ended}").exists(), 5, "the process has ended")  # type: ignore[misc]
    compiling.cancel()


async def test_a_small_grammar_does_not_wait_for_large_ones_of_another_client(checker: GrammarChecker) -> None:
    assert await checker.check(GOOD) is None  # the compiler has started
    large = [asyncio.create_task(checker.check(slow(f"{name}_"), "127.0.0.1")) for name in range(40)]
    await child_of(checker)
    began = time.monotonic()
    assert await checker.check(Grammar("regex", "b+"), "127.0.0.2") is None
    assert time.monotonic() - began < 2
    assert not any(one.done() for one in large)
    for one in large:
        one.cancel()


async def test_full_queue_refuses_the_client_that_has_most(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 4)
    waiting = [asyncio.create_task(checker.check(slow(name), "a")) for name in ("a", "aa", "aaa", "aaaa")]
    await child_of(checker)
    with pytest.raises(OverloadedError, match=r"4 grammars wait to be compiled \(limit 4\)"):
        await checker.check(GOOD, "a")
    assert await checker.check(GOOD, "b") is None
    with pytest.raises(OverloadedError, match=r"4 grammars wait"):
        await waiting[3]
    assert not any(one.done() for one in waiting[:3])
    for one in waiting:
        one.cancel()


async def test_grammar_that_nobody_waits_for_any_more_is_not_compiled(checker: GrammarChecker) -> None:
    running = [asyncio.create_task(checker.check(slow(name, 1600), name)) for name in "kj"]
    await child_of(checker, beside=await child_of(checker))
    left = [asyncio.create_task(checker.check(slow(name), client)) for name in "ab" for client in "cd"]
    await asyncio.sleep(0.01)
    for one in left[:3]:
        one.cancel()
    await asyncio.wait(left[:3])
    assert [check.grammar for check in checker._checks.values()] == [slow("k", 1600), slow("j", 1600), slow("b")]
    left[3].cancel()
    assert await asyncio.gather(*running) == [None, None]
    assert await checker.check(GOOD) is None
    assert checker._number == 3


async def test_equal_grammars_are_compiled_once(checker: GrammarChecker) -> None:
    assert await asyncio.gather(*(checker.check(GOOD, client) for client in "aabb")) == [None] * 4
    assert checker._number == 1


async def test_cache_of_results_has_a_limited_size(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_REMEMBERED_CHARACTERS", 1000)
    grammars = [Grammar("regex", letter * 400) for letter in "abc"]
    for grammar in (*grammars, grammars[2], Grammar("regex", "d" * 2000), GOOD):
        assert await checker.check(grammar) is None
    assert list(checker._known) == [GOOD]
    assert checker._known_characters == len(GOOD.text)


async def test_answer_that_arrives_with_the_end_is_dropped() -> None:
    checker = GrammarChecker("model", "auto")
    program = "import sys; print('{}', flush=True); sys.stdin.read()"
    checker._command = [sys.executable, "-c", program]
    asking = asyncio.create_task(checker.check(GOOD))
    async with asyncio.timeout(20):
        while not checker._running:
            await asyncio.sleep(0.01)
    attending, process = checker._attending, checker._process
    assert attending is not None
    assert process is not None
    assert process.stdout is not None
    process.stdout.feed_data(msgspec.json.encode(Report(next(iter(checker._running)))) + b"\n")
    checker.close()
    with pytest.raises(UnavailableError):
        await asking
    await attending
