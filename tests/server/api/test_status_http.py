"""Information routes: health, model, server, load and metrics; and the API key."""

import asyncio

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from pdserve.configs.load import CONFIG_OF_ROLE, Role
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.scheduler.messages.frontend import (
    Cancel,
    DpRankStatus,
    Failed,
    FlushCache,
    PeerStatus,
    Submit,
    Tokens,
)
from pdserve.scheduler.messages.lifecycle import PrefillState, State
from pdserve.server.api import app as app_module
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, introduce, running_server
from tests.server.scripted_leader import make_finished, make_status


async def health_reasons(server: RunningServer) -> tuple[int, str]:
    response = await server.http.get("/health")
    if response.status_code == 503:
        assert response.headers["retry-after"] == "1"
    return response.status_code, " ".join(response.json()["reasons"])


async def test_health_reports_the_state_of_the_leader(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(stall_timeout_s=5), ready=False) as server:
        status, reasons = await health_reasons(server)
        assert (status, reasons.startswith("starting")) == (503, True)
        refused = await server.http.post("/generate", json={"text": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")

        await introduce(server.leader, server.client)
        response = await server.http.get("/health")
        assert response.status_code == 200, "a lost prefill does not make decode unhealthy"
        assert response.json()["peers"][0]["state"] == "lost"

        await server.report(make_status(loop_age_s=6.0))
        status, reasons = await health_reasons(server)
        assert (status, "loop stalled" in reasons, "stall_timeout_s is 5" in reasons) == (503, True, True)

        await server.report(msgspec.structs.replace(make_status(), step_age_s=4.9))
        assert await health_reasons(server) == (200, "")
        await server.report(msgspec.structs.replace(make_status(), step_age_s=6.0))
        assert await health_reasons(server) == (503, "step stalled: no result for 6.0 s (stall_timeout_s is 5)")

        await server.report(make_status(problems=("sender thread has ended",)))
        assert await health_reasons(server) == (503, "sender thread has ended")
        refused = await server.http.post("/generate", json={"text": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["message"] == "sender thread has ended"
        await server.leader.expect_nothing()

        await server.report(make_status())
        assert await health_reasons(server) == (200, "")

        server.client.request_stop(1.0)
        status, reasons = await health_reasons(server)
        assert (status, reasons.startswith("stopping")) == (503, True)
        refused = await server.http.post("/generate", json={"text": "a"})
        assert "stopping" in refused.json()["error"]["message"]

        server.client.fail_all("process 7 exited with status 1")
        assert await health_reasons(server) == (503, "leader dead: process 7 exited with status 1")


NEVER = DecodeConfig(local_prefill="never")
REFUSED = PeerStatus("p:1", "connecting", detail="connection refused")


@pytest.mark.parametrize(
    ("config", "peers", "warning"),
    [
        (NEVER, (REFUSED,), "is paired: p:1: connection refused"),
        (NEVER, (PeerStatus("p:1", "lost"), PeerStatus("q:1", "paired")), None),
        (NEVER, (), "no prefill server is known: give --prefill"),
        (DecodeConfig(), (REFUSED,), "is paired: p:1: connection refused; this server computes prompts itself"),
        (DecodeConfig(), (), None),
        (DecodeConfig(local_prefill="always"), (REFUSED,), None),
        (PrefillConfig(), (), None),
    ],
)
async def test_health_warns_when_no_prefill_server_is_paired(
    tokenizer: Tokenizer, config: AnyServerConfig, peers: tuple[PeerStatus, ...], warning: str | None
) -> None:
    """The status stays 200, because a restart of decode would not bring back a prefill server."""
    async with running_server(tokenizer, config) as server:
        await server.report(msgspec.structs.replace(make_status(), peers=peers))
        response = await server.http.get("/health")
    warnings = response.json()["warnings"]
    assert (response.status_code, len(warnings)) == (200, 0 if warning is None else 1)
    assert warning is None or warning in warnings[0]


async def test_health_fails_when_the_leader_is_silent(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(stall_timeout_s=1)) as server:
        assert await health_reasons(server) == (200, "")
        async with asyncio.timeout(10):
            while (await health_reasons(server))[0] == 200:
                await asyncio.sleep(0.05)
        status, reasons = await health_reasons(server)
        assert (status, "loop stalled" in reasons) == (503, True)


async def test_health_generate_generates_one_token(decode: RunningServer) -> None:
    asking = asyncio.create_task(decode.http.get("/health_generate"))
    submit = await decode.leader.expect(Submit)
    assert (submit.sampling.max_new_tokens, submit.sampling.temperature) == (1, 0.0)
    assert submit.priority == 100, "a long queue does not make a server unhealthy"
    await decode.leader.send(Tokens(submit.rid, (1,)), make_finished(submit.rid, 1))
    response = await asking
    assert (response.status_code, response.json()["generated"]) == (200, True)

    asking = asyncio.create_task(decode.http.get("/health_generate"))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Failed(submit.rid, 503, "unavailable", "no prefill server is paired"))
    response = await asking
    assert response.status_code == 503
    assert response.json()["reasons"] == ["generation failed: no prefill server is paired"]


async def test_health_generate_has_a_deadline(decode: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "HEALTH_GENERATE_TIMEOUT_S", 0.2)
    response = await decode.http.get("/health_generate")
    assert response.status_code == 503
    assert "no token within" in response.json()["reasons"][0]
    submit = await decode.leader.expect(Submit)
    assert (await decode.leader.expect(Cancel)).rid == submit.rid


async def test_information_routes_show_no_secrets(tokenizer: Tokenizer) -> None:
    config = PrefillConfig(
        api_key=SecretStr("frontend-secret"), cluster_key=SecretStr("cluster-secret-of-16"), served_model_name="tiny"
    )
    async with running_server(tokenizer, config) as server:
        server.http.headers["Authorization"] = "Bearer frontend-secret"
        for path in ("/model_info", "/get_model_info"):
            model = (await server.http.get(path)).json()
            assert (model["model_path"], model["served_model_name"]) == ("/models/bytes", "tiny")
        for path in ("/server_info", "/get_server_info"):
            response = await server.http.get(path)
            info = response.json()
            assert "secret" not in response.text
            assert info["disaggregation_mode"] == "prefill"
            assert info["disaggregation_bootstrap_port"] == 8998
            assert info["pool"] == {"page_size": 16, "num_pages": 25, "tokens": 400, "max_total_tokens": 400}
            assert info["peers"][0]["endpoint"] == "127.0.0.1:8998"
            assert (info["states"], info["taken_at"]) == ({"RUNNING": 1, "QUEUED": 0}, 1_800_000_000.25)
            assert info["config"]["api_key"] == "set"
            assert info["config"]["page_size"] == 16
        models = (await server.http.get("/v1/models")).json()
        assert models["data"][0]["id"] == "tiny"
        assert (await server.http.get("/v1/models/tiny")).json() == models["data"][0]
        missing = await server.http.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert '"org/other"' in missing.json()["error"]["message"]
        assert (await server.http.get("/version")).json().keys() == {"version"}


@pytest.mark.parametrize(
    ("role", "states", "gauges"),
    [
        ("decode", {State.QUEUED.value: 1, State.SAVED.value: 1, State.RUNNING.value: 1}, {"kv_pages_held": 5.0}),
        ("decode", {State.ARRIVED.value: 1, State.READY.value: 1, State.RUNNING.value: 1}, {"kv_pages_held": 5.0}),
        ("prefill", {PrefillState.WAITING.value: 2, PrefillState.SENDING.value: 1}, {"kv_pages_held": 4.0}),
    ],
)
async def test_get_load_counts_requests_and_tokens(
    tokenizer: Tokenizer, role: Role, states: dict[str, int], gauges: dict[str, float]
) -> None:
    """Tokens in the KV pool and, on prefill, tokens that wait to be computed."""
    waiting = {"waiting_tokens": 16.0} if role == "prefill" else {}
    async with running_server(tokenizer, CONFIG_OF_ROLE[role]()) as server:
        await server.report(msgspec.structs.replace(make_status(), states=states, gauges=gauges | waiting))
        load = {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 5 * 16}
        assert (await server.http.get("/get_load")).json() == [load]


async def test_server_info_has_the_load_of_each_data_parallel_rank(tokenizer: Tokenizer) -> None:
    config = DecodeConfig(tp=2, dp_attention=True)
    ranks = (
        DpRankStatus(0, {"kv_pages_held": 5.0, "waiting_for_pages": 3.0}, {"running": 2, "queued": 3}),
        DpRankStatus(1, {"kv_pages_held": 2.0, "waiting_for_pages": 0.0}, {"running": 1}),
    )
    async with running_server(tokenizer, config) as server:
        await server.report(msgspec.structs.replace(make_status(), dp_ranks=ranks))
        found = (await server.http.get("/server_info")).json()["dp_ranks"]
    loads = [[rank[name] for name in ("dp_rank", "requests", "kv_tokens", "waiting")] for rank in found]
    assert loads == [[0, 5, 5 * 16, 3], [1, 1, 2 * 16, 0]]
    assert [rank["states"] for rank in found] == [rank.states for rank in ranks]


async def test_routes_require_the_api_key(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(api_key=SecretStr("clé"))) as server:
        for path in ("/health", "/metrics"):
            assert (await server.http.get(path)).status_code == 200
        for path in ("/server_info", "/v1/models", "/v1/models/x", "/health_generate", "/model_info", "/get_load"):
            assert (await server.http.get(path)).status_code == 401
        missing = "this server needs an API key: send it as 'Authorization: Bearer KEY'"
        wrong = "wrong API key: it is not the api_key of this server"
        for name, value, message in (
            ("Authorization", "", missing),
            ("Authorization", "clé", missing),
            ("Authorization", "Bearer", missing),
            ("Authorization", "Basic clé", missing),
            ("Authorization", "Bearer nope", wrong),
            ("Authorization", "Bearer clé2", wrong),
            ("x-api-key", "", missing),
            ("x-api-key", "nope", wrong),
        ):
            headers = {name: value.encode()}
            response = await server.http.post("/generate", json={}, headers=headers)  # type: ignore[arg-type]  # bytes
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["message"]) == (401, "unauthorized", message)
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await server.http.post("/abort_request", json={"rid": "x"})).status_code == 401
        for path in ("/flush_cache", "/tokenize", "/detokenize"):
            assert (await server.http.post(path)).status_code == 401
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} clé".encode()}
            allowed = await server.http.post("/generate", json={}, headers=headers)  # type: ignore[arg-type]
            assert allowed.status_code == 400


