"""The frontend, the HTTP process: binds the port, starts the leader, and serves until it gets a signal or the leader
exits.

    bind -> tokenizer -> leader process -> HTTP (503 "starting") -> leader Ready -> serving
    first SIGTERM/SIGINT -> leader drains (503 "stopping") -> leader exits -> HTTP closes -> exit 0 (1 if the leader
                            failed or had to be killed)
    second signal        -> leader is killed -> HTTP closes -> exit 128 + signal
    leader dies          -> every open request fails with 503 -> HTTP closes -> exit 1 (2 if the leader reported that
                            it cannot start)
    POST /role           -> leader drains -> leader exits -> leader of the other role starts (503 "starting") ->
                            serving; if it cannot start, a leader of the former role starts

This process does not import torch, so it starts in a fraction of a second and stays small.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Generator, Sequence
from typing import Any, NoReturn, cast

import uvicorn
import uvloop

from ...common.errors import StartupError
from ...common.gc_tuning import keep_for_good
from ...common.logs import configure_logging, set_log_role
from ...common.machine.loop_lag import Lateness, LoopLag
from ...common.sampling import SamplingParams
from ...common.words import counted
from ...configs.schema import AnyServerConfig, PrefillConfig
from ...models.formats.gguf_file import forget_gguf
from ...models.loading.catalog import ModelSource, locate_model
from ...scheduler.shutdown import exit_s, leader_exit_s
from ..api.app import Routes, create_app
from ..api.service.service import Service
from ..connections.acceptor import Acceptor
from ..connections.http_protocol import ConnectionLimit, PatientHttpProtocol
from ..connections.tls import check_tls
from ..engine.leader import REPORTED_EXIT_S, Leader
from ..engine.leader_process import LEADER_COMMAND, LeaderProcess
from ..observability.metrics import Metrics
from ..observability.tracing import start_tracing
from ..observability.versions import package_version
from ..text.tokenizer import Tokenizer, load_tokenizer
from .model_files import with_local_model
from .ports import PREDECESSOR_S, check_port, listen_on
from .role_switch import RoleSwitch, RoleSwitches, default_sampling_of
from .signals import SignalCopies, SignalWatch
from .startup_checks import check_startup

log = logging.getLogger("pdserve.frontend")

EXIT_OK = 0
EXIT_UNCLEAN = 1
KEEP_ALIVE_S = 65
MAX_OPEN_FILES = 1 << 16
LAST_RESPONSES_S = 3
LAST_MESSAGES_S = 0.25
RESTORE_PAUSES_S = (0.0, 2.0, 10.0)
"""Pause before each attempt to restore the former role after a role switch that failed."""


def run_frontend(
    config: AnyServerConfig, leader_command: Sequence[str] = LEADER_COMMAND, *, fixed_role: str | None = None
) -> int:
    """Serve until a signal arrives or the leader exits; returns the exit code. Raises StartupError for mistakes of the
    user. `fixed_role` is the reason with which POST /role is refused; None if the role may change.
    """
    configure_logging(config.log_level, config.role, config.log_format)
    raise_open_files_limit()
    check_tls(config)
    if isinstance(config, PrefillConfig):
        # check now, because the leader binds this port only after it has loaded the model, minutes from now; wait a
        # little, because the leader of a previous server may still be exiting
        check_port(config.host, config.bootstrap_port, "--bootstrap-port", patience_s=PREDECESSOR_S)
    with listen_on(config.host, config.port, "--port") as http_socket:
        config = with_local_model(config)
        source = locate_model(config.model, config.load_format)
        check_startup(config, source)
        sampling = default_sampling_of(config, source)
        frontend = Frontend(source, load_tokenizer(source), leader_command, fixed_role)
        return uvloop.run(frontend.serve(config, sampling, http_socket))


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files, usually 1024, towards the hard limit: each client needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: the Frontend handles signals. At most `max_connections` are open."""

    def __init__(self, config: uvicorn.Config, max_connections: int = MAX_OPEN_FILES) -> None:
        super().__init__(config)
        self._limit = ConnectionLimit(max_connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with an Acceptor for each socket instead of the event loop's server."""
        await super().startup(sockets=[])
        config = self.config

        def new_protocol() -> asyncio.Protocol:
            return PatientHttpProtocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        def make_room() -> bool:
            connections = cast("set[PatientHttpProtocol]", self.server_state.connections)
            return self._limit.make_room(connections, time.monotonic())

        for listening in sockets or ():
            acceptor = Acceptor(
                listening, new_protocol, backlog=config.backlog, ssl_context=config.ssl, make_room=make_room
            )
            self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn calls what an Acceptor has


class LeaderLostError(Exception):
    """The leader exited while it was starting, and has not reported why."""


class Frontend:
    """Starts and ends the leader process, its client and the HTTP server in the right order. Replaces the leader and
    its client when the role changes.
    """

    def __init__(
        self, source: ModelSource, tokenizer: Tokenizer, leader_command: Sequence[str], fixed_role: str | None
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._leader_command = leader_command
        self._fixed_role = fixed_role
        self._metrics = Metrics()
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._copies = SignalCopies()

    async def serve(self, config: AnyServerConfig, sampling: SamplingParams, http_socket: socket.socket) -> int:
        """Run to the end and return the exit code; raises StartupError when the leader cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        SignalWatch(self._longest_end_s, self._end_now)
        self._tracing = start_tracing(config.otlp_endpoint, config.role, package_version(), os.environ)
        self._leader = Leader(config, self._metrics, self._leader_command, self._tracing)
        self._sampling = sampling
        self._roles = RoleSwitches(self._source, self._leader, self._fixed_role)
        self._metrics.set_role(config.role)
        self._metrics.watch_leader(lambda: self._leader.client, lambda: self._leader.pid)
        lag = LoopLag(Lateness(loop))
        lag.start()
        self._metrics.watch_lag(lag.longest_s)
        self._service = Service(config, self._tokenizer, self._leader.client, sampling, self._roles.former)
        routes = Routes(self._service, self._metrics, self._roles, lag.longest_s)
        http = self._http_server(config, routes)
        serving = asyncio.create_task(http.serve(sockets=[http_socket]))
        try:
            return await self._run()
        except StartupError:
            await self._leader.wait_exit()
            raise
        finally:
            lag.close()
            self._leader.kill("the server has stopped")
            self._roles.end("the server has stopped")
            self._service.close()
            http.should_exit = True
            await serving
            await self._leader.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _longest_end_s(self) -> float:
        """Most time from a signal to the end of the server."""
        ready = self._leader.client.ready
        return self._leader.config.shutdown_timeout_s + exit_s("cpu" if ready is None else ready.model.device)

    def _end_now(self) -> NoReturn:
        """End this process and its leader, on any thread."""
        if self._leader.process is not None:
            self._leader.process.kill()
        os._exit(EXIT_UNCLEAN)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._copies.is_copy(number):
            self._signals.put_nowait(number)

    def _http_server(self, config: AnyServerConfig, routes: Routes) -> HttpServer:
        password = config.ssl_keyfile_password
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
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_keyfile_password=None if password is None else password.get_secret_value(),
            ),
            config.max_connections,
        )

    async def _run(self) -> int:
        try:
            code = await self._start_leader()
        except LeaderLostError as lost:
            log.error("leader %s while it was starting; its log is above", lost)
            return EXIT_UNCLEAN
        while code is None:
            code = await self._serve_role()
        return code

    async def _start_leader(self) -> int | None:
        """Start the leader and wait until it is ready. Returns None then, or the exit code if a signal came first.

        Raises StartupError when the leader reports one, and LeaderLostError when it exits without a report.
        """
        leader, process = self._leader, self._leader.start()
        self._service.start()
        died = asyncio.create_task(process.wait())
        signalled = asyncio.create_task(self._signals.get())
        starting = asyncio.create_task(leader.client.wait_ready())
        try:
            await asyncio.wait({died, signalled, starting}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await asyncio.wait({starting}, timeout=REPORTED_EXIT_S)  # the reason may still be in the socket
            if starting.done():
                ready = starting.result()  # raises StartupError when the leader reported one
                forget_gguf()
                keep_for_good()
                served = leader.config
                name = served.served_model_name or ready.model.name
                log.info("ready: %s at %s://%s:%d", name, served.http_scheme, served.url_host, served.port)
            if signalled.done():
                return await self._drain(process, signalled.result())
            if not starting.done():
                raise LeaderLostError(process.describe_exit())
            return None
        finally:
            await _cancel(died, signalled, starting)

    async def _serve_role(self) -> int | None:
        """Serve in the current role. Returns None after a role switch, and the exit code after a signal or when the
        leader has exited.
        """
        process = self._leader.process
        assert process is not None
        died = asyncio.create_task(process.wait())
        signalled = asyncio.create_task(self._signals.get())
        switched = asyncio.create_task(self._roles.accepted())
        try:
            await asyncio.wait({died, signalled, switched}, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                return await self._drain(process, signalled.result())
            if died.done():
                await self._take_last_messages(process)
                log.error("leader %s; every open request has failed and the server exits", process.describe_exit())
                return EXIT_UNCLEAN
        finally:
            await _cancel(died, signalled, switched)
        return await self._switch_role(process, switched.result())

    async def _switch_role(self, process: LeaderProcess, switch: RoleSwitch) -> int | None:
        """Replace the leader by one of the new role or, if that cannot start, of the former role. Returns None when the
        server is ready again, otherwise the exit code.
        """
        former, former_sampling, role = self._leader.config, self._sampling, switch.config.role
        log.info("role switch: this %s server becomes %s", former.role, role)
        code = await self._drain(process, None, then=f"becomes {role}")
        if code is not None:
            return code
        switch.stage = "starting"
        try:
            code = await self._replace_leader(switch.config, switch.default_sampling)
        except (StartupError, LeaderLostError, OSError) as error:
            log.error("role switch failed: %s; becoming %s again", error, former.role)
            self._metrics.role_switch_ended(role, "failed")
            switch.stage = "restoring"
            code = await self._restore(former, former_sampling)
            if code is None:
                self._roles.end(str(error))
            return code
        if code is None:
            self._metrics.role_switch_ended(role, "done")
            self._roles.end()
        return code

    async def _restore(self, config: AnyServerConfig, sampling: SamplingParams) -> int | None:
        """Start a leader of the former role again. Returns None when it is ready, and the exit code after a signal or
        when all attempts have failed.
        """
        for pause_s in RESTORE_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                return await self._replace_leader(config, sampling)
            except (StartupError, LeaderLostError, OSError) as error:
                log.error("cannot become %s again: %s", config.role, error)
        log.error("no leader could be started; the server exits")
        return EXIT_UNCLEAN

    async def _replace_leader(self, config: AnyServerConfig, sampling: SamplingParams) -> int | None:
        """End the current leader and start one with `config`. Returns and raises what `_start_leader` does, and OSError
        if the process cannot be started.
        """
        former = self._leader
        await former.wait_exit()
        former.kill(f"the server becomes {config.role}")
        self._leader = Leader(config, self._metrics, self._leader_command, self._tracing)
        self._sampling = sampling
        self._roles.leader = self._leader
        self._metrics.set_role(config.role)
        self._service.serve(config, self._leader.client, sampling)
        set_log_role(config.role)
        await former.close()
        gc.unfreeze()  # the frozen objects of the former leader are garbage now
        if isinstance(config, PrefillConfig):
            check = (config.host, config.bootstrap_port, "--bootstrap-port")
            await asyncio.to_thread(check_port, *check, patience_s=PREDECESSOR_S)
        return await self._start_leader()

    async def _take_last_messages(self, process: LeaderProcess) -> None:
        """Receive the last messages of a leader that has exited, then fail the requests that are still open."""
        await asyncio.sleep(LAST_MESSAGES_S)
        self._leader.client.fail_all(process.describe_exit())

    async def _drain(self, process: LeaderProcess, first: signal.Signals | None, then: str = "exits") -> int | None:
        """Let the leader finish its requests and exit, in bounded time. `first` is the signal that ends the server. It
        is None for a role switch; a signal during that drain then ends the server, too. A second signal kills the
        leader.

        Returns the exit code; None when there was no signal.
        """
        client, drain_s = self._leader.client, self._leader.config.shutdown_timeout_s
        cause = "role switch" if first is None else first.name
        log.info("%s: draining %s for up to %g s", cause, counted(*self._leader.open_work()), drain_s)
        ready = client.ready
        patience_s = 0.0  # a starting leader has nothing to drain and reads no messages for minutes
        if client.request_stop(drain_s, then) and ready is not None:
            patience_s = drain_s + leader_exit_s(ready.model.device)
        stopping = asyncio.create_task(process.stop(patience_s))
        signalled = asyncio.create_task(self._signals.get())
        try:
            while not stopping.done():
                await asyncio.wait({stopping, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if not signalled.done():
                    continue
                if first is not None:
                    if stopping.done():
                        break
                    work = counted(*self._leader.open_work())
                    log.warning("%s again: stopping now, %s cut off", signalled.result().name, work)
                    process.kill()
                    return 128 + signalled.result()
                first = signalled.result()
                log.info("%s: the server exits after the drain", first.name)
                signalled = asyncio.create_task(self._signals.get())
            await self._take_last_messages(process)
            log.info("stopped: leader %s", process.describe_exit())
            if first is None:
                return None
            return EXIT_OK if process.exit_status == 0 or ready is None else EXIT_UNCLEAN
        finally:
            await _cancel(stopping, signalled)


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
