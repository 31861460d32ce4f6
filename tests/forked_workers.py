"""A pytest plugin: `--workers=N` runs the tests in N processes, which are forked after pytest has collected the tests.
With `--minutes=M`, a file that has not begun M minutes after pytest has started does not run.

Imports and collection take 15 s of CPU time. Workers of pytest-xdist are new interpreters, so each of them spends that
time. Here it is spent once, and workers share the memory of imported modules.

A worker takes a file from a queue, runs its tests, and takes the next one. Session fixtures live as long as the worker.
When a worker is killed, the test that it ran fails, and a new worker runs the other tests of the file.
"""

import itertools
import math
import multiprocessing.connection
import os
import signal
import struct
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import pytest
from _pytest.runner import CallInfo

from tests.processes import RUN_VARIABLE

GROUPS = {
    "timed": [
        f"cluster/test_{name}" for name in ("attacks", "chaos", "failures", "ranks", "requests", "routers", "topology")
    ],
    "smollm2": [
        "cluster/test_smollm2_pair",
        "cluster/test_structured_output",
        "models/decoders/test_smollm2",
        "models/formats/test_gguf_file",
    ],
}
"""Files that one worker runs, one after the other: those with tests that fail when servers respond late, and those that
share a model which takes long to load."""
EARLY = {
    "tests/faults/test_fault_cells.py": 0,
    "tests/transfer/control/test_control.py": 15,
    "tests/transfer/data/test_sender.py": 30,
}
"""Files with long waits, and how many files start before each of them. Started early, they wait while other files use
the CPU, and the run does not end with their waits."""
GROUP_OF = {f"tests/{file}.py": group for group, files in GROUPS.items() for file in files}
INTERRUPT_S = 30.0
"""Time that interrupted workers have to stop their servers."""
_NUMBER = struct.Struct("i")
_STARTED = time.monotonic()

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # otherwise torch looks for GPUs with CUDA, which breaks in forks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forked processes")
    parser.addoption("--minutes", type=float, metavar="M", help="with --workers: begin no test file after M minutes")


