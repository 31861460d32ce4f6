"""Compares the tokens of a server with the greedy tokens of transformers."""

from typing import Any

import httpx
import numpy as np
import torch

from pdserve.common.sampling import Grammar
from pdserve.models.grammar.compiler import GrammarCompiler
from pdserve.models.loading.catalog import locate_model
from tests.checkpoints import reference_greedy, reference_logits
from tests.cluster.servers import Server, body
from tests.family_checkpoints import token_gaps

BF16_LOGIT_NOISE = 0.12
"""Two bf16 evaluations of one model differ by a few units in the last place of logits around 4 (ulp 0.03)."""


def generate_all(decode: Server, prompts: list[list[int]], new_tokens: int, *, together: bool) -> list[list[int]]:
    """Output ids of the prompts: one request each, or all in one request."""
    if not together:
        return [decode.generate(prompt, new_tokens) for prompt in prompts]
    response = httpx.post(f"{decode.url}/generate", json=body(prompts, new_tokens), timeout=120)
    return [result["output_ids"] for result in response.raise_for_status().json()]


def same_tokens(
    reference: Any, prompts: list[list[int]], outputs: list[list[int]], new_tokens: int, *, noise: float | None
) -> list[bool]:
    """For each output, whether it equals that of transformers. A difference fails the test, unless the logits of
    transformers for the two tokens differ by at most `noise`.
    """
    return [_is_same(reference, prompt, got, new_tokens, noise) for prompt, got in zip(prompts, outputs, strict=True)]


def share_of_same_choices(reference: Any, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """The share of output tokens that transformers also chooses, given the tokens before them. The share of equal
    outputs would depend on rounding: after a choice between two nearly equal logits, all later tokens may differ.
    """
    gaps = [
        gap for prompt, output in zip(prompts, outputs, strict=True) for gap in token_gaps(reference, prompt, output)
    ]
    return gaps.count(0.0) / len(gaps)


def _is_same(reference: Any, prompt: list[int], got: list[int], new_tokens: int, noise: float | None) -> bool:
    expected = reference_greedy(reference, prompt, new_tokens)
    if got == expected:
        return True
    assert noise is not None, f"tokens differ: {got} != {expected}"
    step = next(index for index in range(new_tokens) if got[index] != expected[index])
    logits = reference_logits(reference, prompt + expected[:step])[-1]
    gap = float(logits[expected[step]] - logits[got[step]])
    assert gap <= noise, f"token {step}: {got[step]} is {gap} below transformers' {expected[step]}"
    return False


def is_masked_greedy(
    reference: Any, model: str, prompt: list[int], grammar: Grammar, output: list[int], new_tokens: int
) -> bool:
    """Whether `output` has the greedy tokens of transformers whose logits are masked with llguidance directly, up to an
    end token or `new_tokens`. One pass of transformers.
    """
    source = locate_model(model)
    ends = [index for index, token in enumerate(output, 1) if token in source.config.eos_token_ids]
    if ends[:1] != [len(output)] and (ends or len(output) != new_tokens):
        return False
    matcher = GrammarCompiler.of(source).new_matcher(grammar)
    for logits, token in zip(reference_logits(reference, prompt + output[:-1])[len(prompt) - 1 :], output, strict=True):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: len(logits)].astype(bool))
        if int(logits.masked_fill(~allowed, -torch.inf).argmax()) != token:
            return False
        assert matcher.consume_token(token)
    return True