@pytest.mark.parametrize("key", ["l\u00e0", "k\u0085", "k\u00a0", "k\u00c5"])
async def test_api_key_may_end_in_any_byte(tokenizer: Tokenizer, key: str) -> None:
    """Headers are decoded as latin-1. There the last byte of some of these keys is white space: 0xA0, 0x85."""
    async with running_server(tokenizer, DecodeConfig(api_key=SecretStr(key))) as server:
        for padding in (b"", b" ", b"  "):
            headers = [(b"Authorization", b"Bearer " + padding + key.encode())]
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        for wrong in (key.encode()[:-1], key.encode() + b"\xa0"):
            headers = [(b"Authorization", b"Bearer " + wrong)]
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("config", [DecodeConfig(), PrefillConfig()])
async def test_flush_cache_reaches_the_leader(tokenizer: Tokenizer, config: DecodeConfig | PrefillConfig) -> None:
    async with running_server(tokenizer, config) as server:
        response = await server.http.post("/flush_cache")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        await server.leader.expect(FlushCache)
        server.client.fail_all("process 7 exited with status 1")
        assert (await server.http.post("/flush_cache")).status_code == 503


async def test_unknown_routes_and_methods_return_json_errors(decode: RunningServer) -> None:
    missing = await decode.http.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await decode.http.get("/generate")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_head_response_has_no_body(decode: RunningServer) -> None:
    response = await decode.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len((await decode.http.get("/health")).content)


