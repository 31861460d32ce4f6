"""The HTTP application of one server: its routes and their authentication. Errors: server/api/error_responses.py.

A decode server generates; a prefill server has the same routes, but its generation routes only check a body that a
router sends to both sides (`bootstrap_room`). With an API key every route needs `Authorization: Bearer KEY` except
`/health` and `/metrics`, which probes and scrapers call and which show neither prompts nor configuration.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import ASGIApp

from ...configs.errors import UnauthorizedError
from ...configs.sampling import SamplingParams
from ...configs.schema import AnyServerConfig
from ...configs.words import shown
from ...scheduler.messages.frontend import Failed, Submit
from ..engine.leader_client import LeaderClient
from ..observability.metrics import Metrics
from ..observability.request_ids import KeepsRequestIds, client_request_id
from ..observability.request_log import leg_line
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from .common.fields import Body, Boolean, Characters, FieldError, Text, parse_body
from .common.limits import Limits
from .common.outputs import Output
from .common.routing import MAX_PRIORITY, MAX_RID_CHARACTERS, check_rooms, new_rid
from .error_responses import ErrorAnswers
from .generation import GenerationResponse, Rendering, prefill_leg, read_body
from .info import ServerInfo, package_version
from .lanes import Lanes
from .native.replies import GenerateRendering
from .native.requests import GenerateCall, parse_generate
from .openai.replies import ChatRendering, CompletionRendering, EchoRendering
from .openai.requests import OpenAiCall, parse_chat, parse_completion
from .tokenize import detokenize, tokenize

log = logging.getLogger("pdserve.front")

HEALTH_GENERATE_TIMEOUT_S = 20.0

ParsedT = TypeVar("ParsedT")


class ModelNotFoundError(FieldError):
    status = 404
    code = "model_not_found"


class AbortBody(Body):
    rid: Annotated[Text, Characters(MAX_RID_CHARACTERS)] | None = Field(
        None, description="A request, or a list of prompts that was given this one id."
    )
    abort_all: Boolean | None = Field(None, description="Abort every open request instead.")


def create_app(
    config: AnyServerConfig,
    tokenizer: Tokenizer,
    leader: LeaderClient,
    metrics: Metrics,
    default_sampling: SamplingParams,
) -> ASGIApp:
    """The ASGI application. It owns nothing: the caller runs `leader` and closes it."""
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = Routes(config, tokenizer, leader, metrics, default_sampling)
    app.include_router(routes.public())
    app.include_router(routes.protected())
    ErrorAnswers(metrics, log_requests=config.log_requests).install(app)
    return KeepsRequestIds(app)


class Routes:
    """The handlers of one server."""

    def __init__(
        self,
        config: AnyServerConfig,
        tokenizer: Tokenizer,
        leader: LeaderClient,
        metrics: Metrics,
        default_sampling: SamplingParams,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._leader = leader
        self._metrics = metrics
        self._default_sampling = default_sampling
        self._info = ServerInfo(config, leader)
        self._lanes = Lanes()

    def public(self) -> APIRouter:
        router = APIRouter(default_response_class=Response)
        _get(router, "/health", self.health)
        _get(router, "/metrics", self.metrics)
        return router

    def protected(self) -> APIRouter:
        router = APIRouter(dependencies=[Depends(self.check_api_key)])
        for path in ("/model_info", "/get_model_info"):
            _get(router, path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            _get(router, path, self.server_info)
        _get(router, "/get_load", self.load)
        _get(router, "/version", self.version)
        _get(router, "/v1/models", self.models)
        _get(router, "/v1/models/{model:path}", self.model_card)
        _get(router, "/health_generate", self.health_generate)
        _post(router, "/abort_request", self.abort_request)
        _post(router, "/flush_cache", self.flush_cache)
        _post(router, "/tokenize", self.tokenize)
        _post(router, "/detokenize", self.detokenize)
        _post(router, "/generate", self.generate)
        _post(router, "/v1/completions", self.completions)
        _post(router, "/v1/chat/completions", self.chat_completions)
        return router

    async def check_api_key(self, request: Request) -> None:
        if self._config.api_key is None:
            return
        expected = self._config.api_key.get_secret_value().encode()
        # as latin-1, which headers are, some bytes of a key are white space to str.strip()
        scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(b" \t"), expected):
            raise UnauthorizedError("this server needs an API key: send it as 'Authorization: Bearer KEY'")

    async def health(self) -> Response:
        healthy, report = self._info.health()
        return json_response(report, status=200 if healthy else 503, retry=not healthy)

    async def health_generate(self) -> Response:
        """One real token through prefill, transfer and decode. On prefill, which cannot start a request, `/health`."""
        healthy, report = self._info.health()
        if not healthy or self._config.role == "prefill":
            return json_response(report | {"generated": False}, status=200 if healthy else 503, retry=not healthy)
        ready = self._leader.ready
        assert ready is not None, "a healthy server is ready"
        probe = Submit(
            rid=f"health-{new_rid()}",
            prompt_ids=(min(ready.model.eos_token_ids, default=0),),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            timeout_s=HEALTH_GENERATE_TIMEOUT_S,
            priority=MAX_PRIORITY,  # it asks whether the way is open, not how long the queue is
        )
        problem = await self._probe(probe)
        healthy, report = self._info.health()  # again: the probe may have waited for a peer
        if problem is None and healthy:
            return json_response(report | {"generated": True})
        reasons = self._leader.problems() if problem is None else [problem]
        failed = report | {"status": "unavailable", "reasons": reasons, "generated": problem is None}
        return json_response(failed, status=503, retry=True)

    async def _probe(self, probe: Submit) -> str | None:
        """What went wrong with a health request; None when it produced its token in time."""
        with self._leader.open([probe]) as inbox:
            try:
                async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S):
                    while True:
                        for progress in await inbox.receive():
                            if isinstance(progress.terminal, Failed):
                                return f"generation failed: {progress.terminal.message}"
                            if progress.terminal is not None:
                                return None
            except TimeoutError:
                return f"no token within {HEALTH_GENERATE_TIMEOUT_S:.0f} s"

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def model_info(self) -> Response:
        self._leader.check_available()
        assert self._leader.ready is not None
        return json_response(self._info.model(self._leader.ready))

    async def server_info(self) -> Response:
        return json_response(self._info.server())

    async def models(self) -> Response:
        self._leader.check_available()
        assert self._leader.ready is not None
        return json_response(self._info.models(self._leader.ready))

    async def model_card(self, model: str) -> Response:
        self._leader.check_available()
        assert self._leader.ready is not None
        if model != self._info.model_name:
            raise ModelNotFoundError(
                "model", f"{shown(model)} is not served here; this server has {shown(self._info.model_name)}"
            )
        return json_response(self._info.model_card(self._leader.ready))

    async def load(self) -> Response:
        """What routers that balance by load ask for."""
        self._leader.check_available()
        assert self._leader.ready is not None
        return json_response(self._info.load(self._leader.ready))

    async def version(self) -> Response:
        """Only when `/v1/models` answers as well: routers take one that has this route alone for vLLM."""
        self._leader.check_available()
        return json_response({"version": package_version()})

    async def tokenize(self, request: Request) -> Response:
        return json_response(
            await self._parse(request, lambda body: tokenize(body, self._limits(), self._tokenizer), is_prompt=False)
        )

    async def detokenize(self, request: Request) -> Response:
        return json_response(
            await self._parse(
                request, lambda body: detokenize(body, self._limits().vocab_size, self._tokenizer), is_prompt=False
            )
        )

    async def abort_request(self, request: Request) -> Response:
        """`{"rid": ...}` or `{"abort_all": true}`; answers with the ids that were still open."""
        fields = parse_body(AbortBody, await read_body(request, self._config.max_body_bytes))
        if fields.abort_all:
            aborted = self._leader.cancel_everything()
        elif fields.rid is None:
            raise FieldError("rid", "is required, unless abort_all is true")
        else:
            aborted = self._leader.cancel_matching(fields.rid)
        return json_response({"aborted": aborted})

    async def flush_cache(self) -> Response:
        """Forget cached prefixes; requests that use one keep it."""
        self._leader.flush_cache()
        return Response("The prefix cache is being flushed.\n", media_type="text/plain")

    async def generate(self, request: Request) -> Response:
        call = await self._parse(request, lambda body: parse_generate(body, self._limits(), self._tokenizer))
        token_text = self._tokenizer.token_text if call.text_in_logprobs else None
        return self._respond(request, call, GenerateRendering(call.listed, token_text))

    async def completions(self, request: Request) -> Response:
        call = await self._parse(request, lambda body: parse_completion(body, self._limits(), self._tokenizer))
        rendering = EchoRendering if call.echoes else CompletionRendering
        return self._respond(request, call, rendering(call, self._info.model_name, self._tokenizer))

    async def chat_completions(self, request: Request) -> Response:
        call = await self._parse(request, lambda body: parse_chat(body, self._limits(), self._tokenizer))
        return self._respond(request, call, ChatRendering(call, self._info.model_name, self._tokenizer))

    async def _parse(self, request: Request, parse: Callable[[bytes], ParsedT], *, is_prompt: bool = True) -> ParsedT:
        self._leader.check_healthy()
        body = await read_body(request, self._config.max_body_bytes)
        return await self._lanes.run(request, body, parse, is_prompt=is_prompt)

    def _limits(self) -> Limits:
        ready = self._leader.ready
        assert ready is not None, "routes check that the leader is ready before they parse"
        return Limits.of(self._config, ready, self._default_sampling)

    def _respond(self, request: Request, call: GenerateCall | OpenAiCall, rendering: Rendering) -> Response:
        outputs = [
            Output(rid, len(prompt.prompt_ids), OutputText(self._tokenizer, prompt.text_rules), prompt.logprobs, sample)
            for prompt in call.prompts
            for sample, rid in enumerate(prompt.route.rids)
        ]
        if self._config.role == "prefill":
            check_rooms(prompt.route for prompt in call.prompts)
            if self._config.log_requests:
                request_id = client_request_id(request.scope)
                for prompt in call.prompts:
                    log.info("%s", leg_line(prompt.route.rid, len(prompt.prompt_ids), prompt.route.room, request_id))
            return prefill_leg(outputs, rendering, stream=call.stream)
        client = request.client.host if request.client is not None else ""
        messages = [prompt.submit(client) for prompt in call.prompts]
        return GenerationResponse(self._leader, messages, outputs, rendering, stream=call.stream, group=call.group)


def json_response(value: object, status: int = 200, retry: bool = False) -> Response:
    headers = {"Retry-After": "1"} if retry else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _get(router: APIRouter, path: str, handler: Callable[..., object]) -> None:
    """HEAD too, which load balancers use to look without reading."""
    router.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None)


def _post(router: APIRouter, path: str, handler: Callable[..., object]) -> None:
    router.add_api_route(path, handler, methods=["POST"], response_model=None)
