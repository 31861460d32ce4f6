"""`pdserve doctor` on this machine: its facts, a real handshake, a real transfer and its output."""

import json
import queue
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import uvicorn
from fastapi import FastAPI

from pdserve.configs.load import load_config
from pdserve.server.cli import main
from pdserve.server.doctor import collect as collecting
from pdserve.server.doctor.facts import RdmaDevice
from pdserve.server.doctor.handshake import greet
from pdserve.server.doctor.trial_transfer import measure
from pdserve.transfer.control.curve import ClusterKeys
from pdserve.transfer.control.prefill import PrefillControl
from pdserve.transfer.control.reachability import HTTP_PORT
from pdserve.transfer.plan.pairing import check_pair
from pdserve.transfer.protocol.messages import PROTOCOL_VERSION, InstanceId, Welcome
from tests.checkpoints import make_checkpoint
from tests.cluster.servers import REPOSITORY
from tests.ports import free_port

TIMEOUT_S = 60.0
"""For a handshake on a busy machine."""
KEY = "5d41402abc4b2a76b9719d911017c592"


def prefill_control(port: int, version: int = PROTOCOL_VERSION) -> PrefillControl:
    """The control port of a prefill server."""
    welcome = Welcome(version, InstanceId("p"), "f00d", "tiny", ())
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    control = PrefillControl(
        "127.0.0.1",
        port,
        welcome,
        check=lambda hello: check_pair(hello, welcome),
        on_event=events.put,
        keys=ClusterKeys.derive(KEY),
    )
    control.start()
    return control


def test_handshake_checks_address_and_key() -> None:
    port = free_port()
    control = prefill_control(port)
    try:
        found = greet(f"127.0.0.1:{port}", KEY, TIMEOUT_S)
        assert found.reached, found
        assert found.detail == "prefill serves tiny (f00d)"
        assert control.stats()["peers_up"] == 0, "doctor does not pair"
        other = greet(f"127.0.0.1:{port}", KEY[::-1], TIMEOUT_S)
        assert (other.reached, "cluster_key differs" in other.detail) == (False, True), other
    finally:
        control.close()
    nothing = greet(f"127.0.0.1:{port}", KEY, TIMEOUT_S)
    assert (nothing.reached, "nothing listens" in nothing.detail) == (False, True), nothing


@pytest.mark.parametrize("key", [KEY, None], ids=["a key", "no key"])
def test_handshake_with_an_http_port_names_it(key: str | None) -> None:
    """Not the cluster key: an HTTP server closes the connection as a prefill server with another key does."""
    server = uvicorn.Server(uvicorn.Config(FastAPI(), log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        try:
            found = greet(f"127.0.0.1:{listening.getsockname()[1]}", key, TIMEOUT_S)
        finally:
            server.should_exit = True
            serving.join()
    assert (found.reached, found.detail) == (False, HTTP_PORT)


def test_handshake_with_another_protocol_version_fails() -> None:
    port = free_port()
    control = prefill_control(port, version=PROTOCOL_VERSION + 1)
    try:
        found = greet(f"127.0.0.1:{port}", KEY, TIMEOUT_S)
        assert (found.reached, "protocol version differs" in found.detail) == (False, True), found
    finally:
        control.close()


def test_transfer_is_measured_in_a_child_process(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command with JSON output. TCP works on every machine. The child process must not import the
    `numpy.py` of the working directory.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / ".dev"))
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "decode.yaml"
    settings.write_text(f"port: {free_port()}\nprefill: [127.0.0.1:{free_port()}]\ndevice: cpu\n")
    code = main(["doctor", "--config", str(settings), "--json"])
    document = json.loads(capfd.readouterr().out)
    (transfer,) = document["facts"]["transfers"]
    assert transfer["gib_per_s"] > 0, transfer
    (peer,) = document["facts"]["peers"]
    assert not peer["reached"], "nothing listens there"
    assert (code, document["status"]) == (2, "fail")
    levels = {finding["check"]: finding["level"] for finding in document["findings"]}
    assert (levels["python"], levels["mooncake"], levels["peer"]) == ("ok", "ok", "fail")


def test_transfer_process_that_fails_or_hangs_is_reported() -> None:
    assert "status" in (measure("no-such-transport", "127.0.0.1").problem or "")
    assert measure("tcp", "127.0.0.1", timeout_s=0.01).problem == "it did not end within 0.01 s"


def test_lines_name_level_check_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["doctor", "--no-transfer", "--port", str(port), "--device", "cpu"]
        codes = [main(command), main([*command, "--strict"])]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   python      Python 3.")
    warning = lines.index(f"warn ports       port {port} on 127.0.0.1 is in use")
    assert lines[warning + 1].strip().startswith("-> choose another with --port")
    assert lines[-1].endswith("0 failures")
    assert codes == [0, 1], "warnings fail only with --strict"


@pytest.mark.parametrize("peer", ["10.0.0.5", ":8998", "10.0.0.5:x", "10.0.0.5:0"])
def test_peer_must_be_host_and_port(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", peer]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_host_memory_of_the_settings() -> None:
    def wanted(role: str, **flags: str) -> float:
        config = load_config(role, None, flags, {})  # type: ignore[arg-type]  # a role
        return collecting.settings_of(config).host_memory_bytes / collecting.GIB

    assert wanted("decode", retract_memory_gib="2") == 2
    assert wanted("decode", retract_memory_gib="2", enable_hisparse="true", host_memory_gib="100") == 102
    assert wanted("prefill", device="cpu", kv_memory_gib="3") == 3


def test_rdma_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    _write(port / "state", "4: ACTIVE\n")
    _write(port / "link_layer", "Ethernet\n")
    _write(port / "gids/0", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001\n")
    _write(port / "gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0007\n")
    _write(port / "gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    _write(port / "gid_attrs/types/0", "IB/RoCE v1\n")
    _write(port / "gid_attrs/types/1", "RoCE v2\n")
    _write(tmp_path / "mlx5_0" / "device" / "numa_node", "1\n")
    assert collecting.rdma_devices(tmp_path) == (RdmaDevice("mlx5_0", "ACTIVE", "Ethernet", (0, 1), (1,), 1),)
    assert collecting.rdma_devices(tmp_path / "absent") == ()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_model_of_the_settings_is_looked_up_on_this_machine(tmp_path: Path) -> None:
    found = []
    for settings in ({}, {"model": "org/name"}, {"model": str(make_checkpoint(tmp_path))}, {"model": "/absent"}):
        config = load_config("decode", None, {"port": str(free_port()), **settings}, {})
        facts = collecting.collect(config, transfers=(), mooncake_problem=None, peers=())
        found.append((facts.model, facts.model_problem))
    assert found[:3] == [(None, None), (None, None), (str(tmp_path), None)]
    assert found[3][0] == "/absent"
    assert str(found[3][1]).startswith("model '/absent': no such directory or .gguf file")


def test_facts_of_this_machine_are_plausible() -> None:
    config = load_config("decode", None, {"port": str(free_port())}, {})
    facts = collecting.collect(config, transfers=(), mooncake_problem=None, peers=())
    assert facts.total_bytes > facts.free_bytes > 0
    assert facts.numa_nodes >= facts.numa_nodes_allowed >= 1
    assert msgspec.to_builtins(facts)["torch"]
