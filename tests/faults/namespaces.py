"""Hosts in network namespaces, connected by a router that can drop packets of a host, of one direction or of a port.

Each host has its own namespace, an address of its own, and loopback. Needs root and network namespaces. Delay needs
netem, which the kernel of the test machine may lack, and loss needs netem or iptables. The TCP proxy in `links.py` has
both.
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


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _netem_options(delay_ms: float, loss: float) -> tuple[str, ...]:
    return ("delay", f"{delay_ms:g}ms", "loss", f"{100 * loss:g}%")


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


def why_no_netem() -> str | None:
    """Why packets cannot be delayed here; None if they can."""
    return _try_in_namespace("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")


def why_no_iptables() -> str | None:
    """Why iptables cannot drop random packets here; None if it can."""
    return _try_in_namespace("iptables", "-A", "FORWARD", *_drop_randomly(0.1))


def _drop_randomly(fraction: float) -> tuple[str, ...]:
    return ("-m", "statistic", "--mode", "random", "--probability", f"{fraction:g}", "-j", "DROP")


def _try_in_namespace(*command: str) -> str | None:
    if (reason := why_unavailable()) is not None:
        return reason
    name = f"pdserve-{secrets.token_hex(4)}"
    _ip("netns", "add", name)
    try:
        _ip("netns", "exec", name, *command)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    finally:
        _ip("netns", "del", name)
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
        self._router = f"{self._prefix}-net"
        self._hosts = hosts
        self._stack = ExitStack()

    def __enter__(self) -> "Network":
        with self._stack as stack:
            self._add_namespace(self._router, stack)
            for host in self._hosts:
                self._add_host(host, stack)
            self._in_router("sysctl", "-qw", "net.ipv4.ip_forward=1")
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
    def netem(self, delay_ms: float, loss: float) -> Iterator[None]:
        """Delay all packets to and from all hosts in the router, and lose this fraction of them."""
        ports = [f"port{number}" for number in range(len(self._hosts))]
        for port in ports:
            self._in_router("tc", "qdisc", "add", "dev", port, "root", "netem", *_netem_options(delay_ms, loss))
        try:
            yield
        finally:
            for port in ports:
                self._in_router("tc", "qdisc", "del", "dev", port, "root")

    @contextlib.contextmanager
    def losing(self, fraction: float) -> Iterator[Callable[[], int]]:
        """Lose this fraction of all packets in the router, with iptables; yields a function that counts them."""
        rule = ("FORWARD", *_drop_randomly(fraction))
        self._in_router("iptables", "-A", *rule)
        try:
            yield lambda: int(self._in_router("iptables", "-vnxL", "FORWARD").splitlines()[2].split()[0])
        finally:
            self._in_router("iptables", "-D", *rule)

    def _in_router(self, *command: str) -> str:
        return _ip("netns", "exec", self._router, *command)

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
