"""Outputs begin on the event loop: stop expressions were compiled before, where the body was parsed."""

import json

from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.schema import DecodeConfig
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.generate.requests import parse_generate
from pdserve.server.api.service.service import begin_outputs
from pdserve.server.text.regex_automata import compile_stop_regex
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.scripted_leader import make_ready


def test_outputs_compile_no_stop_expression(tokenizer: Tokenizer) -> None:
    params = [{"stop_regex": [chr(0x4E00 + 8 * at + each) for each in range(8)]} for at in range(16)]
    body = json.dumps({"text": ["a"] * len(params), "sampling_params": params}).encode()
    call = parse_generate(body, Limits.of(DecodeConfig(), make_ready(), NEUTRAL_SAMPLING), tokenizer)
    compile_stop_regex.cache_clear()  # as other calls do that use other expressions
    assert len(begin_outputs(call, tokenizer)) == 16
    assert compile_stop_regex.cache_info().misses == 0
