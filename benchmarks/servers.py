"""Shared by benchmarks of whole servers: a model without weights on disk, and servers that end with the benchmark."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pdserve.configs.schema import AnyServerConfig
from pdserve.server.launch.children import Children
from pdserve.server.launch.up import NotReadyError, base_url, probe, server_command, server_environ

POLL_S = 0.2

_given_ports: set[int] = set()


def write_model(directory: Path, config: Mapping[str, Any], chat_template: str = "") -> None:
    """The files of a model except its weights. The tokenizer has a short word for each id."""
    (directory / "config.json").write_text(json.dumps(config))
    letters = sorted(ByteLevel.alphabet())
    words = letters + [f"{first}{second}{third}" for first in letters for second in letters for third in letters[:4]]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words[: config["vocab_size"] - 1]))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"eos_token": "<|im_end|>"} | ({"chat_template": chat_template} if chat_template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def free_port() -> int:
    """A free port, a different one each time."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe_socket:
            port: int = probe_socket.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


@contextmanager
def running(configs: Mapping[str, AnyServerConfig], screen: Console) -> Iterator[Children]:
    """Servers by name, started together; they end with the block, the last one first."""
    children = Children(screen)
    try:
        for name, config in configs.items():
            children.start(name, server_command(config), server_environ(config))
        yield children
    finally:
        children.stop(grace_s=15.0)


def wait_ready(children: Children, configs: Sequence[AnyServerConfig], timeout_s: float) -> None:
    """Wait until all are healthy and each decode server has generated a token.

    Raises ChildEndedError when one of them ends, NotReadyError when it takes longer than `timeout_s`.
    """
    began = time.monotonic()
    routes = [f"{base_url(config)}/health" for config in configs]
    routes += [f"{base_url(config)}/health_generate" for config in configs if config.role == "decode"]
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        for route in routes:
            while (reason := probe(client, route)) is not None:
                children.check()
                if time.monotonic() - began > timeout_s:
                    raise NotReadyError(f"gave up after {timeout_s:.0f} s: {route}: {reason}")
                time.sleep(POLL_S)


def cpu_seconds(port: int) -> dict[str, float]:
    """CPU time of the frontend that was started with this port, and of its leader."""
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if b"pdserve.server" not in command or f"--port={port}".encode() not in command:
                continue
            children = (entry / "task" / entry.name / "children").read_text().split()
            times = []
            for process in (entry.name, children[0]):
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                times.append((int(fields[11]) + int(fields[12])) / ticks)
            return {"front_cpu_s": times[0], "leader_cpu_s": times[1]}
    return {}
