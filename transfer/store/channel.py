"""A rank's end of a store agent (`agent.py`): starts it, passes requests, and replaces it if it does not answer."""

import contextlib
import fcntl
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from .agent import LENGTH, Item, Reply
from .client import StoreError

HUNG_S = 30.0
"""An agent that has not answered for this long is replaced. Mooncake gives up after 4 to 5 s if its master is dead."""

POLL_S = 0.001
PIPE_BYTES = 1 << 20
MOST_ITEMS = 2048
"""Most items of one request. Each takes up to 200 bytes in the pipe."""


class NoReplyError(StoreError):
    """The agent has not answered in time. Its reply may come later and is dropped then."""


class Channel(Protocol):
    """Requests to a store agent, one after the other. For one thread. After NoReplyError the agent may still use the
    staging memory. So the next request has to be an `exist`: it does not use that memory, and waits for its turn.
    """

    memory: torch.Tensor
    """The staging memory, shared with the agent: bytes."""

    def call(self, operation: str, items: Sequence[Item], deadline: float) -> tuple[int, ...]:
        """The outcome of each item. Raises StoreError, and NoReplyError at `deadline` (monotonic)."""

    def busy_s(self) -> float:
        """How long the agent has been working on a request that was given up; 0 if it has answered all requests. Raises
        StoreError if such a request has failed.
        """

    def close(self) -> None:
        """End a request in progress, with a StoreError, and refuse further ones. May be called from another thread."""


class AgentChannel:
    """A channel to an agent process. It is started here, and again after it has ended, hung or lost the store."""

    # -P keeps the working directory out of sys.path: in a checkout its folders have the names of other packages.
    COMMAND = (sys.executable, "-P", "-m", "pdserve.transfer.store.agent")

    def __init__(self, url: str, host: str, size_bytes: int) -> None:
        self._url, self._host, self._size_bytes = url, host, size_bytes
        self._descriptor = os.memfd_create("pdserve-store")
        os.ftruncate(self._descriptor, size_bytes)
        self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size_bytes), dtype=torch.uint8)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._number = 0
        self._busy_since: float | None = None
        """When the oldest request without a reply was sent."""
        self._received = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._running()

    def call(self, operation: str, items: Sequence[Item], deadline: float) -> tuple[int, ...]:
        if self._busy_since is not None:
            self._await_idle(deadline)
        self._number += 1
        body = self._encoder.encode((self._number, operation, tuple(items)))
        process = self._running()
        self._busy_since = time.monotonic()
        try:
            process.stdin.write(LENGTH.pack(len(body)) + body)  # type: ignore[union-attr]  # it is a pipe
            process.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            self._stop()
            raise StoreError(f"the store agent has exited: {error}") from error
        reply = self._await_idle(deadline)
        if reply.problem is not None:
            raise StoreError(reply.problem)
        return reply.outcomes

    def busy_s(self) -> float:
        if (since := self._busy_since) is None:
            return 0.0
        try:
            reply = self._await_idle(time.monotonic() + POLL_S)
        except NoReplyError:
            return time.monotonic() - since
        if reply.problem is not None:
            raise StoreError(reply.problem)
        return 0.0

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise StoreError("the store was closed")
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [*self.COMMAND, str(self._descriptor), str(self._size_bytes), self._url, self._host],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # its memory is on the host
                process_group=0,
            )
            assert self._process.stdin is not None
            # a request fits, so that a stopped agent does not block this thread
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return self._process

    def _await_idle(self, deadline: float) -> Reply:
        """The reply to the latest request. Until then the agent uses the staging memory."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._busy_since is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()  # not select(), which refuses descriptors from 1,024 on
        poller.register(descriptor, select.POLLIN)
        while True:
            reply = self._take_reply()
            if reply is not None and reply.number == self._number:
                self._busy_since = None
                if reply.lost:
                    self._stop()
                return reply
            ends_at = min(deadline, self._busy_since + HUNG_S)
            # a reply is read also after the deadline: this process may have been stopped meanwhile
            if poller.poll(1000 * max(0.0, ends_at - time.monotonic())):
                part = os.read(descriptor, 1 << 16)
                if not part:
                    status = self._process.wait()
                    self._stop()
                    raise StoreError(f"the store agent exited with status {status}")
                self._received += part
                continue
            now = time.monotonic()
            if now - self._busy_since > HUNG_S:
                self._stop()
                raise StoreError(f"the store agent has not answered for {HUNG_S:.0f} s and was replaced")
            if now >= deadline:
                raise NoReplyError(f"the store has not answered for {now - self._busy_since:.1f} s")

    def _take_reply(self) -> Reply | None:
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        reply = self._decoder.decode(self._received[LENGTH.size : end])
        del self._received[:end]
        return reply

    def _stop(self) -> None:
        self._busy_since = None
        self._received.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # part of a request was not read
                        pipe.close()
