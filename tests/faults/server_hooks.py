"""Runs in the processes of a server: pauses the engine loop at a state and injects faults, on command of a test.

The fork server installs the hooks if the environment of the server has `HOOKS_VARIABLE`, the path of the socket of
`tests/faults/hooks.py`. In servers that are not forked (on a GPU), `started/sitecustomize.py` installs them. The
product has no code for this. Messages are JSON objects, one per packet:

test to server    arm, release, clock_s, oom, fail_writes, block, announce
server to test    role, process and pid once; then done, hit, fired, session
"""

import faulthandler
import json
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.engine.loop import EngineLoop
from pdserve.scheduler.messages.lifecycle import Lifecycle
from pdserve.scheduler.prefill.request import PrefillRequest
from pdserve.scheduler.ranks.executor import Executor
from pdserve.transfer.control.thread import ControlThread
from pdserve.transfer.data.receivers import Receivers
from pdserve.transfer.mooncake.engine import SendEngine, WriteState
from tests.cluster.forkserver import HOOKS_VARIABLE, ROLE_VARIABLE

ENTERED, TURNED = "entered", "turned"
"""When the loop pauses: at the transition, in the middle of a turn of the engine loop, or at the end of that turn."""
BLOCKED_S = 60.0
"""Limit for a pause or block, so that a failed test does not leave a hanging server behind."""


def install(process: str) -> None:
    """Install the hooks in this process: a frontend, leader or rank."""
    faulthandler.enable()  # a crash of native code leaves a traceback in the log
    ServerHooks(os.environ[HOOKS_VARIABLE], os.environ[ROLE_VARIABLE], process)


def _replace(owner: type, name: str, function: object) -> None:
    """Replace a function of a class of the product."""
    assert hasattr(owner, name)
    setattr(owner, name, function)


class ServerHooks:
    """The hooks of one process, and its connection to the test."""

    def __init__(self, path: str, role: str, process: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._announced: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._armed: dict[str, Any] | None = None
        self._reached = False
        self._released = threading.Event()
        self._clock_s = 0.0
        self._lengths: weakref.WeakKeyDictionary[Lifecycle[Any], int] = weakref.WeakKeyDictionary()
        """Prompt tokens of each request."""
        self._counts = {"oom": 0, "fail_writes": 0}
        """How many steps and writes are still to fail."""
        self._blocked = ""
        """The kind of thread that hangs."""
        self._send(role=role, process=process, pid=os.getpid())
        self._wrap_clock()
        if process != "frontend":
            self._wrap_states()
            self._wrap_work()
        threading.Thread(target=self._listen, name="test-hooks", daemon=True).start()

    def _send(self, **message: Any) -> None:
        self._socket.send(json.dumps(message).encode())

    def _listen(self) -> None:
        while data := self._socket.recv(65536):
            match json.loads(data):
                case {"arm": state, "moment": moment, "tokens": tokens}:
                    self._armed = {"state": state, "moment": moment, "tokens": tokens}
                    self._send(done="arm")
                case {"release": _}:
                    self._released.set()
                    self._send(done="release")
                case {"clock_s": offset_s}:
                    self._clock_s = offset_s
                    self._send(done="clock_s")
                case {"block": thread}:
                    self._blocked = thread
                    self._send(done="block")
                case {"announce": session}:
                    self._announced.put(session)
                case {"oom": count}:
                    self._counts["oom"] = count
                    self._send(done="oom")
                case {"fail_writes": count}:
                    self._counts["fail_writes"] = count
                    self._send(done="fail_writes")

    # -- states ------------------------------------------------------------------------------------------------

    def _wrap_states(self) -> None:
        """A request is recognised by the number of its prompt tokens, which both sides know."""

        def wrap_request(kind: type[Request] | type[PrefillRequest], length: Callable[[Any], int]) -> None:
            original = kind.__init__

            def init(request: Any, *values: Any, **named: Any) -> None:
                original(request, *values, **named)
                self._lengths[request.lifecycle if kind is PrefillRequest else request] = length(request)
                self._entered(request.lifecycle if kind is PrefillRequest else request)

            _replace(kind, "__init__", init)

        wrap_request(Request, lambda request: len(request.prompt_ids))
        wrap_request(PrefillRequest, lambda request: request.prompt_tokens)
        enter, turn = Lifecycle.enter, EngineLoop._turn

        def enter_and_pause(lifecycle: Lifecycle[Any], state: Any, now: float) -> None:
            enter(lifecycle, state, now)
            self._entered(lifecycle)

        def turn_and_pause(loop: EngineLoop[Any]) -> None:
            turn(loop)
            self._hang("loop")
            if self._reached:
                self._reached = False
                self._pause()

        _replace(Lifecycle, "enter", enter_and_pause)
        _replace(EngineLoop, "_turn", turn_and_pause)

    def _entered(self, lifecycle: Any) -> None:
        armed = self._armed
        if armed is None or armed["state"] != lifecycle.state.value or armed["tokens"] != self._lengths[lifecycle]:
            return
        if armed["moment"] == TURNED:
            self._reached = True
        else:
            self._pause()

    def _pause(self) -> None:
        armed, self._armed = self._armed, None
        if armed is not None:
            self._released.clear()
            self._send(hit=armed["state"])
            self._released.wait(BLOCKED_S)

    # -- work --------------------------------------------------------------------------------------------------

    def _wrap_clock(self) -> None:
        original = time.time
        time.time = lambda: original() + self._clock_s

    def _wrap_work(self) -> None:
        start, poll, guard = Executor.start, SendEngine.poll, ControlThread.guard
        sessions = vars(Receivers)["sessions"].fget

        def start_or_fail(executor: Executor, *values: Any) -> Any:
            self._hang("rank")
            if self._take("oom"):
                raise torch.OutOfMemoryError("injected: out of memory")
            return start(executor, *values)

        def poll_or_fail(engine: SendEngine, write: Any) -> WriteState:
            self._hang("sender")
            state = poll(engine, write)
            return WriteState.FAILED if state is not WriteState.PENDING and self._take("fail_writes") else state

        def hang_or_guard(thread: ControlThread, action: Callable[[], None]) -> bool:
            self._hang("control")
            return guard(thread, action)

        def proxied(receivers: Receivers) -> dict[str, str]:
            found = dict(sessions(receivers))
            self._send(session=found["tcp"])
            return {**found, "tcp": self._announced.get(timeout=BLOCKED_S)}

        _replace(Executor, "start", start_or_fail)
        _replace(SendEngine, "poll", poll_or_fail)
        _replace(ControlThread, "guard", hang_or_guard)
        _replace(Receivers, "sessions", property(proxied))

    def _take(self, fault: str) -> bool:
        if not self._counts[fault]:
            return False
        self._counts[fault] -= 1
        self._send(fired=fault)
        return True

    def _hang(self, thread: str) -> None:
        """Hang while the test has this kind of thread blocked."""
        if self._blocked == thread:
            self._send(fired="block")
            ends_at = time.monotonic() + BLOCKED_S
            while self._blocked == thread and time.monotonic() < ends_at:
                time.sleep(0.01)
