"""Pairs with fp8 KV, 4-bit weights and dummy weights give the right tokens, and do not pair with other servers."""

import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.dummy_weights import fill_with_noise
from tests.checkpoints import (
    VOCAB_SIZE,
    GreedyTokens,
    load_reference,
    make_checkpoint,
)
from tests.cluster.servers import Server, cluster, wait_until
from tests.fp8_reference import rounded_greedy
from tests.int4_checkpoints import pack_checkpoint

NEW_TOKENS = 12
FLAGS = ("--kv-tokens", "1024")
FP8 = (*FLAGS, "--kv-dtype", "fp8_e4m3")
DUMMY = (*FLAGS, "--load-format", "dummy")


def prompts() -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 48, 130)]


def refusal(decode: Server) -> str:
    """The reason that decode gives for not pairing with its prefill server."""

    def details() -> list[str]:
        return [peer["detail"] for peer in decode.info()["peers"] if peer["state"] == "refused"]

    wait_until(lambda: bool(details()), 30, "refused")
    return details()[0]


def test_fp8_kv_gives_the_tokens_of_a_model_with_a_rounded_cache(
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    with cluster(tmp_path) as started:
        prefill, decode = started.pair(model, (*FP8, "--chunk-size", "48"), (*FP8, "--page-size", "8"))
        reference = load_reference(model)
        got = [decode.generate(prompt, NEW_TOKENS) for prompt in prompts()]
        assert got == [rounded_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts()]
        assert got != [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts()], (
            "rounding to fp8 changes no token of these prompts"
        )
        token_bytes = 3 * 2 * 2 * 32  # layers, keys and values, heads, dim
        assert decode.count("transfer_bytes") == sum(map(len, prompts())) * token_bytes
        plain = started.add("decode", model, "--prefill", prefill.endpoint, *FLAGS)
        plain.wait_ready()
        assert "float8_e4m3fn" in refusal(plain)
        prefill.check_clean()
        decode.check_clean()


def test_int4_weights_give_the_tokens_of_the_dequantised_model(tmp_path: Path) -> None:
    """Prefill with chunks on one rank, decode on two ranks."""
    model, plain = (make_checkpoint(tmp_path / name, "qwen2") for name in ("model", "plain"))
    save_file(pack_checkpoint(model, "awq", 32), plain / "model.safetensors", {"format": "pt"})
    reference = load_reference(plain)
    with cluster(tmp_path) as started:
        prefill, decode = started.pair(model, (*FLAGS, "--chunk-size", "48"), (*FLAGS, "--tp", "2"))
        got = [decode.generate(prompt, NEW_TOKENS) for prompt in prompts()]
        assert got == [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts()]
        prefill.check_clean()
        decode.check_clean()


def test_dummy_weights_are_the_same_on_both_servers(tmp_path: Path) -> None:
    files = make_checkpoint(tmp_path / "model", "qwen3")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((files / name).read_bytes())
    source = locate_model(str(files))
    slots = DecoderParameters.allocate(source.config, device=torch.device("cpu"), dtype=torch.float32).slots()
    fill_with_noise(slots)
    with cluster(tmp_path) as started:
        prefill, decode = started.pair(bare, (*DUMMY, "--chunk-size", "48"), DUMMY)
        got = [decode.generate(prompt, NEW_TOKENS) for prompt in prompts()]
        real = started.add("decode", files, "--prefill", prefill.endpoint, *FLAGS)
        real.wait_ready()
        assert "models differ" in refusal(real)
        prefill.check_clean()
        decode.check_clean()
    save_file(
        {name: slot.target.contiguous() for name, slot in slots.items()},
        files / "model.safetensors",
    )
    reference = load_reference(files)
    assert got == [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts()]
