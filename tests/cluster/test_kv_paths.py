"""The two paths of KV to a HiSparse server, on real pairs: into host memory, and into hot buffers on the GPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.transfer.protocol.messages import InstanceId, KvDestination, Welcome
from tests.checkpoints import GreedyTokens, is_reference_greedy
from tests.cluster.forkserver import FIRST_SCRIPT
from tests.cluster.servers import HTTP, Server, python_path, wait_until
from tests.cluster.test_hisparse_pair import (
    KEY_BYTES,
    LAYERS,
    LENGTHS,
    NEW_TOKENS,
    PAGE,
    PREFILL,
    ROW_BYTES,
    TOPK,
    Listener,
    Source,
    generate_all,
    read_hello,
)
from tests.cluster.test_hisparse_pair import source as source  # the fixture
from tests.ports import free_port

HOT_ROWS = 2 * TOPK
BUFFER = HOT_ROWS // PAGE + 1
GPU_ROWS = 13 * PAGE - 1
"""Rows of the longest prompt that goes to the GPU: the hot pool has a buffer for each of six slots and eight pages."""
PATHS = ["device" if length <= GPU_ROWS else "host" for length in LENGTHS]


def start_decode(source: Source, *flags: str) -> Server:
    sizes = source.case.hisparse(HOT_ROWS, 6 * BUFFER + 8)
    return source.decode(*sizes, "--max-running-requests", "6", *flags)


def answer(decode: Server, prompt: list[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    result: dict[str, Any] = decode.post(prompt, new_tokens).raise_for_status().json()
    return result


def path_bytes(server: Server) -> dict[str, float]:
    """`pdserve_path_bytes_total` by its label."""
    server.settled_info()
    families = text_string_to_metric_families(HTTP.get(f"{server.url}/metrics", timeout=5).text)
    samples = [sample for family in families for sample in family.samples if sample.name == "pdserve_path_bytes_total"]
    return {sample.labels["path"]: sample.value for sample in samples}


def test_short_prompts_go_to_the_gpu_and_long_ones_to_host_memory(source: Source) -> None:
    """One by one, so that memory is free. Both servers count the bytes of each path; a response names its path."""
    assert set(PATHS) == {"device", "host"}
    decode = start_decode(source)
    before = path_bytes(source.prefill)
    results = [answer(decode, prompt) for prompt in source.prompts]
    assert [result["output_ids"] for result in results] == source.expected
    assert [result["meta_info"]["kv_path"] for result in results] == PATHS
    token_bytes = LAYERS * ROW_BYTES + source.case.largest_stage[1][1] * KEY_BYTES
    expected = {
        path: sum(length for length, taken in zip(LENGTHS, PATHS, strict=True) if taken == path) * token_bytes
        for path in ("device", "host")
    }
    assert path_bytes(decode) == expected
    after = path_bytes(source.prefill)
    assert {path: after[path] - before[path] for path in after} == expected
    counters = decode.settled_info()["counters"]
    assert counters["kv_path_device_resident"] == PATHS.count("device")
    assert counters["kv_path_host_hot_rows"] == PATHS.count("host")
    (routes,) = (peer["transports"] for peer in source.prefill.info()["peers"] if peer["transports"])
    assert routes == {"latent": "tcp", "latent (device)": "tcp", "indexer": "tcp"}
    # again, all at once: cached prefixes, which came on either path, are copied into hot buffers
    assert generate_all(decode, source) == source.expected
    assert decode.count("prefix_tokens_reused") > 0
    assert answer(decode, [*source.prompts[3], *source.expected[3]])["meta_info"]["kv_path"] == "device"
    decode.check_clean()
    assert decode.stop() == 0


def test_requests_of_both_paths_become_evicting_and_tokens_equal_transformers(source: Source) -> None:
    """A request whose rows went to the GPU outgrows the hot pool: it then reads them from host memory."""
    many = 160
    sizes = source.case.hisparse(TOPK, 2 * (TOPK // PAGE + 1) + 9, kv_tokens=8 * 64)
    decode = source.decode(*sizes, "--max-running-requests", "2", "--growth-tokens", "8", "--no-prefix-cache")
    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(answer, decode, source.prompts[3], many)
        wait_until(lambda: decode.count("path_bytes_device") > 0 or long.done(), 30, "rows on the GPU")
        others = [pool.submit(answer, decode, prompt) for prompt in source.prompts]
        assert [other.result(90)["output_ids"] for other in others] == source.expected
        tokens = long.result(90)["output_ids"]
    assert len(tokens) == many
    assert is_reference_greedy(source.reference, source.prompts[3], tokens)
    assert long.result()["meta_info"]["kv_path"] == "device"
    assert {other.result()["meta_info"]["kv_path"] for other in others} >= {"host"}
    counters = decode.settled_info()["counters"]
    assert counters["hot_misses"] > 0
    decode.check_clean()
    assert decode.stop() == 0


def test_prefix_that_ends_inside_a_page_is_reused_and_only_the_rest_is_sent(source: Source) -> None:
    """Its rows are copied from a cached page, and prefill gets one index for each other token; on both paths."""
    shared = (5 * PAGE + 5, 25 * PAGE + 3)
    prompts = [[*source.prompts[-1][:length], 3, 1, 4, 1, 5, 9] for length in shared]
    expected = [GreedyTokens(source.reference, prompt, NEW_TOKENS) for prompt in prompts]
    decode = start_decode(source)
    assert decode.generate(source.prompts[-1], 2) == source.expected[-1][:2]
    wait_until(lambda: decode.idle() and decode.info()["gauges"]["cached_pages"] >= 37, 10, "the prompt is cached")
    before, reused = path_bytes(decode), decode.count("prefix_tokens_reused")
    results = [answer(decode, prompt) for prompt in prompts]
    assert [result["output_ids"] for result in results] == expected
    assert [result["meta_info"]["kv_path"] for result in results] == ["device", "host"]
    assert decode.count("prefix_tokens_reused") - reused == sum(shared)
    token_bytes = LAYERS * ROW_BYTES + source.case.largest_stage[1][1] * KEY_BYTES
    after = path_bytes(decode)
    assert {path: after[path] - before[path] for path in after} == {"device": 6 * token_bytes, "host": 6 * token_bytes}
    decode.check_clean()
    assert decode.stop() == 0


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")], ids=["tp2", "pp2"])
def test_several_ranks_receive_rows_on_the_gpu(source: Source, layout: tuple[str, str]) -> None:
    """Ids of hot pages are mapped to different local pages on the stages of a pipeline."""
    pp = 2 if layout[0] == "--pp" else 1
    decode = source.decode(
        *source.case.hisparse(HOT_ROWS, 6 * BUFFER + 8, pp=pp), "--max-running-requests", "6", *layout
    )
    assert generate_all(decode, source) == source.expected
    assert [answer(decode, prompt)["output_ids"] for prompt in source.prompts] == source.expected
    assert decode.count("path_bytes_device") > 0
    decode.check_clean()
    assert decode.stop() == 0


OTHER_VERSION = """
import sys

