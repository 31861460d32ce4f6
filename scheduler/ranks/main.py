"""A rank process: `python -m pdserve.scheduler.ranks.main`, started by the leader or, on another machine, by `pdserve`
with --node-rank.

The first line on stdin is `{"config": {...}, "rank": N, "leader": "tcp://...", "meet_at": ["host", port], "key_seeds":
"..." or null}`. End of file on stdin means that the parent has exited; this process exits too. Threads: the main thread
computes, one reads the commands of the leader, one sends heartbeats, and on prefill there is a sender for each decode
rank.
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

from ...common.errors import PdserveError, StartupError
from ...common.gc_tuning import keep_for_good
from ...common.logs import configure_logging
from ...configs.load import parse_config
from ...models.formats.gguf_file import forget_gguf
from ...models.loading.catalog import locate_model
from ...transfer.control.curve import ClusterKeys
from ...transfer.control.wakeup import ConnectionMonitor
from ...transfer.mooncake.library import prepare_environment
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
CONSEQUENCE_S = 0.5
"""A rank delays the report of its failure by this time. The failure may be a consequence of the loss of another rank;
then the leader learns of the cause first.
"""
LEADER_SILENCE_S = 10.0
"""A leader that sends nothing for this long is lost."""


class LeaderGoneError(PdserveError):
    """The connection to the leader was closed. ZMQ would reconnect, but commands are lost with the old connection."""


class LeaderLink:
    """The rank's end of the socket to its leader. `report()` may be called from any thread.

    The rank exits when the connection closes, because a lost command or report is never sent again.
    """

    def __init__(self, address: str, rank: int, keys: ClusterKeys | None) -> None:
        self.commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
        self.engine: RankEngine | None = None
        """Runs transfer commands; set when it is built."""
        self._rank = rank
        self._stopping = False
        """StopRank has arrived; the leader may exit before us."""
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
        with self._lock:  # a ZMQ socket is not thread-safe
            self._outbox.send(self._encoder.encode(report))

    def _run(self) -> None:
        try:
            self._serve()
        except LeaderGoneError as error:
            log.error("rank %d exits: %s", self._rank, error)
            _exit(1)
        except Exception as error:
            log.exception("the link to the leader failed")
            # report() would queue it for this thread
            failed = RankFailed(self._rank, f"the link to the leader failed: {type(error).__name__}: {error}")
            self._socket.send(self._encoder.encode(failed))
            _exit(1)

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
                assert self.engine is not None, "a command arrived before this rank was ready"
                self.engine.transfer(command)
            case _:
                self.commands.put(command)


def main() -> int:
    """Run until StopRank. Exit code: 0, 2 for a configuration that cannot work, 1 for any other error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C
    introduction = json.loads(sys.stdin.buffer.readline())
    config, rank = parse_config(introduction["config"]), int(introduction["rank"])
    configure_logging(config.log_level, f"{config.role} rank {rank}", config.log_format)
    prepare_environment(config.ib_gid_index)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    seeds: str | None = introduction["key_seeds"]
    keys = ClusterKeys(bytes.fromhex(seeds)) if seeds is not None else None
    link = LeaderLink(introduction["leader"], rank, keys)
    threading.Thread(target=_send_heartbeats, args=(link, rank), name="heartbeat", daemon=True).start()
    try:
        host, port = introduction["meet_at"]
        source = locate_model(config.model, config.load_format)
        engine = RankEngine(config, source, rank, meet_at=(host, port), report=link.report)
        link.engine = engine
        forget_gguf()
        keep_for_good()
        engine.announce()
        engine.serve(link.commands)
        engine.close()
    except StartupError as error:
        link.report(RankFailed(rank, str(error), startup=True))
        return _exit(2)
    except Exception as error:
        time.sleep(CONSEQUENCE_S)
        log.exception("rank %d failed", rank)
        link.report(RankFailed(rank, f"{type(error).__name__}: {error}"))
        return _exit(1)
    return 0


def _exit(status: int) -> NoReturn:
    """Exit after the last report is sent, without waiting for other threads."""
    time.sleep(0.5)
    os._exit(status)


def _watch_parent() -> NoReturn:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin: a thread blocked inside it is fatal at exit
        pass
    os._exit(1)


def _send_heartbeats(link: LeaderLink, rank: int) -> NoReturn:
    """Send RankAlive, and exit if the leader is silent."""
    checked_at = time.monotonic()
    while True:
        engine = link.engine
        link.report(RankAlive(rank) if engine is None else RankAlive(rank, engine.problems(), engine.busy_s))
        time.sleep(ALIVE_INTERVAL_S)
        now = time.monotonic()
        absent_s, checked_at = now - checked_at - ALIVE_INTERVAL_S, now
        if absent_s > LEADER_SILENCE_S / 2:
            link.heard_at = now  # this process was stopped or starved: messages of the leader are still unread
        silent_s = now - link.heard_at
        if silent_s > LEADER_SILENCE_S:
            log.error("the leader has sent nothing for %.0f s: rank %d exits", silent_s, rank)
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
