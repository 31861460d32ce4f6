"""CORS: web pages of the configured origins may call the server, others may not."""

import pytest
from pydantic import SecretStr, ValidationError

from pdserve.configs.schema import DecodeConfig
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server

PAGE = "https://app.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-own"}


async def test_configured_origin_may_call(tokenizer: Tokenizer) -> None:
    config = DecodeConfig(cors_origin=(PAGE, "http://localhost:3000"), api_key=SecretStr("key"))
    async with running_server(tokenizer, config) as server:
        for origin in config.cors_origin:
            asked = await server.http.options("/generate", headers={"Origin": origin, **PREFLIGHT})
            assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origin)
            assert "x-own" in asked.headers["access-control-allow-headers"]
        for path, status in (("/health", 200), ("/v1/models", 401), ("/nowhere", 404)):
            answer = await server.http.get(path, headers={"Origin": PAGE, "X-Request-Id": "r"})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


async def test_other_origins_may_not_call(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(cors_origin=(PAGE,))) as server:
        other = {"Origin": "https://example.org"}
        asked = await server.http.options("/generate", headers={**other, **PREFLIGHT})
        assert asked.status_code == 400
        for answer in (asked, await server.http.get("/health", headers=other)):
            assert "access-control-allow-origin" not in answer.headers


async def test_cors_is_off_by_default(decode: RunningServer) -> None:
    answer = await decode.http.get("/health", headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await decode.http.options("/generate", headers={"Origin": PAGE, **PREFLIGHT})).status_code == 405


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "https://", "", "HTTPS://a"])
def test_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="must be \\* or an origin"):
        DecodeConfig(cors_origin=(origin,))
