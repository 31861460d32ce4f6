"""Request bodies of arbitrary JSON: parsing one works or raises ClientError, never another exception."""

import contextlib
import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.common.errors import ClientError
from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.schema import DecodeConfig
from pdserve.server.api.common.fields import Body
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.generate.models import GenerateBody, NativeSampling
from pdserve.server.api.generate.requests import parse_generate
from pdserve.server.api.openai.models import CompletionBody
from pdserve.server.api.openai.requests import parse_completion
from pdserve.server.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.server.scripted_leader import make_ready

LIMITS = Limits.of(DecodeConfig(), make_ready(), NEUTRAL_SAMPLING)
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 255, 2**31, 2**63, 2**64, 10**400, -0.0, 0.5, 1e308, "", "a", "\ud800", "\0", "1"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def bodies(model: type[Body], base: dict[str, object]) -> st.SearchStrategy[dict[str, object]]:
    """A valid body in which some fields of the model are replaced and unknown fields are added."""
    names = sorted(model.model_fields)
    sampling = st.dictionaries(st.sampled_from(sorted(NativeSampling.model_fields)), VALUES, max_size=3)
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES | sampling, max_size=4)
    return fields.map(lambda changed: base | changed)


Parse = Callable[[bytes, Limits, Tokenizer], object]
CASES: dict[str, tuple[Parse, st.SearchStrategy[dict[str, object]]]] = {
    "generate": (parse_generate, bodies(GenerateBody, {"text": "hi"})),
    "completions": (parse_completion, bodies(CompletionBody, {"prompt": "hi", "model": "m"})),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(150, 50), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_body_is_parsed_or_refused(case: str, tokenizer: Tokenizer, data: st.DataObject) -> None:
    parse, strategy = CASES[case]
    body = json.dumps(data.draw(strategy)).encode()
    with contextlib.suppress(ClientError):
        parse(body, LIMITS, tokenizer)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(50, 25), suppress_health_check=[HealthCheck.too_slow])
@given(body=st.binary(max_size=60))
def test_random_bytes_are_refused(case: str, tokenizer: Tokenizer, body: bytes) -> None:
    parse, _ = CASES[case]
    with pytest.raises(ClientError):
        parse(body, LIMITS, tokenizer)