async def test_metrics_count_requests_and_tokens(decode: RunningServer) -> None:
    asking = asyncio.create_task(decode.http.post("/generate", json={"text": "a", "rid": "m"}))
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("m", (65,)), Tokens("m", (66, 67)), make_finished("m", 3))
    await asking
    await decode.http.post("/generate", json={})
    for path in ("/nowhere", "/generate", "/v1/models/other"):
        await decode.http.get(path)
    response = await decode.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["pdserve_requests_total", "length"] == 1
    for code in ("invalid_request", "not_found", "method_not_allowed", "model_not_found"):
        assert samples["pdserve_requests_refused_total", code] == 1
    assert samples["pdserve_generation_tokens_total",] == 3
    assert samples["pdserve_prompt_tokens_total",] == 5
    assert samples["pdserve_time_to_first_token_seconds_count",] == 1
    assert samples["pdserve_inter_token_latency_seconds_count",] == 2
    assert samples["pdserve_e2e_request_latency_seconds_count",] == 1
    assert samples["pdserve_kv_pages_free",] == 25
    assert samples["pdserve_transfer_bytes_total",] == 4096
    assert samples["pdserve_retractions_total",] == 2
    assert samples["pdserve_requests_in_state", "RUNNING"] == 1
    assert samples["pdserve_peer_paired", "127.0.0.1:8998", ""] == 0
    assert not [name for name in families if name.endswith("_created")]


