"""A leader without an engine: the real start-up line and the real PAIR protocol, with a script instead of a model.

In a test it is an object on the test's own event loop (`ScriptedLeader`). As a program it replaces
`pdserve.scheduler.engine.leader`; its first argument selects its behaviour.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from pdserve.scheduler.messages.frontend import (
    Cancel,
    Failed,
    Finished,
    FinishReason,
    ModelInfo,
    PeerStatus,
    Ready,
    StartupFailed,
    Status,
    Stop,
    Submit,
    ToFrontend,
    Tokens,
    ToLeader,
)
from pdserve.scheduler.shutdown import LAST_WRITES_S, STOP_S
from pdserve.transfer.control.peers import LAST_WORDS_S

MessageT = TypeVar("MessageT")

VOCAB_SIZE = 258
EOS = 256
CONTEXT_LENGTH = 512
MAX_TOTAL_TOKENS = 400
LINGERING_S = LAST_WRITES_S + LAST_WORDS_S + STOP_S
"""The longest time that a leader on a CPU takes to stop: with writes and a step in flight, and a peer that hangs."""
SUBMITTED = 2
"""Number of running requests that the program reports after its first Submit."""


def make_ready(max_total_tokens: int = MAX_TOTAL_TOKENS) -> Ready:
    model = ModelInfo(
        name="bytes",
        path="/models/bytes",
        architecture="LlamaForCausalLM",
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        fingerprint="f" * 16,
        dtype="float32",
        device="cpu",
    )
    return Ready(model=model, instance="i-1", page_size=16, num_pages=25, max_total_tokens=max_total_tokens)


def make_status(loop_age_s: float = 0.0, problems: tuple[str, ...] = (), running: int = 1) -> Status:
    return Status(
        gauges={"kv_pages_free": 25.0, "running_requests": 0.0},
        counters={"transfer_bytes": 4096.0, "retractions": 2.0},
        peers=(PeerStatus(endpoint="127.0.0.1:8998", state="lost", detail="no heartbeat"),),
        states={"RUNNING": running, "QUEUED": 0},
        taken_at=1_800_000_000.25,
        loop_age_s=loop_age_s,
        problems=problems,
    )


def make_finished(rid: str, completion_tokens: int, reason: FinishReason | None = None) -> Finished:
    return Finished(
        rid=rid,
        reason=reason or FinishReason("length", length=completion_tokens),
        prompt_tokens=5,
        completion_tokens=completion_tokens,
        cached_tokens=3,
        timeline={"queued": 0.001, "prefilling": 0.02},
    )


class ScriptedLeader:
    """The leader's end of the socket, driven by a test."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToLeader)

    async def send(self, *messages: ToFrontend) -> None:
        """Send messages in one batch, as a leader does after each iteration of its loop."""
        await self.send_raw(msgspec.msgpack.encode(messages))

    async def send_raw(self, payload: bytes) -> None:
        await self._socket.send(payload)

    async def expect(self, kind: type[MessageT] | tuple[type[MessageT], ...], within_s: float = 30.0) -> MessageT:
        """The next message. It must be of this kind, or of one of these kinds."""
        async with asyncio.timeout(within_s):
            message = self._decoder.decode(await self._socket.recv())
        assert isinstance(message, kind), f"expected {kind}, got {message}"
        return message

    async def expect_nothing(self, for_s: float = 0.2) -> None:
        assert not await self._socket.poll(int(for_s * 1000)), "the frontend sent something"

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main(behaviour: str) -> None:
    """`behaviour` is one of:

    - `serve`: finish every request at once. `idle` is the same, with no running request in its status.
    - `slow`: take 0.5 s for a request.
    - `deaf`: ignore SIGTERM and Stop, and never finish a request.
    - `lingers`: take LINGERING_S to stop.
    - `loading`: send Ready after a minute.
    - `startup-failed`, `crash-at-start`, `crash-on-submit`.

    `prefill=idle,decode=loading` chooses one for each role.
    """
    introduction = json.loads(sys.stdin.readline())
    if "=" in behaviour:
        behaviour = dict(pair.split("=") for pair in behaviour.split(","))[introduction["config"]["role"]]
    assert introduction["config"]["api_key"] in (None, "frontend-secret"), "secrets must arrive in the clear"
    threading.Thread(target=_exit_with_frontend, daemon=True).start()
    if behaviour == "crash-at-start":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(introduction["frontend"])

        def send(message: ToFrontend) -> None:
            socket.send(msgspec.msgpack.encode([message]))

        if behaviour == "startup-failed":
            send(StartupFailed("model /nowhere: no such directory"))
            sys.exit(2)
        if behaviour == "loading":
            time.sleep(60)
        send(make_ready())
        status = make_status(running=0 if behaviour == "idle" else 1)
        send(status)
        while True:
            while not socket.poll(500):
                send(status)  # a silent leader counts as stuck
            message = msgspec.msgpack.decode(socket.recv(), type=ToLeader)
            match message:
                case Submit() if behaviour == "crash-on-submit":
                    os.kill(os.getpid(), signal.SIGKILL)
                case Submit():
                    status = make_status(running=SUBMITTED)
                    send(status)
                    time.sleep(0.5 if behaviour == "slow" else 0.0)
                    send(Tokens(message.rid, (104, 105)))
                    if behaviour != "deaf":
                        send(make_finished(message.rid, 2))
                case Cancel(stopped=True):
                    send(make_finished(message.rid, 2, FinishReason("stop")))
                case Cancel():
                    send(Failed(message.rid, 499, "aborted", "aborted"))
                case Stop() if behaviour != "deaf":
                    time.sleep(LINGERING_S if behaviour == "lingers" else 0.0)
                    return


def _exit_with_frontend() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
