"""Real servers for tests: processes of `pdserve prefill` and `pdserve decode`, used through HTTP."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import torch

from tests.cluster.forkserver import CLI, File, ForkedProcess, ForkServer
from tests.ports import free_port
from tests.processes import stop_process

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
REPORT_S = 0.1
"""Interval between two reports of a forked server (INTERVALS of forkserver.py)."""
HTTP = httpx.Client(
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), verify=False, trust_env=False
)
"""Opens a connection per request. `httpx.get` would read all root certificates first (60 ms)."""


def python_path() -> str:
    """PYTHONPATH for servers that run from the checkout, installed or not."""
    return os.pathsep.join([str(REPOSITORY / ".dev"), *filter(None, [os.environ.get("PYTHONPATH")])])


@functools.cache
def fork_server() -> ForkServer:
    """Connected on first use. Workers of a test run share it."""
    return ForkServer(program_path())


def program_path() -> str:
    """PYTHONPATH for programs that lie in tests/, such as the fork server."""
    return os.pathsep.join([python_path(), str(REPOSITORY)])


def start_forked(main: str, *arguments: str, stderr: File = 2) -> tuple[ForkedProcess, IO[str], IO[str]]:
    """Call `main`, "MODULE:FUNCTION", in a forked process; returns that process, its stdin and its stdout."""
    (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
    try:
        process = fork_server().run(main, arguments, dict(os.environ), (their_stdin, their_stdout, stderr))
    finally:
        os.close(their_stdin)
        os.close(their_stdout)
    return process, os.fdopen(stdin, "w"), os.fdopen(stdout)


class ForkedCommand:
    """`pdserve` in a forked process, with its output in files, for tests that read all of it at the end."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._stdout, self._stderr = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 (closed in close())
        environment = {**os.environ, "PYTHONPATH": python_path(), **(environment or {})}
        with Path(os.devnull).open("rb") as null:
            self.process = fork_server().run(CLI, arguments, environment, (null, self._stdout, self._stderr))

    def finish(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Wait for the exit. Returns exit code, stdout and stderr."""
        code = self.process.wait(timeout_s)
        for file in (self._stdout, self._stderr):
            file.seek(0)
        return code, self._stdout.read(), self._stderr.read()

    def close(self) -> None:
        self.process.kill()
        self._stdout.close()
        self._stderr.close()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Returns the seconds until `condition` held; fails the test after `timeout_s`."""
    started = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started
        assert waited_s < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(min(0.02 + waited_s / 5, REPORT_S))  # most conditions ask a server, which takes CPU time
    return time.monotonic() - started


class Server:
    """One server: its frontend process, its leader (a child of the frontend) and its log.

    The server ends with the test process, also when that is killed.
    """

    def __init__(
        self,
        role: str,
        model: str | Path,
        log: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        forked: bool = True,
        leaders: int = 1,
    ) -> None:
        """`launcher` is a command that runs that of the server, for example `unshare`. Forked servers start faster.
        `leaders` is how many leaders the server starts in total: one, and one per switch of its role.
        """
        self.role = role
        self.model = str(model)
        self.log = log
        self.flags = list(flags)
        self.env = env or {}
        self.launcher = launcher
        self.leaders = leaders
        self.forked = forked and not launcher and not torch.cuda.is_available()
        self.host = dict(itertools.pairwise(self.flags)).get("--host", "127.0.0.1")
        self.port = free_port()
        self.bootstrap_port = free_port()
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.bootstrap_port}"

    @property
    def bootstrap(self) -> dict[str, Any]:
        """Fields of a request that names this prefill server."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}

    def start(self) -> "Server":
        """Start the processes; wait_ready() waits for them. A server that has ended can be started again."""
        arguments = [self.role, "--model", self.model, "--port", str(self.port), "--threads", "1", "--verify-kv"]
        if self.role == "prefill":
            arguments += ["--bootstrap-port", str(self.bootstrap_port)]
        elif self.role == "decode" and "--local-prefill" not in self.flags:
            arguments += ["--local-prefill", "never"]  # most tests are about transfers
        arguments += self.flags
        environment = {**os.environ, "PYTHONPATH": python_path(), **self.env}
        with self.log.open("ab") as log:
            if self.forked:
                server = fork_server()
                arguments += ["--parent-pid", str(server.pid)]
                self.process = server.start(arguments, log, environment, self._rank_processes(), self.leaders)
                return self
            if not self.launcher:
                arguments += ["--parent-pid", str(os.getpid())]  # a test run that is killed leaves no servers behind
            command = [*self.launcher, sys.executable, "-P", "-m", "pdserve.server", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self

    def _rank_processes(self) -> int:
        sizes = dict(itertools.pairwise(self.flags))
        ranks = int(sizes.get("--tp", "1")) * int(sizes.get("--pp", "1"))
        return ranks // int(sizes.get("--nnodes", "1")) if ranks > 1 else 0

    def wait_ready(self, *, peers: int | None = None) -> "Server":
        """Wait until /health is 200, the leader has reported its state and, if given, `peers` peers are paired."""

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.role} ended while starting:\n{self.log.read_text()}"
            try:
                health = HTTP.get(f"{self.url}/health", timeout=2)
            except httpx.TransportError:
                return False
            paired = sum(peer["state"] == "paired" for peer in health.json()["peers"])
            return health.status_code == 200 and (peers is None or paired == peers) and bool(self.info()["states"])

        wait_until(ready, START_TIMEOUT_S, f"{self.role} ready")
        return self

    def leader_pid(self) -> int:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        leader, *waiting = (int(child) for child in children if not is_grammar_compiler(child))
        assert len(waiting) < self.leaders
        return leader

    def signal_all(self, number: signal.Signals) -> None:
        """Signal the leader, then the frontend."""
        assert self.process is not None
        os.kill(self.leader_pid(), number)
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP both processes; returns when both have stopped."""
        assert self.process is not None
        stop_process(self.leader_pid())
        stop_process(self.process.pid)

    def kill(self) -> None:
        """SIGKILL both processes. The frontend is stopped first, so that it cannot respond for a lost leader."""
        assert self.process is not None
        leader = self.leader_pid()
        stop_process(self.process.pid)
        os.kill(leader, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(30)

    def count(self, counter: str) -> int:
        """A counter of the leader, including all events before this call."""
        return int(self.settled_info()["counters"][counter])

    def settled_info(self) -> dict[str, Any]:
        """/server_info including all events before this call: waits for the next report of the leader."""
        now = time.time()
        found: list[dict[str, Any]] = []

        def taken_since() -> bool:
            found[:] = [self.info()]
            return bool(found[0]["taken_at"] > now)

        wait_until(taken_since, 10, f"{self.role} reports")
        return found[0]

    def info(self) -> dict[str, Any]:
        """/server_info: the state at `taken_at`, up to half a second ago (0.2 s, if forked)."""
        info: dict[str, Any] = HTTP.get(f"{self.url}/server_info", timeout=5).json()
        return info

    def idle(self) -> bool:
        """No request in any state, every page free, no page in quarantine."""
        return is_idle(self.info())

    def check_clean(self) -> None:
        """The server becomes idle, is healthy, and has logged no error."""
        wait_until(lambda: is_idle(self.settled_info()), 15, f"{self.role} idle with a full pool, now {self.info()}")
        assert HTTP.get(f"{self.url}/health", timeout=5).json()["reasons"] == []
        errors = [line for line in self.log.read_text().splitlines() if " E " in line or "Traceback" in line]
        assert not errors, errors

    def generate(self, input_ids: Sequence[int], new_tokens: int, **extra: Any) -> list[int]:
        """Greedy output ids of one prompt; EOS does not stop it."""
        response = self.post(input_ids, new_tokens, **extra)
        assert response.is_success, response.text
        output: list[int] = response.json()["output_ids"]
        return output

    def post(self, input_ids: Sequence[int], new_tokens: int, timeout_s: float = 60, **extra: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/generate", json=body(input_ids, new_tokens, **extra), timeout=timeout_s)


def is_grammar_compiler(pid: str) -> bool:
    """Whether this child of a frontend compiles grammars; a forked frontend starts it for the first one."""
    return b"grammar.check" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_idle(info: dict[str, Any]) -> bool:
    gauges = info["gauges"]
    return bool(sum(info["states"].values()) == 0 and gauges["kv_pages_available"] == gauges["kv_pages"])


def body(input_ids: Any, new_tokens: int, **extra: Any) -> dict[str, Any]:
    """A greedy /generate body that generates `new_tokens` tokens."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling, **extra}


class Cluster:
    """Servers that end with the test, also when it fails."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: list[Server] = []

    def add(
        self,
        role: str,
        model: str | Path,
        *flags: str,
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        forked: bool = True,
        leaders: int = 1,
    ) -> Server:
        log = self.directory / f"{len(self.servers)}-{role}.log"
        server = Server(role, model, log, *flags, env=env, launcher=launcher, forked=forked, leaders=leaders)
        self.servers.append(server)
        return server.start()

    def pair(
        self,
        model: str | Path,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        launcher: Sequence[str] = (),
        forked: bool = True,
    ) -> tuple[Server, Server]:
        """A prefill and a decode server, paired and ready."""
        how: dict[str, Any] = {"launcher": launcher, "forked": forked}
        prefill = self.add("prefill", model, *prefill_flags, **how)
        decode = self.add("decode", model, "--prefill", prefill.endpoint, *decode_flags, **how)
        prefill.wait_ready(peers=1)
        decode.wait_ready(peers=1)
        return prefill, decode

    def close(self) -> None:
        """End all servers without draining them: the second signal skips that."""
        running = [server for server in self.servers if server.process is not None and server.process.poll() is None]
        for server in running:
            assert server.process is not None
            with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
                os.kill(server.leader_pid(), signal.SIGCONT)
            for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGINT):
                server.process.send_signal(number)
        for server in running:
            assert server.process is not None
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    started = Cluster(directory)
    try:
        yield started
    finally:
        started.close()