import msgspec

OLD, NEW = {old}, {new}
FIELDS = dict(Hello=6, Welcome=6, KvDestination=13)  # before enable_hisparse, the tag included
RANK_FIELDS = 8  # before the hot pool
LATER = dict(Hello=[dict(later=1)], Welcome=["later"], KvDestination=[[1, 2], None], PrefillDone=[0.5])
Encoder, Decoder = msgspec.msgpack.Encoder, msgspec.msgpack.Decoder


class OtherEncoder:
    def __init__(self, *args, **kwargs):
        self._encoder = Encoder(*args, **kwargs)
        self.encode_into = self._encoder.encode_into

    def encode(self, message):
        encoded, name = self._encoder.encode(message), type(message).__name__
        if not (OLD and name in FIELDS or NEW and name in LATER):
            return encoded
        fields = msgspec.msgpack.decode(encoded)
        if NEW:
            return self._encoder.encode(fields + LATER[name])
        if name != "KvDestination":
            fields[5] = [rank[:RANK_FIELDS] for rank in fields[5]]
        return self._encoder.encode(fields[: FIELDS[name]])


class OtherDecoder:
    def __init__(self, *args, **kwargs):
        self._decoder = Decoder(*args, **kwargs)

    def decode(self, data):
        message = self._decoder.decode(data)
        if not OLD or type(message).__name__ not in FIELDS:
            return message
        without = dict(enable_hisparse=False)  # it does not read what it does not send
        if hasattr(message, "ranks"):
            without["ranks"] = tuple(msgspec.structs.replace(rank, hot=None) for rank in message.ranks)
        return msgspec.structs.replace(message, **without)

    def __class_getitem__(cls, _):
        return cls


