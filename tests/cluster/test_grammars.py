"""Grammars on real pairs with a tiny model of random weights: every finished output matches its grammar.

Also with parallel ranks, local prefill, forced retraction and a killed prefill server. `make test-schemas` sends 300
random schemas in each of these settings and counts the outputs; `make test-all` sends a few.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.common.sampling import Grammar
from tests.checkpoints import load_reference
from tests.cluster.forkserver import FIRST_SCRIPT
from tests.cluster.greedy import is_masked_greedy
from tests.cluster.servers import HTTP, Cluster, Server, cluster, wait_until
from tests.random_schemas import random_schema

COUNT = int(os.environ.get("PDSERVE_SCHEMAS", "0"))
"""Schemas in each setting; 0 means the few that a test chooses."""
SCHEMAS = [random_schema(seed) for seed in range(COUNT or 12)]
NEW_TOKENS = 600
GREEDY_PROMPT = list(b"Answer in JSON:")
PATIENT = ("--queue-timeout-s", "600", "--prefill-wait-s", "300")
"""Flags of decode servers: on a busy machine, a prefill server may pause for so long that it counts as lost."""
LONG = {"type": "string", "minLength": 80, "maxLength": 90}


def some(count: int) -> list[dict[str, Any]]:
    """The first schemas, or all of them if a count is given."""
    return SCHEMAS[: COUNT or count]


def lengthen(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with a longer output, so that its KV outgrows the pool."""
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    pair = {"type": "array", "prefixItems": [inner, LONG], "items": False, "minItems": 2}
    return {**pair, "$defs": schema.get("$defs", {})}


def ask(
    server: Server, schema: dict[str, Any], prompt: str = "Answer in JSON:", **sampling: Any
) -> list[dict[str, Any]]:
    """The outputs for one schema, in the format of SGLang's API."""
    params = {"json_schema": json.dumps(schema), "max_new_tokens": NEW_TOKENS, "temperature": 1.0, **sampling}
    response = HTTP.post(f"{server.url}/generate", json={"text": prompt, "sampling_params": params}, timeout=600)
    assert response.is_success, (response.text, schema)
    found = response.json()
    return found if isinstance(found, list) else [found]


def ask_together(server: Server, schemas: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The outputs of requests that run at the same time, however long each grammar takes to compile."""
    params = [
        {"json_schema": json.dumps(schema), "max_new_tokens": 330, "temperature": 1.0, "seed": 5} for schema in schemas
    ]
    body = {"text": ["Answer in JSON:"] * len(schemas), "sampling_params": params}
    return [
        [output] for output in HTTP.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status().json()
    ]


def check(output: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Validate a finished output; False if it reached `max_new_tokens`."""
    if output["meta_info"]["finish_reason"]["type"] == "length":
        return False
    assert output["meta_info"]["finish_reason"]["type"] == "stop"
    jsonschema.validate(json.loads(output["text"]), schema, format_checker=jsonschema.FormatChecker())
    return True


def check_all(server: Server, schemas: list[dict[str, Any]], **sampling: Any) -> None:
    """Every output that has finished validates, and nearly all have finished."""
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda schema: ask(server, schema, **sampling), schemas))
    check_outputs(schemas, outputs)


def check_outputs(schemas: list[dict[str, Any]], outputs: list[list[dict[str, Any]]]) -> None:
    finished = [check(output, schema) for schema, group in zip(schemas, outputs, strict=True) for output in group]
    print(
        f"{len(schemas)} schemas: {sum(finished)} of {len(finished)} answers have finished, and all of these validate"
    )
    assert sum(finished) > 0.95 * len(finished) - 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[tuple[Server, Server]]:
    with cluster(tmp_path_factory.mktemp("grammars")) as started:
        prefill, decode = started.pair(llama, decode_flags=PATIENT)
        yield prefill, decode
        prefill.check_clean()
        decode.check_clean()
        assert (decode.stop(), prefill.stop()) == (0, 0)


@pytest.fixture(scope="module")
def reference(llama: Path) -> Any:
    return load_reference(llama)


def check_greedy_answers(server: Server, reference: Any) -> None:
    """Greedy outputs equal those of transformers with masked logits."""
    schemas = SCHEMAS[:4]
    params = [{"json_schema": schema, "max_new_tokens": 40, "temperature": 0} for schema in schemas]
    body = {"input_ids": [GREEDY_PROMPT] * len(params), "sampling_params": params}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=600)
    for schema, output in zip(schemas, response.raise_for_status().json(), strict=True):
        grammar = Grammar("json_schema", json.dumps(schema))
        assert is_masked_greedy(reference, server.model, GREEDY_PROMPT, grammar, output["output_ids"], 40)


