"""Starts servers and other programs for tests by forking a process that has already imported what they import.

Imports take most of the time until a server is ready: about one second of CPU time in the frontend and three in the
leader and in each rank. The fork server imports once, for all workers of a test run; `ForkServer.start()` forks a
server from it, `ForkServer.run()` any other program.

The processes of a server are related as on the command line: the leader is a child of the frontend, ranks are children
of the leader, each in a process group of its own. The frontend is a child of the fork server, which ends it with the
worker that has started it, and ends itself with the last worker. All of them are forked before the first of them runs
any code of pdserve, so that no thread, socket or event loop is copied: leader and ranks wait for the first line on
their stdin, as they do after `python -m`. Mooncake is imported after the fork, as it does not survive one.

Forked servers report their state more often than others (INTERVALS), because tests wait for reports. They load prefixes
from a KV store even if computing them is faster.
"""

import atexit
import contextlib
import errno
import functools
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from pdserve.common.gc_tuning import keep_for_good
from tests.chat_template import CHAT_TEMPLATE
from tests.processes import RUN_VARIABLE
from tests.small_products import multiply_without_onednn

LEADER, RANK = "pdserve.scheduler.engine.leader", "pdserve.scheduler.ranks.main"
PRELOADED = (
    "pdserve.server.cli",
    "pdserve.server.bench.command",
    "pdserve.server.launch.frontend",
    LEADER,
    RANK,
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.httptools_impl",
    # what those import when they need it
    "encodings.idna",
    "numpy.ma",
    "pydantic.v1",
    "rich.console",
)
INTERVALS = {
    ("pdserve.scheduler.engine.loop", "SNAPSHOT_INTERVAL_S"): 0.1,
    ("pdserve.scheduler.engine.frontend_link", "STATUS_INTERVAL_S"): 0.1,
    ("pdserve.scheduler.ranks.rank", "HOT_REPORT_S"): 0.1,
    ("pdserve.scheduler.store.kv_store", "MEASURE_AGAIN"): 1,
    ("pdserve.server.engine.grammar_checker", "STARTS_EARLY"): False,
}
"""Constants of modules and their values in forked servers: shorter intervals between reports of the state, prefixes are
loaded from a KV store even if computing them is faster, and the first grammar starts the compiler, which takes a second
of CPU time."""
CLI = "pdserve.server.cli:main"
NETNS_VARIABLE = "PDSERVE_TEST_NETNS"
"""In the environment of a server that has its own network namespace: the name of the namespace."""
HOOKS_VARIABLE, ROLE_VARIABLE = "PDSERVE_TEST_HOOKS", "PDSERVE_TEST_ROLE"
"""In the environment of a server that `tests/faults` pauses: the path of the test's socket, and the server's role."""
FIRST_SCRIPT = "PDSERVE_TEST_FIRST_SCRIPT"
"""Environment variable: a Python file to execute first. Leaders and ranks are forked afterwards."""
CPU_KERNELS = "PDSERVE_TEST_CPU_KERNELS"
"""Environment variable of the fork server: the setting `cpu_kernels` that it prepares; without it `auto`."""
START_S = 120.0
"""How long a worker waits for the fork server, whose imports take seconds of CPU time."""
MAX_REQUEST_BYTES = 1 << 20
_STATUS = struct.Struct("i")

Main = Callable[[], int]
File = int | IO[Any]
Files = tuple[File, File, File]
"""stdin, stdout and stderr of a process."""


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else 1000 * timeout_s))


def _ended(status: int | None, timeout_s: float | None) -> int:
    if status is None:
        raise subprocess.TimeoutExpired("pdserve", timeout_s or 0)
    return status