msgspec.msgpack.Encoder, msgspec.msgpack.Decoder = OtherEncoder, OtherDecoder
if wire := sys.modules.get("pdserve.transfer.protocol.wire"):  # a forked server has imported it
    wire._encoder, wire._decoder = OtherEncoder(), OtherDecoder(wire.AnyMessage)
print("another version of the protocol", flush=True)
"""
"""Run at the start of a server of another version. An old one has neither the trailing fields nor hot pools; a new one
appends further fields.
"""


def other_version(directory: Path, version: str) -> dict[str, str]:
    """Environment of a server of another version."""
    directory.mkdir()
    script = directory / "sitecustomize.py"
    script.write_text(OTHER_VERSION.format(old=version == "old", new=version == "new"))
    return {"PYTHONPATH": f"{directory}:{python_path()}", FIRST_SCRIPT: str(script)}


@pytest.mark.parametrize("version", ["old", "new"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_of_other_versions_pair_and_transfer(source: Source, tmp_path: Path, role: str, version: str) -> None:
    """One of the two servers omits the trailing fields of its messages, or appends further ones."""
    env = other_version(tmp_path / "site", version)
    sizes = (*source.case.hisparse(HOT_ROWS, 6 * BUFFER + 8), "--max-running-requests", "6")
    prefill = source.prefill
    if role == "prefill":
        prefill = other = Server("prefill", source.model, tmp_path / "p.log", *PREFILL, env=env).start()
        decode = source.servers.add("decode", source.model, "--prefill", prefill.endpoint, *sizes)
    else:
        flags = ("--prefill", prefill.endpoint, *sizes)
        decode = other = Server("decode", source.model, tmp_path / "d.log", *flags, env=env).start()
    try:
        decode.wait_ready(peers=1)
        results = [answer(decode, prompt) for prompt in source.prompts]
        assert [result["output_ids"] for result in results] == source.expected
        paths = {result["meta_info"]["kv_path"] for result in results}
        assert paths == ({"host"} if version == "old" else {"device", "host"})
        assert "another version of the protocol" in other.log.read_text()
        decode.check_clean()
    finally:
        codes = [server.stop() for server in {decode, other}]
    assert codes == [0] * len(codes)


@pytest.mark.parametrize("writes_both", [False, True])
def test_decode_sends_hot_pages_to_servers_that_can_write_them(source: Source, writes_both: bool) -> None:
    port, tokens = free_port(), 60
    flags = ("--prefill", f"127.0.0.1:{port}", *source.case.hisparse(TOPK, 64, kv_tokens=512))
    decode = source.servers.add("decode", source.model, *flags, "--max-running-requests", "2")
    hello = read_hello(port)
    hot = hello.ranks[0].hot
    assert hot is not None
    assert hot.layout.num_pages == 64
    me = Welcome(
        hello.protocol_version,
        InstanceId("p"),
        hello.model_fingerprint,
        hello.model_name,
        hello.ranks,
        enable_hisparse=writes_both,
    )
    with Listener(port, me) as prefill, ThreadPoolExecutor(1) as pool:
        decode.wait_ready(peers=1)
        result = pool.submit(decode.post, source.prompts[-1][:tokens], 4)
        request = prefill.receive()
        assert isinstance(request.message, KvDestination)
        assert request.message.enable_hisparse == (not writes_both)
        _, pages, hot_pages, *_ = (array.tolist() for array in request.arrays)
        assert len(pages) == -(-tokens // PAGE)
        if writes_both:
            assert len(set(hot_pages)) == -(-(tokens + 1) // PAGE)
            assert set(hot_pages) <= set(range(64))
            assert decode.settled_info()["gauges"]["hot_pages_available"] <= 64 - len(hot_pages)
        else:
            assert hot_pages == []
        decode.kill()
        result.exception(30)
