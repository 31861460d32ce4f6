"""`/role` of the frontend process: which role switches are accepted, and their effect on the leader, the control port
and running requests. The leader is a scripted program.
"""

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from pydantic import SecretStr

from pdserve.common.errors import ForbiddenError, RoleConflictError
from pdserve.configs.load import Role
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.server import cli
from pdserve.server.api.role import check_may_switch
from pdserve.server.engine.leader import Leader
from pdserve.server.launch import frontend as frontend_module
from pdserve.server.launch.role_switch import RoleSwitches
from pdserve.server.observability.metrics import Metrics
from pdserve.server.text.tokenizer import Tokenizer
from tests.cluster.servers import wait_until
from tests.ports import free_port
from tests.processes import gone
from tests.server.http_harness import introduce, running_server, write_byte_model
from tests.server.launch.test_frontend_process import (
    AUTHORIZED,
    DIRECT,
    RunningFrontend,
    check_gone,
    frontend,
    generate,
)
from tests.server.scripted_leader import ScriptedLeader


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


def post_role(running: RunningFrontend, query: str = "", **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/role{query}", json=body, headers=AUTHORIZED, timeout=60, **DIRECT)


def generate_in_room(running: RunningFrontend, bootstrap_port: object) -> httpx.Response:
    """Send a request as a router does that has chosen the prefill server with this control port."""
    body = {"text": "a", "bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": 1}
    return httpx.post(f"{running.url}/generate", json=body, headers=AUTHORIZED, timeout=10, **DIRECT)


def get(running: RunningFrontend, path: str) -> Any:
    return httpx.get(f"{running.url}{path}", headers=AUTHORIZED, timeout=10, **DIRECT).json()


def role_metrics(running: RunningFrontend) -> dict[str, float]:
    text = httpx.get(f"{running.url}/metrics", **DIRECT).text
    return {name: float(value) for name, value in re.findall(r"^(pdserve_role\S*) (\S+)$", text, re.MULTILINE)}


def test_prefill_server_becomes_decode_and_prefill_again(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "role": "prefill",
        "bootstrap_port": free_port(),
        "chunk_size": 64,
        "max_batch_items": 3,
    }
    with frontend(model, tmp_path, "idle", **settings) as running:
        running.wait_healthy()
        leader = running.leader_pid()
        before = get(running, "/role")
        assert (before["role"], before["state"], before["fixed"], before["switch"]) == ("prefill", "ready", None, None)
        assert generate(running).status_code == 400, "a prefill server needs a bootstrap_room"

        accepted = post_role(running, role="decode", settings={"prefill": ["127.0.0.1:9"], "growth_tokens": 7})
        assert accepted.status_code == 202, accepted.text
        assert accepted.json()["switch"]["stage"] == "draining"
        wait_until(lambda: get(running, "/role")["switch"]["stage"] == "done", 30, "switched")
        check_gone(leader)
        after = get(running, "/role")
        assert (after["role"], after["state"], after["switch"]["error"]) == ("decode", "ready", None)
        assert before["since"] < after["switch"]["began_at"] < after["switch"]["ended_at"] == after["since"]
        assert generate(running).json()["text"] == "hi"
        assert generate_in_room(running, free_port()).json()["text"] == "hi"
        refused = generate_in_room(running, settings["bootstrap_port"])
        assert (refused.status_code, "has switched from prefill to decode" in refused.text) == (503, True)
        config = get(running, "/server_info")["config"]
        shown = {name: config[name] for name in ("port", "max_batch_items", "prefill", "growth_tokens")}
        assert shown == {
            "port": running.port,
            "max_batch_items": 3,
            "prefill": ["127.0.0.1:9"],
            "growth_tokens": 7,
        }
        assert role_metrics(running)['pdserve_role{role="decode"}'] == 1

        assert post_role(running, role="decode").status_code == 200, "the server has this role already"
        back = post_role(running, "?wait=1", role="prefill")
        assert (back.status_code, back.json()["role"], back.json()["state"]) == (200, "prefill", "ready")
        config = get(running, "/server_info")["config"]
        assert (config["bootstrap_port"], config["chunk_size"]) == (settings["bootstrap_port"], 64)
        assert generate_in_room(running, settings["bootstrap_port"]).status_code == 200
        refused = generate_in_room(running, free_port())
        assert (refused.status_code, "has switched from decode to prefill" in refused.text) == (503, True)
        assert post_role(running, role="decode", settings={"growth_tokens": 9}, wait=True).json()["role"] == "decode"
        config = get(running, "/server_info")["config"]
        assert (config["prefill"], config["growth_tokens"]) == (["127.0.0.1:9"], 9)

        assert role_metrics(running) == {
            'pdserve_role{role="decode"}': 1,
            'pdserve_role_switches_total{outcome="done",role="decode"}': 2,
            'pdserve_role_switches_total{outcome="done",role="prefill"}': 1,
        }
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end()
        assert code == 0, stderr
        roles = re.findall(r" I (\w+): ready: ", stderr)
        assert roles == ["prefill", "decode", "prefill", "decode"]


@pytest.fixture(scope="module")
def decode(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFrontend]:
    """A decode server whose role does not change in the tests."""
    with frontend(model, tmp_path_factory.mktemp("temp"), "serve") as running:
        running.wait_healthy()
        yield running


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "role is required"),
        ({"role": "router"}, 'role must be "prefill" or "decode", got "router"'),
        ({"role": "prefill", "setting": {}}, "setting is not a field of this request: did you mean settings?"),
        ({"role": "prefill", "settings": []}, "settings must be an object, got an array of 0"),
        (
            {"role": "prefill", "settings": {"chunk_sizes": 8}},
            "unknown setting 'chunk_sizes' in settings: did you mean chunk_size?",
        ),
        (
            {"role": "prefill", "settings": {"prefill": "a:1"}},
            "unknown setting 'prefill' in settings: it is a setting of 'pdserve decode' only",
        ),
        (
            {"role": "prefill", "settings": {"port": 80, "api_key": "x"}},
            "setting 'port' cannot change with the role: it is a setting of both roles\n"
            "setting 'api_key' cannot change with the role: it is a setting of both roles",
        ),
        (
            {"role": "prefill", "settings": {"send_window": 0}},
            "send_window: must be greater than or equal to 1, got 0 in settings",
        ),
        (
            {"role": "prefill", "settings": {"chunk_size": 24}},
            "chunk_size (24) must be a multiple of page_size (16)",
        ),
        (
            {"role": "decode", "settings": {"growth_tokens": 1}},
            "settings change only with the role, and this server is decode already",
        ),
    ],
)
def test_bad_bodies_are_refused_and_change_nothing(decode: RunningFrontend, body: dict[str, Any], message: str) -> None:
    leader = decode.leader_pid()
    refused = post_role(decode, **body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    assert (get(decode, "/role")["switch"], decode.leader_pid()) == (None, leader)


def test_control_port_in_use_is_refused_before_the_drain(decode: RunningFrontend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = post_role(decode, role="prefill", settings={"bootstrap_port": port})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        f"port {port} on 127.0.0.1 is in use; choose another with --bootstrap-port"
    )
    assert get(decode, "/role")["state"] == "ready"


def test_role_needs_the_api_key(decode: RunningFrontend) -> None:
    for method in ("GET", "POST"):
        refused = httpx.request(method, f"{decode.url}/role", json={"role": "prefill"}, **DIRECT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
    assert get(decode, "/role")["switch"] is None


@pytest.mark.parametrize(
    ("client", "headers", "allowed"),
    [
        (("127.0.0.1", 1), [], True),
        (("::1", 1), [], True),
        (("::ffff:127.0.0.1", 1), [], True),
        (("10.0.0.7", 1), [], False),
        (("::ffff:10.0.0.7", 1), [], False),
        (None, [], False),
        (("127.0.0.1", 1), [(b"x-forwarded-for", b"10.0.0.7")], False),
        (("127.0.0.1", 1), [(b"origin", b"http://example.org")], False),
    ],
)
def test_role_changes_without_an_api_key_only_from_this_machine(
    client: tuple[str, int] | None, headers: list[tuple[bytes, bytes]], allowed: bool
) -> None:
    request = Request({"type": "http", "client": client, "headers": headers})
    check_may_switch(request, DecodeConfig(api_key=SecretStr("checked before")))
    if allowed:
        check_may_switch(request, DecodeConfig(allow_role_switch=True))
        return
    with pytest.raises(ForbiddenError, match="without an API key the role can be changed only from this machine"):
        check_may_switch(request, DecodeConfig(allow_role_switch=True))


async def test_role_cannot_be_changed_without_an_api_key_unless_the_server_allows_it(tokenizer: Tokenizer) -> None:
    """This client is what a proxy with default settings looks like: on this machine, without a header of its own."""
    for config, status in ((DecodeConfig(), 403), (DecodeConfig(allow_role_switch=True), 409)):
        async with running_server(tokenizer, config) as server:
            answer = await server.http.post("/role", json={"role": "prefill"})
        assert answer.status_code == status, answer.text
        assert ("or start it with allow_role_switch" in answer.text) == (status == 403)


def test_busy_server_switches_only_with_drain(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "slow") as running:
        running.wait_healthy()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(generate, running)
            running.wait_submitted()
            settings = {"bootstrap_port": free_port()}
            refused = post_role(running, role="prefill", settings=settings)
            switched = post_role(running, "?wait=true", role="prefill", settings=settings, drain=True)
            response = answer.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_conflict")
        assert refused.json()["error"]["message"].startswith("this server is not idle: it has 1 request; with")
        assert (response.status_code, response.json()["text"]) == (200, "hi")
        assert (switched.status_code, switched.json()["role"]) == (200, "prefill")


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("startup-failed", "model /nowhere: no such directory"),
        ("crash-at-start", "was ended by SIGSEGV"),
    ],
)
def test_former_role_is_restored_when_the_new_leader_cannot_start(
    model: Path, tmp_path: Path, behaviour: str, error: str
) -> None:
    with frontend(model, tmp_path, f"decode=serve,prefill={behaviour}") as running:
        running.wait_healthy()
        since = get(running, "/role")["since"]
        failed = post_role(running, role="prefill", settings={"bootstrap_port": free_port()}, wait=True)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "role_switch_failed")
        assert error in failed.json()["error"]["message"]
        report = get(running, "/role")
        assert (report["role"], report["state"], report["since"]) == ("decode", "ready", since)
        assert report["switch"]["stage"] == "failed"
        assert error in report["switch"]["error"]
        assert generate(running).json()["text"] == "hi"
        assert role_metrics(running) == {
            'pdserve_role{role="decode"}': 1,
            'pdserve_role_switches_total{outcome="failed",role="prefill"}': 1,
        }


