"""The HTTP application of one server: its routes and their authentication. Errors: server/api/error_responses.py.

A decode server generates. A prefill server has the same routes, but its generation routes only check the body, which a
router sends to both servers (`bootstrap_room`). With an API key, every route needs `Authorization: Bearer KEY` or
`X-Api-Key: KEY`, except `/`, `/page/...`, `/health`, `/ping`, `/metrics`, `/docs` and `/openapi.json`, which show
neither prompts nor configuration.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...common.errors import UnauthorizedError
from ...common.sampling import SamplingParams
from ...common.words import shown
from ...configs.schema import AnyServerConfig
from ...scheduler.messages.frontend import Failed, Submit
from ..engine.grammar_checker import GrammarChecker
from ..engine.leader_client import LeaderClient, rids_of
from ..observability.loop_work import LoopWork
from ..observability.metrics import Metrics, content_type_of
from ..observability.recent_requests import PROBE_PREFIX
from ..observability.request_ids import KeepsRequestIds, client_request_id
from ..observability.request_log import leg_line
from ..observability.versions import package_version
from ..text.chat_format import ChatFormat
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from .anthropic.models import (
    CountTokensBody,
    CountTokensReply,
    MessageErrorReply,
    MessageEvent,
    MessageReply,
    MessagesBody,
)
from .anthropic.replies import MessagesRendering
from .anthropic.requests import count_tokens, parse_message
from .arriving_bodies import ArrivingBodies
from .common.fields import Body, Boolean, Characters, FieldError, Text, optional, parse_body
from .common.limits import Limits
from .common.outputs import Output
from .common.rendering import Rendering
from .common.routing import MAX_PRIORITY, MAX_RID_CHARACTERS, RoutingFields, check_rooms, new_rid
from .documentation import Handler, Operation, add_documentation
from .error_responses import add_error_handlers
from .generation import GenerationResponse, prefill_leg, run_until_disconnect
from .info import Health, Load, ModelCard, ModelInfo, ModelList, ServerInfo, ServerReport, Version
from .lanes import Lanes
from .live_page import add_page
from .native.models import GenerateBody, GenerateReply, GenerateResult
from .native.replies import GenerateRendering
from .native.requests import Call, parse_generate
from .openai.chat_requests import parse_chat
from .openai.models import ChatBody, ChatChunk, ChatCompletion, Completion, CompletionBody, StreamError
from .openai.replies import ChatRendering, CompletionRendering
from .openai.requests import parse_completion
from .request_body import read_body
from .responses.models import ResponseEvent, ResponseObject, ResponsesBody
from .responses.replies import ResponsesRendering
from .responses.requests import parse_response
from .role import RoleBody, RoleControl, RoleReport, check_addressed_role, check_may_switch, wants_to_wait
from .tokenize import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply, detokenize, tokenize

log = logging.getLogger("pdserve.frontend")

HEALTH_GENERATE_TIMEOUT_S = 20.0

ParsedT = TypeVar("ParsedT")


class ModelNotFoundError(FieldError):
    status = 404
    code = "model_not_found"


class AbortBody(Body):
    rid: Annotated[Text, Characters(MAX_RID_CHARACTERS)] | None = optional(
        "Id of a request, or the one id of a list of prompts."
    )
    abort_all: Boolean | None = optional("Abort every open request instead.")


class AbortReply(TypedDict):
    aborted: Annotated[list[str], Field(description="Ids of the requests that were open and are aborted.")]


def create_app(routes: "Routes") -> ASGIApp:
    """Returns the ASGI application. It owns no resources: the caller closes `routes` and the leader's client."""
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.router.routes += [*routes.protected(), *routes.public()]
    add_documentation(app, routes.operations)
    add_page(app)
    add_error_handlers(app, routes.metrics, log_requests=routes.config.log_requests)
    served: ASGIApp = app
    if routes.config.cors_origin:
        served = CORSMiddleware(
            app,
            allow_origins=routes.config.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients send headers of their own with the API key
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return KeepsRequestIds(served)


class Routes:
    """The handlers of one server."""

    def __init__(
        self,
        config: AnyServerConfig,
        tokenizer: Tokenizer,
        leader: LeaderClient,
        metrics: Metrics,
        default_sampling: SamplingParams,
        roles: RoleControl,
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.metrics = metrics
        self._lag_s = lag_s
        self.operations: list[Operation] = []
        self._tokenizer = tokenizer
        self._chat = ChatFormat.of(tokenizer, config.tool_parser, config.reasoning_parser)
        self._roles = roles
        self._arriving = ArrivingBodies(config.max_arriving_bytes)
        self._lanes = Lanes(config.max_parsing_bytes)
        self._grammars = GrammarChecker(config.model, config.load_format)
        self._rendering: dict[str, asyncio.Task[bytes]] = {}
        """Metrics that will be rendered in the next turn of the event loop, by content type."""
        self.serve(config, leader, default_sampling)

    def serve(self, config: AnyServerConfig, leader: LeaderClient, default_sampling: SamplingParams) -> None:
        """Pass all later requests to this leader. A role switch must not change settings that both roles have."""
        self.config = config
        self._leader = leader
        self._default_sampling = default_sampling
        self._info = ServerInfo(config, leader, self._lag_s)

    def close(self) -> None:
        """End the grammar compiler. Requests that wait for it fail with 503."""
        self._grammars.close()

    def public(self) -> list[Route]:
        return [
            # /ping: SageMaker's health check
            *(self._route("GET", path, self.health, reply=Health, public=True) for path in ("/health", "/ping")),
            self._route("GET", "/metrics", self.render_metrics, public=True),
        ]

    def protected(self) -> list[Route]:
        completion_event, chat_event = Completion | StreamError, ChatChunk | StreamError
        route = self._route
        return [
            # first what is called most: routes are tried in turn
            route("POST", "/generate", self.generate, GenerateBody, GenerateReply, GenerateResult),
            route("POST", "/v1/completions", self.completions, CompletionBody, Completion, completion_event),
            route("POST", "/v1/chat/completions", self.chat_completions, ChatBody, ChatCompletion, chat_event),
            route("POST", "/v1/responses", self.responses, ResponsesBody, ResponseObject, ResponseEvent),
            route("POST", "/v1/messages", self.messages, MessagesBody, MessageReply, MessageEvent, MessageErrorReply),
            route(
                *("POST", "/v1/messages/count_tokens", self.count_tokens, CountTokensBody, CountTokensReply),
                error=MessageErrorReply,
            ),
            *(route("GET", path, self.model_info, reply=ModelInfo) for path in ("/model_info", "/get_model_info")),
            *(
                route("GET", path, self.server_info, reply=ServerReport)
                for path in ("/server_info", "/get_server_info")
            ),
            route("GET", "/get_load", self.load, reply=list[Load]),
            route("GET", "/version", self.version, reply=Version),
            route("GET", "/v1/models", self.models, reply=ModelList),
            route("GET", "/v1/models/{model:path}", self.model_card, reply=ModelCard),
            route("GET", "/health_generate", self.health_generate, reply=Health),
            route("POST", "/abort_request", self.abort_request, AbortBody, AbortReply),
            route("POST", "/flush_cache", self.flush_cache),
            route("GET", "/role", self.role, reply=RoleReport),
            route("POST", "/role", self.switch_role, RoleBody, RoleReport, accepts=True),
            route("POST", "/tokenize", self.tokenize, TokenizeBody, TokenizeReply),
            route("POST", "/detokenize", self.detokenize, DetokenizeBody, DetokenizeReply),
        ]

    def _route(
        self, method: str, path: str, handler: Handler, *models: Any, public: bool = False, **named: Any
    ) -> Route:
        """A route of Starlette, which answers HEAD too where it answers GET: load balancers send it. The routes of
        FastAPI take 0.13 ms longer per request, for signatures that these handlers do not have.
        """
        self.operations.append(Operation(method, path, handler, *models, **named))

        async def with_key(request: Request) -> Response:
            self.check_api_key(request)
            return await handler(request)

        return Route(path, handler if public else with_key, methods=[method])

    def check_api_key(self, request: Request) -> None:
        if self.config.api_key is None:
            return
        expected = self.config.api_key.get_secret_value().encode()
        # compare bytes: headers are decoded as latin-1, and str.strip() would remove some bytes of a key as white space
        scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            given = request.headers.get("x-api-key", "").encode("latin-1")  # Anthropic's clients
        given = given.strip(b" \t")
        if not given:
            raise UnauthorizedError("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        if not hmac.compare_digest(given, expected):
            raise UnauthorizedError("wrong API key: it is not the api_key of this server")

    async def health(self, _request: Request) -> Response:
        """Whether this server is healthy: 200, or 503 with `reasons`."""
        return health_response(self._info.health())

    async def health_generate(self, _request: Request) -> Response:
        """Generate one token, as a health check. The prompt goes through a prefill server if local_prefill is never. On
        a prefill server the same as `/health`.
        """
        report = self._info.health()
        report["generated"] = False
        if report["status"] == "ok" and self.config.role == "decode":
            problem = await self._generate_one_token()
            report = self._info.health()  # again: the probe may have waited for a peer
            report["generated"] = problem is None
            if problem is not None:
                report["status"], report["reasons"] = "unavailable", [problem]
        return health_response(report)

    async def _generate_one_token(self) -> str | None:
        """Sends a probe to the leader. Returns None, or the reason why no token was generated in time."""
        probe = Submit(
            rid=f"{PROBE_PREFIX}{new_rid()}",
            prompt_ids=(min(self._leader.check_available().model.eos_token_ids, default=0),),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            timeout_s=HEALTH_GENERATE_TIMEOUT_S,
            priority=MAX_PRIORITY,  # the probe tests the path, not the length of the queue
        )
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

    async def render_metrics(self, request: Request) -> Response:
        """Metrics for Prometheus. Requests of one turn of the event loop share them: to render them takes milliseconds,
        and hundreds of clients may request them at once.
        """
        accept = request.headers.get("accept", "")
        content_type = content_type_of(accept)
        rendering = self._rendering.get(content_type)
        if rendering is None:
            rendering = self._rendering[content_type] = asyncio.create_task(self._render(accept, content_type))
        return Response(await asyncio.shield(rendering), headers={"Content-Type": content_type})

    async def _render(self, accept: str, content_type: str) -> bytes:
        await asyncio.sleep(0)
        del self._rendering[content_type]
        return self.metrics.render(accept)

    async def model_info(self, _request: Request) -> Response:
        """The served model."""
        return json_response(self._info.model())

    async def server_info(self, _request: Request) -> Response:
        """Configuration without secrets, KV pool, peers and open requests."""
        return json_response(self._info.server())

    async def models(self, _request: Request) -> Response:
        """OpenAI's list of models: the served one."""
        return json_response({"object": "list", "data": [self._info.model_card()]})

    async def model_card(self, request: Request) -> Response:
        """The served model, or 404 for any other name."""
        model = request.path_params["model"]
        card = self._info.model_card()
        if model != card["id"]:
            raise ModelNotFoundError("model", f"{shown(model)} is not served here; this server has {shown(card['id'])}")
        return json_response(card)

    async def load(self, _request: Request) -> Response:
        """Requests and KV tokens, for routers that balance by load."""
        return json_response(self._info.load())

    async def version(self, _request: Request) -> Response:
        """The version of pdserve."""
        # 503 while the server starts, as /v1/models: routers take a server that answers only /version for vLLM
        self._leader.check_available()
        return json_response({"version": package_version()})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or a chat."""
        return await self._convert(request, lambda body: tokenize(body, self._limits(), self._tokenizer, self._chat))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self._convert(request, lambda body: detokenize(body, self._limits().vocab_size, self._tokenizer))

    async def abort_request(self, request: Request) -> Response:
        """Abort a request, or all of them."""
        fields = await self._read(request, partial(parse_body, AbortBody), is_prompt=False)
        if fields.rid is None and not fields.abort_all:
            raise FieldError("rid", "is required, unless abort_all is true")
        return json_response({"aborted": self._leader.abort(None if fields.abort_all else fields.rid)})

    async def flush_cache(self, _request: Request) -> Response:
        """Drop all cached prefixes."""
        self._leader.flush_cache()
        return Response("The prefix cache is being flushed.\n", media_type="text/plain")

    async def role(self, _request: Request) -> Response:
        """The role of this server, and its last role switch."""
        return json_response(self._roles.report())

    async def switch_role(self, request: Request) -> Response:
        """Drain this server and give it the other role, in the same process and on the same port."""
        check_may_switch(request, self.config)
        body = await self._read(request, partial(parse_body, RoleBody), is_prompt=False)
        waits = wants_to_wait(request, body)
        switch = await self._roles.request(body.role, body.settings or {}, drain=body.drain is True)
        if switch is not None and not waits:
            return json_response(self._roles.report(), 202)
        if switch is not None:
            await switch.wait()
        return json_response(self._roles.report())

    async def generate(self, request: Request) -> Response:
        """Generate text for one prompt or a list of prompts."""
        call = await self._parse(request, lambda body: parse_generate(body, self._limits(), self._tokenizer))
        token_text = self._tokenizer.token_text if call.fields.return_text_in_logprobs else None
        return await self._respond(request, call, GenerateRendering(call.listed, token_text))

    async def completions(self, request: Request) -> Response:
        """Generate text for one prompt or a list of prompts, in OpenAI's shape."""
        call = await self._parse(request, lambda body: parse_completion(body, self._limits(), self._tokenizer))
        return await self._respond(request, call, CompletionRendering(call, self._info.model_name, self._tokenizer))

    async def chat_completions(self, request: Request) -> Response:
        """Continue a chat, rendered with the model's own template."""
        call = await self._parse(request, lambda body: parse_chat(body, self._limits(), self._tokenizer, self._chat))
        return await self._respond(request, call, ChatRendering(call, self._info.model_name, self._tokenizer))

    async def responses(self, request: Request) -> Response:
        """OpenAI's newer API of a chat: the output is a list of items. Responses are not stored."""
        call, fields = await self._parse(
            request, lambda body: parse_response(body, self._limits(), self._tokenizer, self._chat)
        )
        return await self._respond(request, call, ResponsesRendering(call, fields, self._info.model_name))

    async def messages(self, request: Request) -> Response:
        """Anthropic's API of a chat."""
        call = await self._parse(request, lambda body: parse_message(body, self._limits(), self._tokenizer, self._chat))
        return await self._respond(request, call, MessagesRendering(call, self._info.model_name))

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a prompt for `/v1/messages`."""
        return await self._convert(
            request, lambda body: count_tokens(body, self._limits(), self._tokenizer, self._chat)
        )

    async def _convert(self, request: Request, convert: Callable[[bytes], object]) -> Response:
        return json_response(await self._parse(request, convert, is_prompt=False))

    async def _parse(self, request: Request, parse: Callable[[bytes], ParsedT], *, is_prompt: bool = True) -> ParsedT:
        self._leader.check_healthy()
        return await self._read(request, parse, is_prompt=is_prompt)

    async def _read(self, request: Request, parse: Callable[[bytes], ParsedT], *, is_prompt: bool) -> ParsedT:
        body = await read_body(request, self.config.max_body_bytes, self._arriving)
        LoopWork.begin(request.scope, len(body))
        return await self._lanes.run(request, body, parse, is_prompt=is_prompt)

    def _limits(self) -> Limits:
        ready = self._leader.check_available()  # checked again: the role may have changed while the body arrived
        return Limits.of(self.config, ready, self._default_sampling)

    async def _respond(self, request: Request, call: Call[RoutingFields], rendering: Rendering) -> Response:
        check_addressed_role(request, call.submits, self.config, self._roles.former())
        client = request.client.host if request.client is not None else ""
        if self.config.role == "decode":  # prefill ignores grammars: the decode server with the same body checks them
            for name, grammar in call.grammars:
                checking = asyncio.ensure_future(self._grammars.check(grammar, client))
                if (problem := await run_until_disconnect(checking, request.receive)) is not None:
                    raise FieldError(name, problem)
        outputs = begin_outputs(call, self._tokenizer)
        if self.config.role == "prefill":
            check_rooms(call.submits)
            if self.config.log_requests:
                request_id = client_request_id(request.scope)
                for submit in call.submits:
                    log.info("%s", leg_line(submit.rid, len(submit.prompt_ids), submit.room, request_id))
            return prefill_leg(outputs, rendering, stream=call.stream)
        messages = [msgspec.structs.replace(submit, client=client) for submit in call.submits]
        return GenerationResponse(self._leader, messages, outputs, rendering, stream=call.stream, group=call.group)


def begin_outputs(call: Call[RoutingFields], tokenizer: Tokenizer) -> list[Output]:
    """The outputs of all samples of all prompts."""
    return [
        Output(
            rid,
            len(submit.prompt_ids),
            OutputText(tokenizer, rules),
            submit.logprobs,
            sample,
            None if call.new_parsed is None else call.new_parsed(),
        )
        for submit, rules in zip(call.submits, call.text_rules, strict=True)
        for sample, rid in enumerate(rids_of(submit))
    ]


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def health_response(report: Health) -> Response:
    return json_response(report) if report["status"] == "ok" else json_response(report, 503, {"Retry-After": "1"})
