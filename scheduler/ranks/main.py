"""A rank as a process of its own: `python -m pdserve.scheduler.ranks.main`, started by the leader or, on another
machine, by `pdserve` with --node-rank.

The first line on stdin is `{"config": {...}, "rank": N, "leader": "tcp://...", "meet_at": ["host", port]}`; end of file
there means that the parent has gone, and ends this process. Threads: this one computes, one reads the leader's
commands, one tells it that we are alive, and on prefill there is a sender for each decode rank.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import NoReturn

import msgspec
import zmq

from ...configs.errors import PdserveError, StartupError
from ...configs.gc_tuning import keep_for_good
from ...configs.load import parse_config
from ...configs.logs import configure_logging
from ...models.loading.catalog import locate_model
from ...transfer.control.curve import ClusterKeys
from ...transfer.control.wakeup import ConnectionMonitor
from ..messages.ranks import (
    ComputeCommand,
    LeaderAlive,
    RankAlive,
    RankCommand,
    RankFailed,
    RankReport,
    SentStep,
    StopRank,
    TransferCommand,
)
from .page_tables import KnownTables
from .rank import RankEngine

log = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 0.3
LEADER_SILENCE_S = 10.0
"""A leader on another machine that says nothing for this long is gone."""


class LeaderGoneError(PdserveError):
    """The connection to the leader was closed. ZMQ would make a new one, but commands have gone with the old one."""


class LeaderLink:
    """The rank's end of the socket to its leader. `report()` may be called from any thread.

    The rank ends when the link does: a command or a report that is lost would be waited for for ever.
    """

    def __init__(self, address: str, rank: int, keys: ClusterKeys | None) -> None:
        self.commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
        self.engine: RankEngine | None = None
        """Set when it is built: it carries out transfer commands."""
        self._rank = rank
        self._stopping = False
        """The leader has told us to end, and may end before us."""
        self.heard_at = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankCommand)
        self._tables = KnownTables()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTING_ID, b"rank-%d" % rank)
        if keys is not None:
            keys.secure_client(self._socket)
        self._monitor = ConnectionMonitor(self._context, self._socket, zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.bind("inproc://reports")
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="leader-link", daemon=True).start()

    def report(self, report: RankReport) -> None:
        with self._lock:  # ZMQ sockets are for one thread at a time
            self._outbox.send(self._encoder.encode(report))

    def _run(self) -> None:
        try:
            self._serve()
        except LeaderGoneError as error:
            log.error("rank %d ends: %s", self._rank, error)
            _leave(1)
        except Exception as error:
            log.exception("the link to the leader")
            # the socket is this thread's: it has the last word itself
            failed = RankFailed(self._rank, f"the link to the leader failed: {type(error).__name__}: {error}")
            self._socket.send(self._encoder.encode(failed))
            _leave(1)

    def _serve(self) -> NoReturn:
        inbox = self._context.socket(zmq.PULL)
        inbox.set_hwm(0)
        inbox.connect("inproc://reports")
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            while inbox in ready and inbox.poll(0):
                self._socket.send(inbox.recv())
            while self._socket.poll(0):
                self._receive(self._decoder.decode(self._socket.recv()))
            if self._monitor.socket in ready and self._monitor.read() is not None and not self._stopping:
                raise LeaderGoneError("the connection to the leader was closed")

    def _receive(self, command: RankCommand) -> None:
        self.heard_at = time.monotonic()
        match command:
            case LeaderAlive():
                pass
            case StopRank():
                self._stopping = True
                self.commands.put(command)
            case SentStep():
                self.commands.put(self._tables.unpack(command))
            case _ if isinstance(command, TransferCommand):
                assert self.engine is not None, "the leader sends nothing before this rank is ready"
                self.engine.transfer(command)
            case _:
                self.commands.put(command)


def main() -> int:
    """Compute until told to stop; the exit code is 0, 2 when the configuration cannot work, 1 for anything else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's
    introduction = json.loads(sys.stdin.buffer.readline())
    config, rank = parse_config(introduction["config"]), int(introduction["rank"])
    configure_logging(config.log_level, f"{config.role} rank {rank}")
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    keys = ClusterKeys(config.cluster_key.get_secret_value()) if config.cluster_key is not None else None
    link = LeaderLink(introduction["leader"], rank, keys)
    threading.Thread(target=_say_alive, args=(link, rank), name="alive", daemon=True).start()
    try:
        host, port = introduction["meet_at"]
        source = locate_model(config.model, config.load_format)
        engine = RankEngine(config, source, rank, meet_at=(host, port), report=link.report)
        link.engine = engine
        keep_for_good()
        engine.announce()
        engine.serve(link.commands)
        engine.close()
    except StartupError as error:
        link.report(RankFailed(rank, str(error), startup=True))
        return _leave(2)
    except Exception as error:
        log.exception("rank %d cannot go on", rank)
        link.report(RankFailed(rank, f"{type(error).__name__}: {error}"))
        return _leave(1)
    return 0


def _leave(status: int) -> NoReturn:
    """End after the last report is out, whatever other threads wait for."""
    time.sleep(0.5)
    os._exit(status)


def _watch_parent() -> NoReturn:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin: a thread blocked inside it is fatal at exit
        pass
    os._exit(1)


def _say_alive(link: LeaderLink, rank: int) -> NoReturn:
    while True:
        engine = link.engine
        link.report(RankAlive(rank) if engine is None else RankAlive(rank, engine.problems(), engine.busy_s))
        slept_at = time.monotonic()
        time.sleep(ALIVE_INTERVAL_S)
        now = time.monotonic()
        if now - slept_at - ALIVE_INTERVAL_S > LEADER_SILENCE_S / 2:
            link.heard_at = now  # we were stopped, or starved: what the leader has said meanwhile is still to be read
        silent_s = now - link.heard_at
        if silent_s > LEADER_SILENCE_S:
            log.error("the leader has said nothing for %.0f s: rank %d ends", silent_s, rank)
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