def test_server_is_unavailable_during_a_switch_and_stops_on_a_signal(model: Path, tmp_path: Path) -> None:
    with frontend(
        model, tmp_path, "prefill=idle,decode=loading", role="prefill", bootstrap_port=free_port()
    ) as running:
        running.wait_healthy()
        assert post_role(running, role="decode").status_code == 202
        wait_until(lambda: get(running, "/role")["switch"]["stage"] == "starting", 10, "starting")
        health = httpx.get(f"{running.url}/health", **DIRECT)
        assert health.status_code == 503
        assert (health.json()["role"], health.json()["state"]) == ("decode", "starting")
        assert generate(running).status_code == 503
        refused = post_role(running, role="prefill")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_conflict")
        assert refused.json()["error"]["message"] == "a role switch is under way: starting"
        leader = running.leader_pid()
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end(within_s=30)
        assert code == 0, stderr
        check_gone(leader)


def test_signals_end_the_server_during_the_drain_of_a_switch(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "deaf", shutdown_timeout_s=60) as running:
        running.wait_healthy()
        leader = running.leader_pid()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(post_role, running, role="prefill", wait=True)
            wait_until(lambda: get(running, "/role")["switch"] is not None, 10, "draining")
            health = get(running, "/health")
            assert (health["role"], health["reasons"]) == (
                "decode",
                ["stopping: the server drains and becomes prefill"],
            )
            running.process.send_signal(signal.SIGTERM)
            running.wait_logged("SIGTERM: the server exits after the drain")
            os.kill(leader, 0)
            running.process.send_signal(signal.SIGINT)
            response = waiting.result()
        assert (response.status_code, "the server has stopped" in response.text) == (500, True)
        code, stderr = running.end(within_s=30)
        assert code == 128 + signal.SIGINT, stderr
        wait_until(lambda: gone(leader), 5, "the leader has gone")


