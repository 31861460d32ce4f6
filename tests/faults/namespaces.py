"""Hosts in network namespaces, connected by a router in which a test cuts links, one direction or single ports.

Each host has its own namespace, an address of its own, and loopback. Needs root and network namespaces. The kernel of
the test machine may lack netem, so delays and losses are tested with proxies (`links.py`).
"""

import contextlib
import ctypes
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_RULE_PRIORITY = "100"

T = TypeVar("T")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_unavailable() -> str | None:
    """Why there are no namespaces here; None if there are."""
    name = f"pdserve-{secrets.token_hex(4)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except FileNotFoundError:
        return "the command ip is missing"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return None


def enter(name: str) -> None:
    """Move the calling thread into a namespace; processes that it starts are in it too."""
    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


class Network:
    """A router with one host per name. Use as a context manager."""

    def __init__(self, *hosts: str) -> None:
        self._prefix = f"pdserve-{secrets.token_hex(4)}"
        self._router = f"{self._prefix}-router"
        self._hosts = hosts
        self._stack = ExitStack()

    def __enter__(self) -> "Network":
        with self._stack as stack:
            self._add_namespace(self._router, stack)
            for host in self._hosts:
                self._add_host(host, stack)
            _ip("netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def name(self, host: str) -> str:
        """The namespace of a host."""
        return f"{self._prefix}-{host}"

    def address(self, host: str, *, second: bool = False) -> str:
        """The address of a host; each has a second one."""
        return f"10.77.{self._hosts.index(host)}.{3 if second else 2}"

    def call(self, host: str, function: Callable[[], T]) -> T:
        """Call a function on a thread of a host."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                enter(self.name(host))
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result.result()

    @contextlib.contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """No packet passes between this host and the others; connections stay open."""
        with self._dropping("to", self.address(host)), self._dropping("from", self.address(host)):
            yield

    @contextlib.contextmanager
    def one_way(self, source: str, destination: str) -> Iterator[None]:
        """Packets from `source` to `destination` are lost; those of the other direction pass."""
        with self._dropping("from", self.address(source), "to", self.address(destination)):
            yield

    @contextlib.contextmanager
    def without_ports(self, ports: str) -> Iterator[None]:
        """No packet to or from these TCP ports passes: a port, or a range as in 15000-17000."""
        with self._dropping("ipproto", "tcp", "dport", ports), self._dropping("ipproto", "tcp", "sport", ports):
            yield

    @contextlib.contextmanager
    def _dropping(self, *what: str) -> Iterator[None]:
        rule = ("-n", self._router, "rule", "{}", *what, "blackhole", "priority", _RULE_PRIORITY)
        _ip(*(word.format("add") for word in rule))
        try:
            yield
        finally:
            _ip(*(word.format("del") for word in rule))

    def _add_namespace(self, name: str, stack: ExitStack) -> None:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _add_host(self, host: str, stack: ExitStack) -> None:
        name, number = self.name(host), self._hosts.index(host)
        self._add_namespace(name, stack)
        port = f"port{number}"
        _ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._router)
        for last in (2, 3):
            _ip("-n", name, "addr", "add", f"10.77.{number}.{last}/24", "dev", "net0")
        _ip("-n", self._router, "addr", "add", f"10.77.{number}.1/24", "dev", port)
        _ip("-n", name, "link", "set", "net0", "up")
        _ip("-n", self._router, "link", "set", port, "up")
        _ip("-n", name, "route", "add", "default", "via", f"10.77.{number}.1")