def test_greedy_answers_equal_transformers_with_masked_logits(pair: tuple[Server, Server], reference: Any) -> None:
    check_greedy_answers(pair[1], reference)


def test_answers_of_a_pair_validate(pair: tuple[Server, Server]) -> None:
    check_all(pair[1], SCHEMAS, seed=1)


def test_four_samples_of_a_prompt_validate(pair: tuple[Server, Server]) -> None:
    check_all(pair[1], some(6), n=4, seed=2)


def test_penalties_and_stops_are_combined_with_a_grammar(pair: tuple[Server, Server]) -> None:
    check_all(pair[1], some(6), frequency_penalty=0.5, repetition_penalty=1.2, top_k=30, top_p=0.9, seed=3)
    number = {"type": "integer", "minimum": 10, "maximum": 99}
    (output,) = ask(pair[1], number, ignore_eos=True, min_new_tokens=20)
    assert check(output, number), "ignore_eos or min_new_tokens has kept the output from ending with its grammar"
    schema = {"type": "string", "minLength": 20, "maxLength": 60}
    newline = 10  # a stop token that no JSON string has
    (output,) = ask(pair[1], schema, stop_token_ids=[newline], seed=4)
    assert check(output, schema)


def test_the_same_seed_gives_the_same_answer_in_any_batch(pair: tuple[Server, Server]) -> None:
    alone = [ask(pair[1], schema, seed=7)[0]["output_ids"] for schema in SCHEMAS[:4]]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda schema: ask(pair[1], schema, seed=7)[0]["output_ids"], SCHEMAS[:4]))
    assert together == alone


@pytest.mark.parametrize("flags", [("--tp", "2"), ("--pp", "2")], ids=["tp2", "pp2"])
def test_answers_of_parallel_ranks_equal_those_of_a_single_rank(
    pair: tuple[Server, Server],
    reference: Any,
    servers: Cluster,
    llama: Path,
    flags: tuple[str, ...],
) -> None:
    prefill, decode = servers.pair(llama, flags, (*flags, *PATIENT))
    check_all(decode, some(3), seed=8)
    (found,), (expected,) = (ask(server, SCHEMAS[0], seed=9) for server in (decode, pair[1]))
    assert found["output_ids"] == expected["output_ids"]
    check_greedy_answers(decode, reference)
    prefill.check_clean()
    decode.check_clean()


def test_answers_of_a_server_with_local_prefill_validate(
    pair: tuple[Server, Server], reference: Any, servers: Cluster, llama: Path
) -> None:
    decode = servers.add("decode", llama, "--local-prefill", "always").wait_ready()
    check_all(decode, some(8), n=2, seed=10)
    (found,), (expected,) = (ask(server, SCHEMAS[0], seed=11) for server in (decode, pair[1]))
    assert found["output_ids"] == expected["output_ids"]
    check_greedy_answers(decode, reference)
    decode.check_clean()


@pytest.mark.parametrize("host_gib", ["0", "0.01"], ids=["recomputed", "saved"])
def test_answers_of_retracted_requests_validate(servers: Cluster, llama: Path, host_gib: str) -> None:
    pool = ("--kv-tokens", "352", "--page-size", "16", "--growth-tokens", "16", "--retract-memory-gib", host_gib)
    _, decode = servers.pair(llama, decode_flags=(*pool, *PATIENT))
    schemas = [lengthen(schema) for schema in some(6)]
    outputs = [
        group for first in range(0, len(schemas), 6) for group in ask_together(decode, schemas[first : first + 6])
    ]
    retracted = sum(output["meta_info"]["timeline"]["retracted"] > 0 for group in outputs for output in group)
    print(f"{retracted} of {len(schemas)} requests were retracted")
    assert retracted > len(schemas) / 6
    check_outputs(schemas, outputs)
    decode.check_clean()


