"""Arguments of a call that are nested too deeply for a JSON decoder: models sometimes repeat a bracket without end."""

import pytest

from pdserve.server.api.anthropic.replies import _arguments


@pytest.mark.parametrize(
    "text", ['{"a":' + "[" * 5000, '{"a":' + "[" * 5000 + "]" * 5000 + "}"], ids=["cut off", "whole"]
)
def test_arguments_that_are_nested_too_deeply_are_empty(text: str) -> None:
    assert _arguments(text) == {}


def test_arguments_are_an_object() -> None:
    assert _arguments('{"a": [1]}') == {"a": [1]}
    assert _arguments('{"a": [1') == {}