class ForkedProcess:
    """The frontend process of a server, or another program. Has the part of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = self._receive()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and _readable(self._connection.fileno(), 0):
            self.returncode = self._receive()
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status as in subprocess. Raises TimeoutExpired."""
        if self.returncode is None:
            _readable(self._connection.fileno(), timeout)
        return _ended(self.poll(), timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and the fork server has waited for it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> int:
        received = self._connection.recv(_STATUS.size)
        assert received, "the fork server has ended"
        (number,) = _STATUS.unpack(received)
        return int(number)


class ForkServer:
    """A connection to the fork server of a test run, which the first worker that needs it starts."""

    def __init__(self, python_path: str) -> None:
        """`python_path` has the packages `pdserve` and `tests`."""
        self._lock = threading.Lock()
        self._socket, self.pid = _connect(_socket_path(), python_path)
        atexit.register(self.close)

    def close(self) -> None:
        """Disconnect. Servers of this worker that still run get SIGTERM, as when the worker ends."""
        self._socket.close()

    def start(
        self, arguments: Sequence[str], log: IO[bytes], environment: dict[str, str], ranks: int, leaders: int = 1
    ) -> ForkedProcess:
        """Run `pdserve` with these arguments. It will start at most `leaders` leaders, one after the other, and each of
        them `ranks` rank processes.
        """
        with Path(os.devnull).open("rb") as null:
            return self._request(CLI, arguments, environment, (null, log, log), ranks, leaders)

    def run(self, main: str, arguments: Sequence[str], environment: dict[str, str], files: Files) -> ForkedProcess:
        """Call `main`, "MODULE:FUNCTION", with these arguments; it returns the exit code. `files` become stdin, stdout
        and stderr.
        """
        return self._request(main, arguments, environment, files, 0, 0)

    def _request(
        self, main: str, arguments: Sequence[str], environment: dict[str, str], files: Files, ranks: int, leaders: int
    ) -> ForkedProcess:
        fields: dict[str, Any] = {"main": main, "arguments": list(arguments), "environment": environment}
        fields |= {"ranks": ranks, "leaders": leaders}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = [file if isinstance(file, int) else file.fileno() for file in (*files, theirs)]
        with theirs, self._lock:
            socket.send_fds(self._socket, [json.dumps(fields).encode()], descriptors)
        return ForkedProcess(ours)


def start_early(python_path: str) -> socket.socket:
    """Start the fork server of a test run before its workers, so that it imports while pytest collects. The fork server
    runs until the last worker has ended and the returned connection is closed.
    """
    path, connection = _socket_path(), _new_socket()
    with _new_socket() as listener:
        listener.bind(str(path))
        _start_fork_server(listener, python_path)
        connection.connect(str(path))
    return connection


def _socket_path() -> Path:
    run = os.environ.get(RUN_VARIABLE, str(os.getpid()))
    return Path(tempfile.gettempdir(), f"pdserve-tests-{run}.sock")


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _start_fork_server(listener: socket.socket, python_path: str) -> None:
    listener.listen()
    # OpenBLAS starts threads when numpy is imported
    settings = {"PYTHONPATH": python_path, "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": _spin_count()}
    command = [sys.executable, "-P", "-m", "tests.cluster.forkserver"]
    started = subprocess.Popen(command, stdin=listener.fileno(), env={**os.environ, **settings})
    started.returncode = 0  # no warning that it still runs: it may outlive this worker


def _connect(path: Path, python_path: str) -> tuple[socket.socket, int]:
    """A connection to the fork server that listens at `path`, which is started if there is none, and its PID."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with _new_socket() as listener:
            try:
                listener.bind(str(path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                _start_fork_server(listener, python_path)
        connection = _new_socket()
        try:
            connection.connect(str(path))
            if pid := connection.recv(16):
                return connection, int(pid)
        except (ConnectionRefusedError, ConnectionResetError, FileNotFoundError):
            pass  # it does not listen yet, or has just ended with its last worker
        connection.close()
        time.sleep(0.01)
    raise TimeoutError(f"no fork server has answered at {path} for {START_S:.0f} s")


def _spin_count() -> str:
    """OpenMP reads GOMP_SPINCOUNT when torch is imported, which is before the frontend sets it for its leader."""
    from pdserve.server.engine.leader_process import SPIN_COUNTS

    return SPIN_COUNTS.get(os.uname().machine, SPIN_COUNTS["x86_64"])


# What follows runs in the fork server and in the processes that it forks.


class ForkedChild:
    """A leader or rank that waits for its first line. Has the part of `subprocess.Popen` that its parent uses."""

    def __init__(self, main: Main, waiting: "list[ForkedChild]") -> None:
        """Forks. In the child this raises `_RunInChild`."""
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.dup2(reader, 0)
            os.close(reader)
            os.close(writer)
            for sibling in waiting:
                sibling.stdin.close()
            raise _RunInChild(main)
        os.close(reader)
        self.stdin: IO[bytes] = os.fdopen(writer, "wb")
        self.returncode: int | None = None
        self._end = os.pidfd_open(self.pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        _readable(self._end, timeout)
        return _ended(self.poll(), timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _RunInChild(BaseException):
    """Raised in a forked child, to leave all frames of its parent before it runs `main`."""

    def __init__(self, main: Main) -> None:
        self.main = main


def serve(listener: socket.socket) -> None:
    """Fork a process per request until the last worker has ended. In a forked process this raises `_RunInChild`."""
    workers: dict[int, socket.socket] = {}
    """Connections, by descriptor."""
    running: dict[int, tuple[int, int, socket.socket]] = {}
    """By pidfd, which is readable when the process ends: descriptor of its worker, PID, socket for its exit status."""
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == listener.fileno():
                worker, _ = listener.accept()
                _send(worker, str(os.getpid()).encode())
                workers[worker.fileno()] = worker
                poller.register(worker, select.POLLIN)
            elif descriptor in running:
                poller.unregister(descriptor)
                os.close(descriptor)
                _, pid, report = running.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                with report:
                    _send(report, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            else:
                request = b""
                with contextlib.suppress(ConnectionResetError):  # the worker ended before it had read its answer
                    request, received, *_ = socket.recv_fds(workers[descriptor], MAX_REQUEST_BYTES, 4)
                if not request:
                    poller.unregister(descriptor)
                    workers.pop(descriptor).close()
                    for owner, pid, _ in running.values():
                        if owner == descriptor:
                            os.kill(pid, signal.SIGTERM)
                    if not workers:
                        return
                    continue
                *files, last = received
                report = socket.socket(fileno=last)
                assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would be missing after fork()"
                pid = os.fork()
                if pid == 0:
                    for inherited in (
                        listener,
                        report,
                        *workers.values(),
                        *(other for _, _, other in running.values()),
                    ):
                        inherited.close()
                    for ended in running:
                        os.close(ended)
                    _become(json.loads(request), files)
                for file in files:
                    os.close(file)
                _send(report, _STATUS.pack(pid))
                ended = os.pidfd_open(pid)
                poller.register(ended, select.POLLIN)
                running[ended] = descriptor, pid, report


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker has ended
        connection.send(message)


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the process that was asked for; if it is a server, fork its leaders first."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.setdefault("LANGUAGE", "C")  # otherwise argparse looks for files with translations of every word
    tempfile.tempdir = None  # it depends on the environment
    if NETNS_VARIABLE in os.environ:
        importlib.import_module("tests.faults.namespaces").enter(os.environ[NETNS_VARIABLE])
    sys.argv[1:] = request["arguments"]
    if (script := os.environ.get(FIRST_SCRIPT)) is not None:
        exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "first_script"})
    waiting: list[ForkedChild] = []
    for _ in range(request["leaders"]):
        waiting.append(ForkedChild(functools.partial(_become_leader, request["ranks"]), waiting))
    raise _RunInChild(functools.partial(_run, request["main"], request["arguments"], waiting))


def _run(main: str, arguments: list[str], leaders: list[ForkedChild]) -> int:
    if leaders:
        _hand_out({LEADER: iter(leaders)})
        _install_hooks("frontend")
    module, _, function = main.partition(":")
    return int(getattr(importlib.import_module(module), function)(arguments))


def _become_leader(ranks: int) -> int:
    waiting: list[ForkedChild] = []
    for _ in range(ranks):
        waiting.append(ForkedChild(functools.partial(_run_when_needed, RANK), waiting))
    _hand_out({RANK: iter(waiting)})
    return _run_when_needed(LEADER)


def _run_when_needed(module: str) -> int:
    """Run a leader or a rank when the first line arrives. Exit if the parent ends first, which closes stdin."""
    assert isinstance(sys.stdin.buffer, io.BufferedReader)
    if not sys.stdin.buffer.peek(1):
        return 0
    _install_hooks("leader" if module == LEADER else "rank")
    return int(importlib.import_module(module).main())


def _install_hooks(process: str) -> None:
    """Hooks with which tests pause the server or make a part of it fail."""
    if HOOKS_VARIABLE in os.environ:
        importlib.import_module("tests.faults.server_hooks").install(process)


def _hand_out(forked: dict[str, Iterator[ForkedChild]]) -> None:
    """Replace subprocess.Popen: `python -m MODULE` returns a waiting process instead of a new one."""
    original = subprocess.Popen

    class Popen(original):  # type: ignore[misc,valid-type]
        def __new__(cls, command: Sequence[str], **_: Any) -> Any:
            return next(forked[command[-1]]) if command[-1] in forked else super().__new__(cls)

    setattr(subprocess, "Popen", Popen)  # noqa: B010 - mypy does not let a class be replaced


def _main() -> int:
    """The fork server: import, then fork. Ctrl-C is for the test run, which ends its servers first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in PRELOADED:
        importlib.import_module(module)
    for (module, constant), interval_s in INTERVALS.items():
        assert hasattr(sys.modules[module], constant)
        setattr(sys.modules[module], constant, interval_s)
    multiply_without_onednn()
    torch = importlib.import_module("torch")
    importlib.import_module("pdserve.kernels.backends.dispatch").prepare_kernels(
        torch.device("cpu"), torch.float32, os.environ.get(CPU_KERNELS, "auto"), blocks=True
    )
    importlib.import_module("pdserve.server.observability.versions").installed_versions()  # caches the versions
    _prepare_frontends()
    _leave_out_mooncake_store()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch would take its operators apart at the end of every process
    keep_for_good()  # otherwise every leader and rank would collect garbage among all modules
    listener = socket.socket(fileno=os.dup(0))
    path, main = Path(listener.getsockname()), None
    try:
        serve(listener)
    except _RunInChild as forked:
        main = forked.main
    finally:
        if main is None:
            path.unlink()
    while main is not None:  # a leader forks its ranks while it runs
        try:
            _end(main())
        except _RunInChild as forked:
            main = forked.main
    return 0


def _prepare_frontends() -> None:
    """Do once what every frontend would do with the same result, and fill caches."""
    cli = importlib.import_module("pdserve.server.cli")
    parsers = functools.cache(vars(cli)["make_parser"])
    for role in ("prefill", "decode", "serve"):
        parsers(role)
    setattr(cli, "make_parser", parsers)  # noqa: B010 - mypy knows no attributes of modules that are imported by name
    importlib.import_module("pdserve.server.observability.metrics").Metrics()
    importlib.import_module("pdserve.server.text.chat_templates").compile_template(CHAT_TEMPLATE)


def _leave_out_mooncake_store() -> None:
    """`import mooncake` loads the library of the KV store for a class that nothing here uses: a third of the CPU time
    of the import. Servers with a KV store still import `mooncake.store`.
    """
    assert "mooncake" not in sys.modules, "Mooncake does not survive a fork"
    unused = types.ModuleType("mooncake.buffer_pool")
    vars(unused).update(BufferPool=None, RegisteredBufferPool=None)
    sys.modules[unused.__name__] = unused


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but without taking all modules apart: that takes a third of a second of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(_main())
