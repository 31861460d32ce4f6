"""`pdserve store`: lends memory of this machine to a KV store, and runs the store's master unless it joins a store."""

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
from typing import Any

from ...common.errors import StartupError
from ...common.logs import configure_logging
from ...configs.schema import LOOPBACK_HOSTS
from ...transfer.mooncake.library import NOT_INSTALLED
from ...transfer.store.client import StoreError, connect
from .children import end_with_parent
from .ports import check_port
from .store_options import StoreOptions

log = logging.getLogger(__name__)

MASTER_START_S = 20.0
LEADER_S = 30.0
RESTART_S = 5.0
CLUSTER_VARIABLE, CLUSTER = "MC_STORE_CLUSTER_ID", "mooncake_cluster"
"""The name of the store in etcd: the environment variable from which Mooncake's clients take it, and its default."""
POLL_S = 0.2


def find_master() -> Path | None:
    """The path of `mooncake_master` in the Mooncake wheel; None if it is not installed."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return program
    return None


def run_store(options: StoreOptions) -> int:
    """Lend memory until SIGTERM or SIGINT (exit code 0), or until the master ends (1). With etcd, a master that ends is
    started again.
    """
    configure_logging("info", "store")
    if options.parent_pid is not None:
        end_with_parent(options.parent_pid)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    master = start_master(options) if options.join is None else None
    url = options.url
    try:
        store = _connect(options, master, stop)
        if store is None:
            return 0
        log.info("lending %d MiB to %s", options.memory_bytes >> 20, url)
        if options.host not in LOOPBACK_HOSTS:
            log.warning("the store has no authentication: its ports must be reachable from trusted machines only")
        print(f"pdserve store: ready; give servers --kv-store {url}", flush=True)
        while not stop.wait(POLL_S):
            if master is not None and master.poll() is not None:
                log.error("mooncake_master ended with status %s", master.returncode)
                if options.etcd is None:
                    return 1
                master = _start_again(options, master)
                stop.wait(RESTART_S)
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
            os._exit(0)  # skips Mooncake's destructors, which would wait for the master


def _connect(options: StoreOptions, master: "subprocess.Popen[bytes] | None", stop: threading.Event) -> Any | None:
    """Connect to the store and lend it memory. Returns None if `stop` is set meanwhile. With etcd, tries for LEADER_S:
    the masters first elect a leader, which takes seconds. Raises StartupError.
    """
    deadline = time.monotonic() + (LEADER_S if options.etcd is not None else 0.0)
    while not stop.is_set():
        if master is not None and master.poll() is not None:
            raise StartupError(f"mooncake_master ended with status {master.returncode} at start")
        try:
            return connect(options.url, options.host, segment_bytes=options.memory_bytes)
        except StoreError as error:
            if time.monotonic() >= deadline:
                raise StartupError(str(error)) from error
        stop.wait(POLL_S)
    return None


def _start_again(options: StoreOptions, ended: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    """Start the master again; returns `ended` if that fails, so that the caller tries again. Meanwhile the master of
    another machine leads, and the memory of this one stays in use.
    """
    try:
        return start_master(options)
    except StartupError as error:
        log.error("mooncake_master was not started again: %s", error)
        return ended


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
    listens_on = options.port
    if options.etcd is not None:
        cluster = os.environ.get(CLUSTER_VARIABLE, CLUSTER)
        command += ["--enable_ha", "--enable_oplog", f"--etcd_endpoints={options.etcd.replace(',', ';')}"]
        command.append(f"--cluster_id={cluster}")
        listens_on = options.metrics_port  # only the master that leads listens on the other port
    end_with_us = functools.partial(end_with_parent, os.getpid())
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_us)
    deadline = time.monotonic() + MASTER_START_S
    while time.monotonic() < deadline:
        if master.poll() is not None:
            raise StartupError(f"mooncake_master ended with status {master.returncode} at start")
        try:
            socket.create_connection((options.host, listens_on), POLL_S).close()
        except OSError:
            time.sleep(POLL_S / 4)
        else:
            return master
    master.kill()
    raise StartupError(f"mooncake_master does not listen on {options.host}:{listens_on} after {MASTER_START_S:.0f} s")
