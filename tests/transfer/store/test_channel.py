"""AgentChannel and the process that calls Mooncake Store: without a master, stopped, and killed."""

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.transfer.store import channel as channels
from pdserve.transfer.store.agent import Item, Reply
from pdserve.transfer.store.channel import AgentChannel, NoReplyError
from pdserve.transfer.store.client import StoreError, endpoints, master_address
from tests.cluster.servers import python_path, wait_until
from tests.ports import free_port

ITEMS = [Item("key", 0, 0)]


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentChannel]:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with contextlib.closing(AgentChannel(f"mooncake://127.0.0.1:{free_port()}", "127.0.0.1", 1 << 16)) as opened:
        yield opened
    opened._stop()  # close() leaves the pipes open


def call(channel: AgentChannel, seconds: float = 60.0) -> None:
    channel.call("exist", ITEMS, time.monotonic() + seconds)


def agent_pid(channel: AgentChannel) -> int:
    assert channel._process is not None
    return channel._process.pid


def test_agent_reports_errors_and_is_replaced_when_it_hangs_or_dies(
    channel: AgentChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"no server of mooncake://.* answers"):
        call(channel)

    first = agent_pid(channel)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(NoReplyError):
        call(channel, 0.05)
    with pytest.raises(NoReplyError):  # still busy with the first request
        call(channel, 0.05)
    assert channel.busy_s() > 0.05
    os.kill(first, signal.SIGCONT)
    with pytest.raises(StoreError, match="no server"):  # the reply to the request that was given up
        wait_until(lambda: not channel.busy_s(), 60, "a reply")
    assert channel.busy_s() == 0
    with pytest.raises(StoreError, match="no server"):
        call(channel)
    assert agent_pid(channel) == first

    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(channels, "HUNG_S", 0.0)
    with pytest.raises(StoreError, match="was replaced"):
        call(channel)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", python_path())
    with pytest.raises(StoreError, match="no server"):
        call(channel)
    second = agent_pid(channel)
    assert second != first

    os.kill(second, signal.SIGKILL)
    with pytest.raises(StoreError, match=r"exited|no server"):
        call(channel)
    channel.close()
    with pytest.raises(StoreError):
        call(channel)


MORTAL_AGENT = """
import sys
from pathlib import Path
from pdserve.transfer.store.agent import serve
from pdserve.transfer.store.client import StoreError

master = Path({master!r})

class Client:  # whose connection stays dead, as Mooncake's was seen to do
    def __init__(self):
        if not master.exists():
            raise StoreError("no server")
        self.dead = False

    def exist(self, keys):
        self.dead |= not master.exists()
        if self.dead:
            raise StoreError("the master of the store does not answer")
        return [True] * len(keys)

serve(Client, memoryview(b""), sys.stdin.buffer, sys.stdout.buffer)
"""


def test_agent_that_has_lost_the_store_is_replaced(
    channel: AgentChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: its successor, which cannot connect while the store is away, stays."""
    master = tmp_path / "master"
    monkeypatch.setattr(AgentChannel, "COMMAND", (sys.executable, "-P", "-c", MORTAL_AGENT.format(master=str(master))))
    channel._stop()
    master.touch()
    call(channel)
    first = agent_pid(channel)
    call(channel)
    assert agent_pid(channel) == first
    master.unlink()
    with pytest.raises(StoreError, match="does not answer"):
        call(channel)
    with pytest.raises(StoreError, match="no server"):
        call(channel)
    second = agent_pid(channel)
    assert second != first
    master.touch()
    call(channel)
    assert agent_pid(channel) == second


@pytest.mark.parametrize("stopped_s", [2.0, 2 * channels.HUNG_S])
def test_reply_that_came_while_this_process_was_stopped_is_read(
    stopped_s: float, channel: AgentChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic)
    take_reply = channel._take_reply

    def stop_until_the_reply_is_there() -> Reply | None:
        assert channel._process is not None
        assert channel._process.stdout is not None
        reply = take_reply()
        if reply is None and clock.monotonic is time.monotonic:
            assert select.select([channel._process.stdout], [], [], 60)[0], "no reply"
            clock.monotonic = lambda: time.monotonic() + stopped_s
        return reply

    monkeypatch.setattr(channels, "time", clock)
    monkeypatch.setattr(channel, "_take_reply", stop_until_the_reply_is_there)
    pid = agent_pid(channel)
    with pytest.raises(StoreError, match="no server"):
        call(channel, 1.0)
    assert agent_pid(channel) == pid
    assert channel.busy_s() == 0


def test_agent_answers_a_process_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader has thousands of sockets when a store agent is started again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    monkeypatch.setenv("PYTHONPATH", python_path())
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        channel = AgentChannel(f"mooncake://127.0.0.1:{free_port()}", "127.0.0.1", 1 << 16)
        opened.callback(channel._stop)
        with pytest.raises(StoreError, match="no server"):
            call(channel)


def test_store_urls_are_converted_for_mooncake() -> None:
    assert master_address("mooncake://store:50051") == "store:50051"
    assert master_address("etcd://a:2379,b:2379") == "etcd://a:2379;b:2379"
    assert endpoints("etcd://a:2379,b:2380") == [("a", 2379), ("b", 2380)]
