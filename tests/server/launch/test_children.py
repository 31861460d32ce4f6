"""Supervision of real processes: logs, exits, bounded shutdown, and no orphans when the parent is killed."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.server.launch.children import ChildEndedError, Children, without_role
from tests.cluster.servers import wait_until
from tests.processes import gone

ROOT = Path(__file__).parents[3]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "PYTHONUNBUFFERED": "1"}

SLEEPS = "import time; print('started'); time.sleep(60)"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
HAS_GRANDCHILD = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid); "
    "import time; time.sleep(60)"
)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), highlight=False)


@pytest.fixture
def children(console: Console) -> Iterator[Children]:
    children = Children(console)
    yield children
    children.stop(0.0)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def python(script: str) -> list[str]:
    return [sys.executable, "-P", "-c", script]


def test_lines_have_the_name_of_the_child_and_no_colour_without_a_terminal(
    children: Children, console: Console
) -> None:
    children.start("prefill", python("import sys; print('one [b]'); print('two', file=sys.stderr); input()"), ENVIRON)
    wait_until(lambda: "EOFError" in output(console), 30, "the last line")
    assert output(console).splitlines()[:2] == ["[prefill] one [b]", "[prefill] two"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("2026-11-15 02:14:54.123 I decode: ready: decode: yes", "2026-11-15 02:14:54.123 I ready: decode: yes"),
        ("2026-11-15 02:14:54.123 W decode rank 1: slow", "2026-11-15 02:14:54.123 W rank 1: slow"),
        ("2026-11-15 02:14:54.123 I prefill: ready", "2026-11-15 02:14:54.123 I prefill: ready"),
        ("pdserve: error: decode: no", "pdserve: error: decode: no"),
        ("  decode: indented", "  decode: indented"),
    ],
)
def test_role_is_removed_from_the_line(line: str, shown: str) -> None:
    assert without_role(line, "decode") == shown


def test_exit_is_reported_with_its_code_and_last_line(children: Children) -> None:
    children.start("decode", python(SLEEPS), ENVIRON)
    children.check()
    child = children.start("prefill", python("import sys; print('no such model'); sys.exit(2)"), ENVIRON)
    child.process.wait()
    message = r"^prefill ended with exit code 2 after \d+\.\d s; its last line: no such model$"
    with pytest.raises(ChildEndedError, match=message):
        children.check()


def test_killed_child_is_reported_with_its_signal(children: Children) -> None:
    child = children.start("prefill", python(SLEEPS), ENVIRON)
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    with pytest.raises(ChildEndedError, match="prefill was killed by SIGKILL after"):
        children.check()


def test_child_that_ends_is_started_again_with_growing_pauses(console: Console) -> None:
    """At most five times within a minute."""
    now = 0.0
    children = Children(console, lambda: now)
    child = children.start("prefill", python("print('out of luck')"), ENVIRON)
    pauses = []
    for _ in range(5):
        child.process.wait()
        ended_at = now
        children.restart_ended()
        former = child.process
        while child.process is former:
            now += 0.5
            children.restart_ended()
        pauses.append(now - ended_at)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]
    child.process.wait()
    with pytest.raises(ChildEndedError, match=r"last line: out of luck; it was started 5 times within a minute$"):
        children.restart_ended()
    now += 60
    children.restart_ended()
    assert output(console).splitlines()[-1].endswith("last line: out of luck; starting it again")
    children.stop(0.0)


def test_child_whose_settings_are_wrong_is_not_started_again(children: Children) -> None:
    child = children.start("prefill", python("raise SystemExit(2)"), ENVIRON)
    child.process.wait()
    with pytest.raises(ChildEndedError, match="prefill ended with exit code 2") as ended:
        children.restart_ended()
    assert ended.value.exit_code == 2


def test_descendants_of_a_killed_child_end_before_it_is_started_again(children: Children, console: Console) -> None:
    child = children.start("parent", python(HAS_GRANDCHILD), ENVIRON)
    wait_until(lambda: "[parent]" in output(console), 30, "it has started")
    grandchild, former = int(output(console).split("[parent]")[1].split()[0]), child.process
    former.kill()
    former.wait()
    children.restart_ended()
    wait_until(lambda: gone(grandchild), 10, "the grandchild has ended")
    children.restart_ended()
    assert child.process is not former
    assert "parent was killed by SIGKILL" in output(console)


def test_stop_ends_at_once_while_a_child_waits_for_its_restart(children: Children) -> None:
    child = children.start("prefill", python("raise SystemExit(1)"), ENVIRON)
    child.process.wait()
    children.restart_ended()
    began = time.monotonic()
    children.stop(60.0)
    assert time.monotonic() - began < 5
    children.restart_ended()
    assert child.process.poll() == 1, "nothing is started after stop"


def test_stop_kills_children_that_ignore_sigterm_and_all_descendants(children: Children, console: Console) -> None:
    deaf = children.start("deaf", python(IGNORES_TERM), ENVIRON)
    parent = children.start("parent", python(HAS_GRANDCHILD), ENVIRON)
    wait_until(lambda: "started" in output(console) and "[parent]" in output(console), 30, "both have started")
    grandchild = int(output(console).split("[parent]")[1].split()[0])
    assert not gone(grandchild)
    begun = time.monotonic()
    children.stop(1.0)
    assert 1.0 <= time.monotonic() - begun < 20
    assert "deaf did not stop in time" in output(console)
    assert "parent did not stop" not in output(console)
    wait_until(lambda: all(map(gone, (deaf.process.pid, parent.process.pid, grandchild))), 10, "all have ended")


def test_held_log_lines_are_printed_afterwards(children: Children, console: Console) -> None:
    with children.logs_held():
        child = children.start("decode", python("print('later')"), ENVIRON)
        child.process.wait()
        child.reader.join()
        console.print("now")
    assert output(console).splitlines() == ["now", "[decode]  later"]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_children_end_when_their_parent_is_killed() -> None:
    child_script = (
        "import sys, time; from pdserve.server.launch.children import end_with_parent; "
        "end_with_parent(int(sys.argv[1])); print('watching', flush=True); time.sleep(60)"
    )
    parent_script = (
        "import os, subprocess, sys, time; command = [sys.executable, '-P', '-c', sys.argv[1], str(os.getpid())]; "
        "child = subprocess.Popen(command, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([*python(parent_script), child_script], env=ENVIRON, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    wait_until(lambda: gone(pid), 10, "the child has ended")


def test_child_exits_when_its_parent_has_already_exited() -> None:
    script = "from pdserve.server.launch.children import end_with_parent; end_with_parent(1); print('started')"
    result = subprocess.run(python(script), env=ENVIRON, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the process that started this one (1) has exited" in result.stderr
    assert result.stdout == ""
