"""/tokenize and /detokenize: the ids that the generating routes would send to the leader, and back."""

import pytest

from tests.server.http_harness import RunningServer
from tests.server.scripted_leader import EOS, MAX_TOTAL_TOKENS

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"model": "bytes", "prompt": "h\u00e9"}, "h\u00e9"),
        ({"prompt": ""}, ""),
        ({"messages": HELLO}, "user: Hello\nassistant: "),
        ({"messages": HELLO, "add_generation_prompt": False}, "user: Hello\n"),
        ({"prompt": "x" * 20_000}, "x" * 20_000),  # longer than may be generated from, and parsed in a thread
    ],
)
async def test_tokenize(decode: RunningServer, body: dict[str, object], text: str) -> None:
    answer = (await decode.http.post("/tokenize", json=body)).json()
    tokens = list(text.encode())
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_TOTAL_TOKENS}


async def test_detokenize(decode: RunningServer) -> None:
    tokens = [*"h\u00e9".encode(), EOS]
    assert (await decode.http.post("/detokenize", json={"tokens": tokens})).json() == {"text": "h\u00e9"}
    shown = await decode.http.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})
    assert shown.json() == {"text": "h\u00e9<eos>"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 999]}, "tokens[1]"),
    ],
)
async def test_refused(decode: RunningServer, path: str, body: dict[str, object], field: str) -> None:
    response = await decode.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
