"""The faults. Each is a generator: it yields when the fault has fired, and ends when the fault is over.

The engine loops that pause at a state continue after the yield.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tests.cluster.servers import Server, wait_until
from tests.faults.catalog import Side
from tests.faults.clients import StreamClient
from tests.processes import gone, stop_process

if TYPE_CHECKING:
    from tests.faults.rig import Rig

SHORT_STOP_S = 0.4
LONG_STOP_S = 4.0
CUT_S = 2.5
SILENT_S = 3.0
DELAY_S = 0.2
LOSSY_DELAY_S, LOSS = 0.05, 0.1
JUMP_S = 3600.0
EXIT_S = 20.0
"""Limit for the exit of a server that has lost a process; docs/reliability.md has measured times."""
FILLERS = 6

Injection = Iterator[None]


class NoConnectionError(AssertionError):
    """There is no connection to cut or reset."""


def _pid(rig: "Rig", side: Side, process: str) -> int:
    server = rig.servers[side]
    assert server.process is not None
    if process == "frontend":
        return server.process.pid
    if process == "leader":
        return server.leader_pid()
    return next(rig.hooks.find(side, "rank")).pid


def _end_and_restart(server: Server, leader: int) -> None:
    """Wait until the other processes of a server have exited, and start it again."""
    assert server.process is not None
    server.process.wait(EXIT_S)
    wait_until(lambda: gone(leader), EXIT_S, f"the leader of {server.role} ended")
    server.start()


def _kill(process: str) -> Callable[["Rig", Side], Injection]:
    def inject(rig: "Rig", side: Side) -> Injection:
        server = rig.servers[side]
        leader, pid = server.leader_pid(), _pid(rig, side, process)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: gone(pid), 10, "killed")
        yield
        _end_and_restart(server, leader)

    return inject


def _stop(process: str, stopped_s: float) -> Callable[["Rig", Side], Injection]:
    def inject(rig: "Rig", side: Side) -> Injection:
        server = rig.servers[side]
        leader, pid = server.leader_pid(), _pid(rig, side, process)
        stop_process(pid)
        yield
        time.sleep(stopped_s)
        if not gone(pid):
            os.kill(pid, signal.SIGCONT)
        if process == "rank" and stopped_s == LONG_STOP_S:  # lost after 3 s, so the server exits
            _end_and_restart(server, leader)

    return inject


def _terminate(rig: "Rig", side: Side) -> Injection:
    server = rig.servers[side]
    assert server.process is not None
    server.process.terminate()
    wait_until(lambda: "SIGTERM" in rig.log_since_start(server), 10, "SIGTERM was received")
    yield
    assert server.process.wait(EXIT_S) == 0
    server.start()


def _on_links(control: bool, data: bool, begin: str, lasts_s: float) -> Callable[["Rig", Side], Injection]:
    def inject(rig: "Rig", _: Side) -> Injection:
        links = [*((rig.control,) if control else ()), *(rig.data_links() if data else ())]
        match begin:
            case "cut":
                if not sum(link.cut() for link in links):
                    for link in links:
                        link.heal()
                    raise NoConnectionError("no connection was cut")
            case "reset":
                if not sum(link.reset() for link in links):
                    raise NoConnectionError("no connection was reset")
            case "stall":
                for link in links:
                    link.stalled = True
            case "delay":
                for link in links:
                    link.delay_s = DELAY_S
            case "lossy":
                for link in links:
                    link.delay_s, link.loss = LOSSY_DELAY_S, LOSS
        yield
        time.sleep(lasts_s)
        for link in links:
            link.heal()

    return inject


def _client_gone(rig: "Rig", _: Side) -> Injection:
    rig.client.leave()
    yield


def _client_slow(rig: "Rig", _: Side) -> Injection:
    rig.client.pause_s = 0.05
    yield


def _fill_pools(rig: "Rig", _: Side) -> Injection:
    """More requests than fit into either pool."""
    fillers = [StreamClient(rig.servers["decode"], rig.filler.prompt, rig.filler.new_tokens) for _ in range(FILLERS)]
    yield
    for filler in fillers:
        outcome = filler.outcome()
        assert outcome == ("200", rig.filler.expected), f"a filler ended with {outcome}: {filler.text()[-300:]}"


def _transfer_error(rig: "Rig", _: Side) -> Injection:
    process = next(rig.hooks.find("prefill", *rig.rank_processes("prefill")))
    process.tell(fail_writes=1)
    yield
    process.expect("fired", "fail_writes")


def _late_write(rig: "Rig", _: Side) -> Injection:
    """The proxy holds writes back until both sides have given up the transfer; then they reach decode."""
    links = rig.data_links()
    held = [link.held_bytes for link in links]
    for link in links:
        link.stalled = True
    yield
    wait_until(lambda: [link.held_bytes for link in links] != held, 20, "a write is held")
    assert rig.control.reset() > 0
    time.sleep(0.5)  # less than the quarantine
    for link in links:
        link.heal()


def _jump(offset_s: float) -> Callable[["Rig", Side], Injection]:
    def inject(rig: "Rig", _: Side) -> Injection:
        processes = [found for side in rig.servers for found in rig.hooks.find(side, "frontend", "leader", "rank")]
        for process in processes:
            process.tell(clock_s=offset_s)
        yield
        time.sleep(0.5)
        for process in processes:
            process.tell(clock_s=0.0)

    return inject


def _oom(rig: "Rig", side: Side) -> Injection:
    server = rig.servers[side]
    leader = server.leader_pid()
    process = next(rig.hooks.find(side, *rig.rank_processes(side)))
    process.tell(oom=1)
    yield
    process.expect("fired", "oom")
    if process.process == "rank":  # the other ranks would wait for it, so the server exits
        _end_and_restart(server, leader)


INJECTIONS: dict[str, Callable[["Rig", Side], Injection]] = {
    **{f"kill_{process}": _kill(process) for process in ("frontend", "leader", "rank")},
    **{f"stop_short_{process}": _stop(process, SHORT_STOP_S) for process in ("frontend", "leader", "rank")},
    **{f"stop_long_{process}": _stop(process, LONG_STOP_S) for process in ("frontend", "leader", "rank")},
    "terminate": _terminate,
    "cut_control": _on_links(True, False, "cut", CUT_S),
    "stall_control": _on_links(True, False, "stall", SILENT_S),
    "delay_control": _on_links(True, False, "delay", 1.0),
    "reset_control": _on_links(True, False, "reset", 0.0),
    "cut_data": _on_links(False, True, "cut", CUT_S),
    "stall_data": _on_links(False, True, "stall", SILENT_S),
    "reset_data": _on_links(False, True, "reset", 0.0),
    "cut_both": _on_links(True, True, "cut", CUT_S),
    "reset_both": _on_links(True, True, "reset", 0.0),
    "lossy_both": _on_links(True, True, "lossy", 2.0),
    "client_gone": _client_gone,
    "client_slow": _client_slow,
    "fill_pools": _fill_pools,
    "transfer_error": _transfer_error,
    "late_write": _late_write,
    "clock_forward": _jump(JUMP_S),
    "clock_back": _jump(-JUMP_S),
    "oom": _oom,
}
