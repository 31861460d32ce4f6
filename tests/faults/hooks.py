"""The side of the test for `server_hooks.py`: one connection per process of the servers under test."""

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.faults.links import DataLink

ANSWER_S = 20.0


class HookedProcess:
    """One process of a server."""

    def __init__(self, connection: socket.socket, role: str, process: str, pid: int) -> None:
        self._connection = connection
        self.role, self.process, self.pid = role, process, pid
        self.received: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def tell(self, **command: Any) -> None:
        """Send a command; returns when it is in force."""
        self.post(**command)
        self.expect("done", next(iter(command)))

    def post(self, **command: Any) -> None:
        self._connection.send(json.dumps(command).encode())

    def expect(self, kind: str, value: str, timeout_s: float = ANSWER_S) -> None:
        """Wait for this message and drop others that come before. Raises AssertionError after `timeout_s`."""
        with suppress(queue.Empty):
            while self.received.get(timeout=timeout_s) != (kind, value):
                pass
            return
        raise AssertionError(f"{self.role} {self.process}: no {kind} {value} within {timeout_s} s")


class Hooks:
    """Accepts the processes of servers whose environment has the path of this socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "hooks"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._stack = ExitStack()
        self._processes: list[HookedProcess] = []
        self.data_links: list[DataLink] = []
        """The data links of all decode ranks that were started; those of running ranks are last."""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._stack.close()

    def find(self, role: str, *kinds: str) -> Iterator[HookedProcess]:
        """The processes of the running server of this role, of these kinds (frontend, leader, rank)."""
        return (found for found in self._processes if found.role == role and found.process in kinds)

    def leader(self, role: str) -> HookedProcess:
        (leader,) = self.find(role, "leader")
        return leader

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        process: HookedProcess | None = None
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                match json.loads(data):
                    case {"role": role, "process": name, "pid": pid}:
                        process = HookedProcess(connection, role, name, pid)
                        self._processes.append(process)
                    case {"session": session}:
                        assert process is not None
                        self.data_links.append(self._stack.enter_context(DataLink(session)))
                        process.post(announce=self.data_links[-1].session)
                    case message:
                        assert process is not None
                        ((kind, value),) = message.items()
                        process.received.put((kind, value))
        if process is not None:
            self._processes.remove(process)