@pytest.mark.parametrize("ready", [False, True])
async def test_every_metric_has_samples(tokenizer: Tokenizer, ready: bool) -> None:
    """A family without samples has no labels. sglang-router fails if it has labels on another server."""
    async with running_server(tokenizer, ready=ready) as server:
        text = (await server.http.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert families
    assert [family.name for family in families if not family.samples] == []


async def test_last_requests_have_the_tokens_of_a_request_that_failed(decode: RunningServer) -> None:
    asking = asyncio.ensure_future(decode.http.post("/generate", json={"input_ids": [1, 2, 3], "rid": "r1"}))
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", (65, 66)), Failed("r1", 503, "unavailable", "prefill lost"))
    assert (await asking).status_code == 503
    (last,) = (await decode.http.get("/server_info")).json()["recent"]
    assert (last["outcome"], last["prompt_tokens"], last["completion_tokens"]) == ("unavailable", 3, 2)


async def test_two_decode_servers_on_one_host_are_two_peers(prefill: RunningServer) -> None:
    peers = tuple(PeerStatus("10.0.0.5", "paired", instance, round_trip_ms=1.0) for instance in ("d1", "d2"))
    await prefill.report(msgspec.structs.replace(make_status(), peers=peers))
    text = (await prefill.http.get("/metrics")).text
    for instance in ("d1", "d2"):
        assert f'pdserve_peer_paired{{endpoint="10.0.0.5",instance_id="{instance}"}} 1.0' in text


async def test_a_transport_that_does_not_work_is_a_metric(prefill: RunningServer) -> None:
    peers = (
        PeerStatus("10.0.0.5", "paired", "d1", transports={"k+v": "tcp"}, unusable_transports={"rdma": "no port"}),
        PeerStatus("10.0.0.6", "paired", "d2", transports={"k+v": "rdma"}, transports_since=5.0),
    )
    await prefill.report(msgspec.structs.replace(make_status(), peers=peers))
    lines = (await prefill.http.get("/metrics")).text.splitlines()
    unusable = [line for line in lines if line.startswith("pdserve_transport_unusable{")]
    assert unusable == ['pdserve_transport_unusable{endpoint="10.0.0.5",instance_id="d1",transport="rdma"} 1.0']
    assert [peer["transports_since"] for peer in (await prefill.http.get("/server_info")).json()["peers"]] == [
        None,
        5.0,
    ]


async def test_servers_at_the_addresses_of_a_name_are_listed_and_counted(decode: RunningServer) -> None:
    name = "prefill:8998"
    peers = (
        PeerStatus(name, "paired", "p1", address="10.0.0.5"),
        PeerStatus(name, "connecting", detail="connection refused", address="10.0.0.6"),
        PeerStatus("10.0.0.9:8998", "paired", "p2"),
    )
    await decode.report(msgspec.structs.replace(make_status(), peers=peers))
    listed = (await decode.http.get("/server_info")).json()["peers"]
    assert [(peer["endpoint"], peer["address"]) for peer in listed] == [
        (name, "10.0.0.5"),
        (name, "10.0.0.6"),
        ("10.0.0.9:8998", None),
    ]
    lines = (await decode.http.get("/metrics")).text.splitlines()
    counts = [line for line in lines if line.startswith("pdserve_prefill_addresses{")]
    assert counts == [f'pdserve_prefill_addresses{{endpoint="{name}"}} 2.0']
    assert f'pdserve_peer_paired{{endpoint="{name}",instance_id="p1"}} 1.0' in lines


async def test_version_is_unavailable_until_models_is_available(tokenizer: Tokenizer) -> None:
    """A router that gets an answer from `/version` but not from `/v1/models` treats the server as vLLM from then on."""
    async with running_server(tokenizer, ready=False) as server:
        for path in ("/v1/models", "/version"):
            assert (await server.http.get(path)).status_code == 503
        await introduce(server.leader, server.client)
        assert (await server.http.get("/v1/models")).json()["data"][0]["owned_by"] == "sglang"
        assert (await server.http.get("/version")).status_code == 200


async def test_server_errors_are_logged_with_the_request_id(
    decode: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for status, code in ((500, "internal"), (503, "unavailable"), (504, "deadline"), (400, "invalid_request")):
        asking = asyncio.create_task(decode.http.post("/generate", json={"text": "a", "rid": f"r{status}"}))
        await decode.leader.expect(Submit)
        await decode.leader.send(Failed(f"r{status}", status, code, "for a reason"))
        assert (await asking).status_code == status
    assert [record.getMessage() for record in caplog.records if record.name == "pdserve.frontend"] == [
        "request r500 failed with 500: for a reason",
        "request r504 failed with 504: for a reason",
    ]


async def test_undecodable_messages_from_the_leader_are_skipped(decode: RunningServer) -> None:
    await decode.leader.send_raw(b"\xc1 not msgpack")
    await decode.report(make_status(problems=("seen",)))
    assert await health_reasons(decode) == (503, "seen")


async def test_role_switch_with_an_invalid_query_does_not_begin(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(allow_role_switch=True)) as server:
        answer = await server.http.post("/role?wait=maybe", json={"role": "prefill"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "wait")
