"""`pdserve up`: one prefill and one decode server on this machine, started, restarted and ended together."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType

import httpx
from pydantic import SecretStr
from rich.console import Console

from ...common.errors import PdserveError
from ...configs.flags import to_flags
from ...configs.load import SECRET_VARIABLES
from ...configs.schema import AnyServerConfig
from ...models.loading.catalog import locate_model
from ..connections.tls import check_tls, own_server_context
from .children import ChildEndedError, Children
from .model_files import with_local_model
from .pair import PairConfig, check_ports
from .signals import SignalCopies
from .startup_checks import check_startup
from .store_options import StoreOptions

READY_TIMEOUT_S = 600.0
"""A large model on a cold disk takes minutes to load; a pair that takes longer than this is broken."""

POLL_S = 0.2
PROGRESS_LINE_S = 5.0
RETRIED_STATUSES = frozenset({429, 503, 504})
KILL_MARGIN_S = 15.0
"""Grace period after shutdown_timeout_s before a server is killed."""


class NotReadyError(PdserveError):
    """The pair did not become ready; the message names what was missing."""

    exit_code = 1


class RunningPair:
    """The two running servers, which `running_pair` starts and ends."""

    def __init__(self, config: PairConfig, children: Children, console: Console) -> None:
        self.config = config
        self.children = children
        self.console = console
        self.url = base_url(config.decode)

    def client(self, timeout_s: float | None) -> httpx.Client:
        """An HTTP client of the decode server. It ignores the proxies in the environment: the server is on loopback."""
        key = self.config.decode.api_key
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key is not None else {}
        verify = own_server_context(self.config.decode) or True
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False, verify=verify)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until both servers are healthy and have generated a token together.

        Raises ChildEndedError when one of them ends, NotReadyError when it takes longer than `timeout_s`.
        """
        started = time.monotonic()
        steps = [
            ("prefill", f"{base_url(self.config.prefill)}/health"),
            ("decode", f"{self.url}/health"),
            ("a first token through both", f"{self.url}/health_generate"),
        ]
        printed_at_s = 0.0
        live = self.console.status("starting") if self.console.is_terminal else nullcontext()
        with live as status, self.client(POLL_S * 25) as client:
            while steps:
                self.children.check()
                name, url = steps[0]
                reason = probe(client, url)
                if reason is None:
                    steps.pop(0)
                    continue
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise NotReadyError(f"gave up after {waited_s:.0f} s: waiting for {name}, {reason}")
                line = f"waiting for {name} ({reason}), {waited_s:.0f} s"
                if status is not None:
                    status.update(line)
                elif waited_s - printed_at_s >= PROGRESS_LINE_S:
                    printed_at_s = waited_s
                    self.console.print(line)
                time.sleep(POLL_S)
        self.console.print(f"ready after {time.monotonic() - started:.1f} s")

    def watch(self) -> None:
        """Start servers again that end. Ends only when a signal raises KeyboardInterrupt, or with ChildEndedError when
        the settings of a server are wrong or it ends too often.
        """
        while True:
            self.children.restart_ended()
            time.sleep(POLL_S)


