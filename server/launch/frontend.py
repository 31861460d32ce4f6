"""The frontend, the HTTP process: binds the port, starts the leader, serves until a signal or the leader's end.

    bind -> tokenizer -> leader process -> HTTP (503 "starting") -> leader Ready -> serving
    first SIGTERM/SIGINT -> leader drains (503 "stopping") -> leader exits -> HTTP closes -> exit 0 (1 when it was
                            killed)
    second signal        -> everything is killed
    leader dies          -> every open request 503 -> HTTP closes -> exit 1; 2 when it reported that it cannot start

This process does not import torch, so it starts in a fraction of a second and stays small.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Generator, Sequence

import uvicorn
import uvloop

from ...configs.errors import StartupError
from ...configs.gc_tuning import keep_for_good
from ...configs.logs import configure_logging
from ...configs.sampling import NEUTRAL_SAMPLING, SamplingParams
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...configs.words import counted
from ...models.loading.catalog import locate_model
from ...scheduler.shutdown import exit_s
from ..api.app import Routes, create_app
from ..api.default_sampling import read_default_sampling
from ..engine.leader_client import LeaderClient
from ..engine.leader_process import LEADER_COMMAND, LeaderProcess
from ..observability.metrics import Metrics
from ..text.tokenizer import Tokenizer, load_tokenizer
from .http_protocol import PatientHttpProtocol
from .ports import PREDECESSOR_S, check_port, listen_on
from .startup_checks import check_startup

log = logging.getLogger("pdserve.frontend")

EXIT_OK = 0
EXIT_UNCLEAN = 1
KEEP_ALIVE_S = 65
MAX_OPEN_FILES = 1 << 16
LAST_RESPONSES_S = 3
LAST_MESSAGES_S = 0.25
STARTUP_EXIT_S = 2.0
"""How long a leader that has reported a startup error may take to exit."""


def run_frontend(config: AnyServerConfig, leader_command: Sequence[str] = LEADER_COMMAND) -> int:
    """Serve until a signal or the leader's end; returns the exit code. Raises StartupError for mistakes of the user."""
    configure_logging(config.log_level, config.role)
    raise_open_files_limit()
    if isinstance(config, PrefillConfig):
        # the leader binds it, minutes from now; the leader of the previous server may still be ending
        check_port(config.host, config.bootstrap_port, "--bootstrap-port", patience_s=PREDECESSOR_S)
    with listen_on(config.host, config.port, "--port") as http_socket:
        source = locate_model(config.model, config.load_format)
        check_startup(config, source)
        sampling = NEUTRAL_SAMPLING
        if isinstance(config, DecodeConfig) and config.sampling_defaults == "model":
            sampling = read_default_sampling(source)
        return uvloop.run(Frontend(config, load_tokenizer(source), sampling, leader_command).serve(http_socket))


def raise_open_files_limit() -> None:
    """Every client needs a file descriptor and the usual soft limit is 1024: raise it towards the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: the Frontend handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Frontend:
    """Starts and ends, in order, the leader process, its client and the HTTP server."""

    def __init__(
        self,
        config: AnyServerConfig,
        tokenizer: Tokenizer,
        default_sampling: SamplingParams,
        leader_command: Sequence[str],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._default_sampling = default_sampling
        self._leader_command = leader_command
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def serve(self, http_socket: socket.socket) -> int:
        """Run to the end and return the exit code; raises StartupError when the leader cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        metrics = Metrics()
        client = LeaderClient(metrics, self._config)
        metrics.watch_leader(lambda: client.status, lambda: client.loop_age_s)
        process: LeaderProcess | None = None
        http = self._http_server(client, metrics)
        receiving = asyncio.create_task(client.run())
        serving = asyncio.create_task(http.serve(sockets=[http_socket]))
        try:
            process = LeaderProcess(self._config, client.address, self._leader_command)
            return await self._supervise(client, process)
        except StartupError:
            if process is not None:
                await process.stop(STARTUP_EXIT_S)  # it is about to exit, and may still write to stderr
            raise
        finally:
            if process is not None:
                process.kill()
            client.fail_all("the server has stopped")
            http.should_exit = True
            await serving
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            client.close()
            if process is not None:
                process.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _http_server(self, client: LeaderClient, metrics: Metrics) -> HttpServer:
        routes = Routes(self._config, self._tokenizer, client, metrics, self._default_sampling)
        return HttpServer(
            uvicorn.Config(
                create_app(routes),
                http=PatientHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_RESPONSES_S,
            )
        )

    async def _supervise(self, client: LeaderClient, process: LeaderProcess) -> int:
        """Wait for the leader's start, then for a signal or the leader's end; returns the exit code."""
        died = asyncio.create_task(process.wait())
        signalled = asyncio.create_task(self._signals.get())
        starting = asyncio.create_task(client.wait_ready())
        try:
            await asyncio.wait({died, signalled, starting}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await asyncio.wait({starting}, timeout=STARTUP_EXIT_S)  # the reason may still be in the socket
            if starting.done():
                ready = starting.result()  # raises StartupError when the leader reported one
                keep_for_good()
                log.info("ready: %s at http://%s:%d", ready.model.name, self._config.host, self._config.port)
                await asyncio.wait({died, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                return await self._drain(client, process, signalled.result())
            if not starting.done():
                log.error("leader %s while it was starting; its log is above", process.describe_exit())
                return EXIT_UNCLEAN
            await self._take_last_messages(client, process)
            log.error("leader %s; every open request has failed and the server exits", process.describe_exit())
            return EXIT_UNCLEAN
        finally:
            for task in (died, signalled, starting):
                task.cancel()
            await asyncio.gather(died, signalled, starting, return_exceptions=True)

    async def _take_last_messages(self, client: LeaderClient, process: LeaderProcess) -> None:
        """Receive what is still in the socket of a leader that has ended, then fail the other requests."""
        await asyncio.sleep(LAST_MESSAGES_S)
        client.fail_all(process.describe_exit())

    def _open_work(self, client: LeaderClient) -> str:
        """The work to drain: requests of clients on decode, transfers to decode servers on prefill."""
        if isinstance(self._config, DecodeConfig):
            count, what = len(client.open_rids), "request"
        else:
            count, what = sum(client.status.states.values()) if client.status is not None else 0, "transfer"
        return counted(count, what)

    async def _drain(self, client: LeaderClient, process: LeaderProcess, first: signal.Signals) -> int:
        """Let the leader finish its requests and exit, within a bound. A second signal kills it."""
        drain_s = self._config.shutdown_timeout_s
        log.info("%s: draining %s for up to %g s", first.name, self._open_work(client), drain_s)
        ready = client.ready
        patience_s = 0.0  # a starting leader has nothing to drain and reads no messages for minutes
        if client.request_stop(drain_s) and ready is not None:
            patience_s = drain_s + exit_s(ready.model.device)
        stopping = asyncio.create_task(process.stop(patience_s))
        again = asyncio.create_task(self._signals.get())
        try:
            await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
            if again.done() and not stopping.done():
                log.warning("%s again: stopping now", again.result().name)
                process.kill()
                return 128 + again.result()
            await self._take_last_messages(client, process)
            log.info("stopped: leader %s", process.describe_exit())
            return EXIT_OK if process.exit_status == 0 or ready is None else EXIT_UNCLEAN
        finally:
            for task in (stopping, again):
                task.cancel()
            await asyncio.gather(stopping, again, return_exceptions=True)
