"""`pdserve store`: lends memory of this machine to a KV store and, unless it joins another one, runs its master."""

import functools
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from ...configs.errors import StartupError
from ...configs.logs import configure_logging
from ...configs.schema import LOOPBACK_HOSTS
from ...transfer.mooncake.library import NOT_INSTALLED
from ...transfer.store.client import StoreError, connect, endpoints
from .children import end_with_parent
from .ports import check_port
from .store_options import StoreOptions

log = logging.getLogger(__name__)

MASTER_START_S = 20.0
POLL_S = 0.2


def find_master() -> Path | None:
    """The program `mooncake_master` of the Mooncake wheel."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return program
    return None


def run_store(options: StoreOptions) -> int:
    """Lend memory until SIGTERM or SIGINT (0), or until the master ends (1)."""
    configure_logging("info", "store")
    if options.parent_pid is not None:
        end_with_parent(options.parent_pid)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    master = start_master(options) if options.join is None else None
    url = options.join or f"mooncake://{options.host}:{options.port}"
    try:
        try:
            store = connect(url, options.host, segment_bytes=options.memory_bytes)
        except StoreError as error:
            raise StartupError(str(error)) from error
        log.info("lending %d MiB to %s", options.memory_bytes >> 20, url)
        if options.host not in LOOPBACK_HOSTS:
            log.warning("the store has no authentication: its ports must be reachable from trusted machines only")
        print(f"pdserve store: ready; give servers --kv-store {url}", flush=True)
        while not stop.wait(POLL_S):
            if master is not None and master.poll() is not None:
                log.error("mooncake_master ended with status %s", master.returncode)
                return 1
        log.info("shutting down")
        del store
        return 0
    finally:
        if master is not None:
            master.terminate()
            try:
                master.wait(5)
            except subprocess.TimeoutExpired:
                master.kill()
        logging.shutdown()
        sys.stdout.flush()
        if stop.is_set():
            os._exit(0)  # without Mooncake's destructors, which wait for the master


def start_master(options: StoreOptions) -> "subprocess.Popen[bytes]":
    """Start `mooncake_master` and wait until it listens. Raises StartupError."""
    program = find_master()
    if program is None:
        raise StartupError(NOT_INSTALLED)
    check_port(options.host, options.port, "--port")
    check_port(options.host, options.metrics_port, "--metrics-port")
    try:
        address = socket.gethostbyname(options.host)
    except OSError as error:
        raise StartupError(f"--host {options.host}: {error}") from None
    command = [
        str(program),
        f"--rpc_address={address}",
        f"--rpc_port={options.port}",
        f"--metrics_host={address}",
        f"--metrics_port={options.metrics_port}",
        "--logtostderr",
        "--minloglevel=2",
    ]
    end_with_us = functools.partial(end_with_parent, os.getpid())
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_us)
    deadline = time.monotonic() + MASTER_START_S
    while time.monotonic() < deadline:
        if master.poll() is not None:
            raise StartupError(f"mooncake_master ended with status {master.returncode} at start")
        try:
            socket.create_connection(endpoints(f"mooncake://{options.host}:{options.port}")[0], POLL_S).close()
        except OSError:
            time.sleep(POLL_S / 4)
        else:
            return master
    master.kill()
    raise StartupError(f"mooncake_master does not listen on {options.host}:{options.port} after {MASTER_START_S:.0f} s")
