"""/tokenize and /detokenize: the ids that the generation routes send to the leader, and back."""

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
        ({"prompt": "x" * 20_000}, "x" * 20_000),  # longer than a prompt may be, and parsed in a thread
    ],
)
async def test_tokenize_returns_the_ids_that_generation_uses(
    decode: RunningServer, body: dict[str, object], text: str
) -> None:
    reply = (await decode.http.post("/tokenize", json=body)).json()
    tokens = list(text.encode())
    assert reply == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_TOTAL_TOKENS}


async def test_detokenize_returns_text(decode: RunningServer) -> None:
    tokens = [*"h\u00e9".encode(), EOS]
    assert (await decode.http.post("/detokenize", json={"tokens": tokens})).json() == {"text": "h\u00e9"}
    shown = await decode.http.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})
    assert shown.json() == {"text": "h\u00e9<eos>"}


async def test_detokenize_in_pieces_keeps_characters_whole(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.server.api.tokenize.DECODED_AT_ONCE", 2)
    text = "a\u00e9\u20ac\U0001f980" * 3
    tokens = [*text.encode(), 0xE2, 0x82]
    assert (await decode.http.post("/detokenize", json={"tokens": tokens})).json() == {"text": text + "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/tokenize", {"messages": [], "continue_final_message": True}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 999]}, "tokens[1]"),
    ],
)
async def test_wrong_field_is_refused(decode: RunningServer, path: str, body: dict[str, object], field: str) -> None:
    response = await decode.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