def test_requests_move_to_another_prefill_server_with_their_grammars(servers: Cluster, llama: Path) -> None:
    """A server is killed while it computes long prompts in short chunks; then another one is started."""
    busy, other = (servers.add("prefill", llama, "--chunk-size", "16") for _ in range(2))
    endpoints = f"{busy.endpoint},{other.endpoint}"
    decode = servers.add("decode", llama, "--prefill", endpoints, "--kv-tokens", "81920", *PATIENT)
    decode.wait_ready(peers=2)
    other.kill()
    schemas, size = some(4), 20 if COUNT else 4
    outputs: list[list[dict[str, Any]]] = []
    for first in range(0, len(schemas), size):
        decode.wait_ready(peers=1)
        group = range(first, min(first + size, len(schemas)))
        with ThreadPoolExecutor(size) as threads:
            asked = [threads.submit(ask, decode, schemas[i], prompt=f"{i} {'word ' * 300}", seed=i) for i in group]
            wait_until(lambda: decode.info()["states"]["prefilling"] > 1, 60, "prompts are sent")
            busy.kill()
            other.start()
            outputs += [each.result() for each in asked]
        busy, other = other, busy
    moved = decode.count("redispatches")
    print(f"{moved} of {len(schemas)} requests were sent to another prefill server")
    assert moved > len(schemas) // 16
    check_outputs(schemas, outputs)


def test_cancelled_request_with_a_new_grammar_frees_its_pages(pair: tuple[Server, Server]) -> None:
    """Some of the clients disconnect while the grammar is compiled, some while the output is generated."""
    for milliseconds in (1, 20, 80, 300):
        schema = {"type": "string", "minLength": 2000 + milliseconds}
        params = {"json_schema": schema, "max_new_tokens": 2000}
        with pytest.raises(Exception, match="timed out"):
            HTTP.post(
                f"{pair[1].url}/generate", json={"text": "a", "sampling_params": params}, timeout=milliseconds / 1000
            )
    wait_until(pair[1].idle, 20, "all requests have ended")


SLOW_MASKS = """
import time
from pathlib import Path
from pdserve.models.grammar import masks

masks.SLOW_MASK_S = -1.0
prepare = masks.GrammarMasks.prepare

def wait(self, row):
    while Path({gate!r}).exists():
        time.sleep(0.01)
    return prepare(self, row)

masks.GrammarMasks.prepare = wait
"""
"""Run at the start of a server: every mask is slow, and takes as long as there is a file."""


def slow_pair(servers: Cluster, llama: Path, directory: Path, *flags: str) -> tuple[Server, Server, Path]:
    """A pair whose decode server finds every mask slow, and the file that its masks wait for."""
    gate, script = directory / "gate", directory / "slow.py"
    script.write_text(SLOW_MASKS.format(gate=str(gate)))
    prefill = servers.add("prefill", llama, *flags)
    decode = servers.add(
        "decode", llama, "--prefill", prefill.endpoint, *flags, *PATIENT, env={FIRST_SCRIPT: str(script)}
    )
    prefill.wait_ready(peers=1)
    decode.wait_ready(peers=1)
    return prefill, decode, gate


@pytest.mark.parametrize("flags", [(), ("--tp", "2"), ("--pp", "2")], ids=["1", "tp2", "pp2"])
def test_answers_with_slow_masks_equal_transformers_with_masked_logits(
    reference: Any, servers: Cluster, llama: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    prefill, decode, _ = slow_pair(servers, llama, tmp_path, *flags)
    check_greedy_answers(decode, reference)
    check_all(decode, some(3), n=2, seed=11)
    assert decode.count("masks_prepared") > 100
    prefill.check_clean()
    decode.check_clean()


def test_row_with_a_slow_mask_does_not_hold_the_other_rows(servers: Cluster, llama: Path, tmp_path: Path) -> None:
    _, decode, gate = slow_pair(servers, llama, tmp_path)
    grammar = {"regex": "[a-d]{9}", "max_new_tokens": 20, "temperature": 0}
    body = {"text": "x", "sampling_params": grammar}
    expected = HTTP.post(f"{decode.url}/generate", json=body, timeout=60).raise_for_status().json()
    gate.touch()
    before = decode.count("masks_prepared")
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(HTTP.post, f"{decode.url}/generate", json=body, timeout=60)
        wait_until(lambda: decode.count("masks_prepared") > before, 30, "the row sits out")
        assert len(decode.generate([1, 2, 3], 60)) == 60
        cancelled = HTTP.post(f"{decode.url}/generate", json={**body, "rid": "gone", "timeout_s": 0.5}, timeout=60)
        assert cancelled.status_code == 504
        assert not slow.done()
        gate.unlink()
        assert slow.result().raise_for_status().json()["text"] == expected["text"]
    assert decode.count("masks_prepared") - before >= 8
    decode.check_clean()