@contextmanager
def running_pair(config: PairConfig, console: Console, store: StoreOptions | None = None) -> Iterator[RunningPair]:
    """Start both servers, and a KV store if `store` is given. End them in bounded time when the block ends.

    SIGINT and SIGTERM raise KeyboardInterrupt in the block; a second one kills the servers. Main thread only.
    """
    check_ports(config)
    config = PairConfig(with_local_model(config.prefill), with_local_model(config.decode))
    for server in config:
        check_tls(server)
        check_startup(server, locate_model(server.model, server.load_format))
    children = Children(console)
    hurry = threading.Event()
    received: signal.Signals | None = None
    ending = False
    copies = SignalCopies()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received, ending
        if copies.is_copy(number):
            return
        if ending:
            hurry.set()
        else:
            received, ending = signal.Signals(number), True
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if store is not None:
            children.start("store", store_command(store), {**os.environ, "PYTHONUNBUFFERED": "1"})
        for server in config:
            children.start(server.role, server_command(server), server_environ(server))
        yield RunningPair(config, children, console)
    finally:
        ending = True
        grace_s = max(config.prefill.shutdown_timeout_s, config.decode.shutdown_timeout_s) + KILL_MARGIN_S
        children.stop(grace_s, number=received or signal.SIGTERM, hurry=hurry)  # their logs then name it
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_up(config: PairConfig, store: StoreOptions | None = None) -> int:
    """Serve until Ctrl-C (exit code 0), or until a server ends at start or too often (1; 2 when its settings were
    wrong). `store` is a KV store to start together with the servers.
    """
    console = Console(stderr=True, highlight=False)
    try:
        with running_pair(config, console, store) as pair:
            pair.wait_ready()
            print("\n".join(banner(config)), flush=True)
            pair.watch()
    except (ChildEndedError, NotReadyError) as error:
        print(f"pdserve: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


def banner(config: PairConfig) -> Sequence[str]:
    """URLs and an example command."""
    url = base_url(config.decode)
    return (
        "",
        f"  decode   {url}  (clients talk to this one)",
        f"  prefill  {base_url(config.prefill)}  (control port {config.prefill.bootstrap_port})",
        "",
        f"  {curl_command(config, 'The capital of France is')}",
        f"  pdserve chat --url {url}{'' if config.decode.ssl_certfile is None else ' --insecure'}",
        f"  open {url}/ in a browser to see what they do",
        "",
        "  Ctrl-C stops both.",
        "",
    )


def curl_command(config: PairConfig, text: str) -> str:
    """A curl command that generates; it takes the API key from the environment."""
    # -k: the address that this machine uses may not be in the certificate
    program = "curl" if config.decode.ssl_certfile is None else "curl -k"
    key = "" if config.decode.api_key is None else '-H "Authorization: Bearer $PDSERVE_API_KEY" '
    body = json.dumps({"text": text, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}, ensure_ascii=False)
    return f"{program} {base_url(config.decode)}/generate {key}-d {shlex.quote(body)}"


def base_url(config: AnyServerConfig) -> str:
    """The URL of the server for clients on this machine: a wildcard address becomes loopback."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"{config.http_scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"


def server_command(config: AnyServerConfig) -> list[str]:
    # -P: `kernels/` or `models/` in the working directory must not shadow installed packages
    server = [sys.executable, "-P", "-m", "pdserve.server", config.role]
    return [*server, f"--parent-pid={os.getpid()}", *to_flags(config)]


def store_command(store: StoreOptions) -> list[str]:
    server = [sys.executable, "-P", "-m", "pdserve.server", "store", f"--parent-pid={os.getpid()}"]
    ports = [f"--port={store.port}", f"--metrics-port={store.metrics_port}"]
    return [*server, f"--host={store.host}", f"--memory={store.memory_bytes >> 20}MiB", *ports]


def server_environ(config: AnyServerConfig) -> dict[str, str]:
    """The environment of a server: that of this process and the secrets, which flags would show in the process list."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for field, variable in SECRET_VARIABLES.items():
        secret = getattr(config, field)
        if isinstance(secret, SecretStr):
            environ[variable] = secret.get_secret_value()
    return environ


def probe(client: httpx.Client, url: str) -> str | None:
    """Returns None when `url` answers 200, otherwise a short reason to wait. Raises NotReadyError for other errors."""
    try:
        response = client.get(url)
    except httpx.ConnectError:
        return "not listening yet"
    except httpx.HTTPError as error:
        return type(error).__name__
    if response.status_code == httpx.codes.OK:
        return None
    if response.status_code not in RETRIED_STATUSES:
        raise NotReadyError(f"{url} returned {response.status_code}: {response.text[:200]}")
    try:  # the body of /health: the first of its `reasons`, or its `status`
        body = response.json()
        return str((body.get("reasons") or [body["status"]])[0])
    except (ValueError, AttributeError, LookupError, TypeError):
        return f"status {response.status_code}"