def pytest_sessionstart(session: pytest.Session) -> None:
    """If servers will be tested, start the one from which tests fork them: it imports while pytest collects."""
    config = session.config
    all_folders = config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.getoption("tier", None) != "check"
    if config.getoption("--workers") and all_folders:
        from tests.cluster.forkserver import start_early
        from tests.cluster.servers import program_path

        os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex)
        config.add_cleanup(start_early(program_path()).close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Literal[True] | None:
    workers, option = session.config.getoption("--workers"), session.config.option
    if not workers or option.collectonly or session.testsfailed or not session.items:
        return None
    Workers(session, workers).run()
    return True


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self.exited = os.pidfd_open(pid)
        """Ready when the process has ended; a process that a test has forked may keep the connection open."""
        self.running: int | None = None
        """Number of the test that it runs."""
        self.left: list[int] = []
        """Numbers of the tests of its file that it has not started."""
        self.ended = False
        """Whether it has reported that all its tests are done."""


class Workers:
    """All worker processes of a session."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        self._hook = session.config.hook
        groups: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            file = _file(item)
            groups.setdefault(GROUP_OF.get(file, file), []).append(number)
        place = {name: EARLY.get(name, number + 0.5) for number, name in enumerate(groups)}
        self._groups = [groups[name] for name in sorted(groups, key=lambda name: place[name])]
        self._count = min(count, len(groups))
        self._numbers = itertools.count()
        self._workers: dict[Connection, Worker] = {}
        # reads of a pipe are atomic: the worker that reads a number owns that group
        self._queue, queue = os.pipe()
        os.set_blocking(queue, False)  # a pipe holds 16,384 numbers
        os.write(queue, b"".join(map(_NUMBER.pack, range(len(groups)))))
        os.close(queue)

    def run(self) -> None:
        reporter: Any = self._session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None and self._count > 1:
            reporter.showfspath = False  # several files at the same time
        os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex)
        temporary: Any = self._session.config._tmp_path_factory  # type: ignore[attr-defined]
        temporary.getbasetemp()  # those of workers are folders in it
        try:
            for _ in range(self._count):
                self._fork([])
            while self._workers:
                ready = multiprocessing.connection.wait([*self._workers, *(each.exited for each in self._all)])
                for worker in self._all:
                    if worker.connection in ready:
                        self._receive(worker)
                    elif worker.exited in ready:
                        self._gone(worker)
        finally:
            self._interrupt()
            os.close(self._queue)

    @property
    def _all(self) -> list[Worker]:
        return list(self._workers.values())

    def _fork(self, left: list[int]) -> None:
        """Start a worker, which first runs the tests `left`."""
        name = f"worker{next(self._numbers)}"
        ours, theirs = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()  # a worker would write it again
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if there are threads
            pid = os.fork()
        if not pid:
            for connection in (ours, *self._workers):
                connection.close()
            _work(self._session, name, theirs, self._queue, self._groups, left)
        theirs.close()
        self._workers[ours] = Worker(pid, ours)

    def _receive(self, worker: Worker) -> None:
        try:
            kind, *values = worker.connection.recv()
        except EOFError:
            self._gone(worker)
            return
        config, hook = self._session.config, self._hook
        if kind == "group":
            worker.left = values[0]
        elif kind == "start":
            worker.running = worker.left.pop(0)
            item = self._session.items[worker.running]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "finish":
            assert worker.running is not None
            item, worker.running = self._session.items[worker.running], None
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=values[0]))
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)
            if self._session.shouldstop:
                raise self._session.Interrupted(self._session.shouldstop)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=values[0])
        else:
            worker.ended = True

    def _gone(self, worker: Worker) -> None:
        status = self._forget(worker)
        if worker.ended:
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if worker.running is None:
            raise RuntimeError(f"a worker ended outside of tests: {how}")
        item = self._session.items[worker.running]
        text = f"the worker that ran this test ended: {how}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._fork(worker.left)

    def _forget(self, worker: Worker) -> int:
        """Returns the exit status of a worker that has ended, or is about to."""
        del self._workers[worker.connection]
        worker.connection.close()
        os.close(worker.exited)
        return os.waitpid(worker.pid, 0)[1]

    def _interrupt(self) -> None:
        """End workers that still run, when the session ends early: their fixtures stop servers."""
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_S
        while self._workers:
            handles: list[Connection | int] = [*self._workers, *(each.exited for each in self._all)]
            ready = multiprocessing.connection.wait(handles, max(0, deadline - time.monotonic()))
            if not ready:
                for worker in self._all:
                    os.kill(worker.pid, signal.SIGKILL)
                deadline = time.monotonic() + INTERRUPT_S
            for worker in self._all:
                if worker.exited in ready:
                    self._forget(worker)
                elif worker.connection in ready:  # what it reports is not read any more, but must not fill the pipe
                    with suppress(EOFError):
                        worker.connection.recv()


class Sender:
    """A plugin of workers that sends their reports to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logstart(self) -> None:
        self._connection.send(("start",))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(("finish",))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        shown = warnings.WarningMessage(
            str(warning_message.message), Warning, warning_message.filename, warning_message.lineno
        )
        fields = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", fields))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _work(
    session: pytest.Session, name: str, connection: Connection, queue: int, groups: list[list[int]], left: list[int]
) -> NoReturn:
    """Run tests in this process, which has just been forked."""
    code = 1
    try:
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the parent
        capture.start_global_capturing()
        capture.suspend_global_capture()
        temporary: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        temporary._basetemp = temporary.getbasetemp() / name
        temporary._basetemp.mkdir(mode=0o700)
        plugins.register(Sender(session.config, connection))
        minutes = session.config.getoption("--minutes")
        deadline = math.inf if minutes is None else _STARTED + 60 * minutes
        item = None
        file = _file(session.items[left[0]]) if left else ""
        try:
            for numbers in itertools.chain([left] if left else [], _claimed(queue, groups)):
                connection.send(("group", numbers))
                for number, following in itertools.zip_longest(numbers, numbers[1:]):
                    if _file(session.items[number]) != file and time.monotonic() > deadline:
                        break
                    item = session.items[number]
                    file = _file(item)
                    # after the last test of a group, fixtures of the session stay
                    then: Any = session if following is None else session.items[following]
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the parent interrupts workers once more
            _end_session_fixtures(session, item)
            _save_coverage()
        connection.send(("end",))
        code = 0
    except KeyboardInterrupt:
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _claimed(queue: int, groups: list[list[int]]) -> Iterator[list[int]]:
    """Groups of tests, each for one worker."""
    while number := os.read(queue, _NUMBER.size):
        yield groups[_NUMBER.unpack(number)[0]]


def _end_session_fixtures(session: pytest.Session, last: pytest.Item | None) -> None:
    """Tear down the session fixtures. An error is reported for the last test, as without workers."""
    call = CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), "teardown")
    if call.excinfo is not None and last is not None:
        report = session.config.hook.pytest_runtest_makereport(item=last, call=call)
        session.config.hook.pytest_runtest_logreport(report=report)


def _save_coverage() -> None:
    if "pytest_cov" in sys.modules:
        import coverage

        measured = coverage.Coverage.current()
        if measured is not None:
            measured.stop()
            measured.save()