def test_role_switch_is_refused_while_the_server_starts(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "loading") as running:
        running.wait_state("starting")
        refused = post_role(running, role="prefill")
        assert refused.status_code == 409
        assert refused.json()["error"]["message"] == (
            "the role changes only while the server is ready, and it is starting"
        )


def test_serve_command_has_a_fixed_role(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[AnyServerConfig, str | None]] = []

    def run_frontend(config: AnyServerConfig, *, fixed_role: str | None) -> int:
        started.append((config, fixed_role))
        return 0

    monkeypatch.setattr(frontend_module, "run_frontend", run_frontend)
    assert [cli.main([command]) for command in ("serve", "decode", "prefill")] == [0, 0, 0]
    assert [config.role for config, _ in started] == ["decode", "decode", "prefill"]
    reasons = [fixed_role for _, fixed_role in started]
    assert reasons[1:] == [None, None]
    assert "started with 'pdserve serve'" in (reasons[0] or "")


@pytest.mark.parametrize(
    ("config", "fixed_role", "reason"),
    [
        (DecodeConfig(), "started with 'pdserve serve'", "started with 'pdserve serve'"),
        (
            PrefillConfig(tp=2, nnodes=2, dist_init_addr="a:1", cluster_key=SecretStr("k" * 16)),
            None,
            r"this server has ranks on 2 machines \(nnodes\)",
        ),
    ],
)
async def test_server_with_a_fixed_role_refuses_a_switch(
    model: Path, config: AnyServerConfig, fixed_role: str | None, reason: str
) -> None:
    leader = Leader(config, Metrics(), ())
    scripted = ScriptedLeader(leader.client.address)
    try:
        await introduce(scripted, leader.client)
        roles = RoleSwitches(locate_model(str(model)), leader, fixed_role)
        other: Role = "prefill" if config.role == "decode" else "decode"
        with pytest.raises(RoleConflictError, match=reason):
            await roles.request(other, {}, drain=True)
        assert re.search(reason, roles.report()["fixed"] or "")
    finally:
        scripted.close()
        await leader.close()
