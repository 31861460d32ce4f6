"""The HTTP application of one server: its routes and their authentication. Errors: server/api/error_responses.py.

A decode server generates. A prefill server has the same routes, but its generation routes only check the body, which a
router sends to both servers (`bootstrap_room`). With an API key, every route needs `Authorization: Bearer KEY` or
`X-Api-Key: KEY`, except `/`, `/page/...`, `/health`, `/ping`, `/metrics`, `/docs` and `/openapi.json`, which show
neither prompts nor configuration.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated

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
from ...scheduler.messages.frontend import Failed, Submit
from ..observability.metrics import Metrics, content_type_of
from ..observability.recent_requests import PROBE_PREFIX
from ..observability.request_ids import KeepsRequestIds
from ..observability.versions import package_version
from .anthropic.routes import anthropic_routes
from .common.fields import Body, Boolean, Characters, FieldError, Text, optional, parse_body
from .common.operation import Handler, Operation
from .common.routing import MAX_PRIORITY, MAX_RID_CHARACTERS, new_rid
from .documentation import add_documentation
from .error_responses import add_error_handlers
from .generate.routes import generate_routes
from .info import Health, Load, ModelCard, ModelInfo, ModelList, ServerInfo, ServerReport, Version
from .live_page import add_page
from .openai.routes import openai_routes
from .responses.routes import responses_routes
from .role import RoleBody, RoleControl, RoleReport, check_may_switch, wants_to_wait
from .service.service import Service, json_response
from .tokenize import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply, detokenize, tokenize

HEALTH_GENERATE_TIMEOUT_S = 20.0


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
    """Returns the ASGI application. It owns no resources: the caller closes the service and the leader's client."""
    config = routes.service.config
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.router.routes += routes.routes()
    add_documentation(app, [*routes.protected, *routes.public])
    add_page(app)
    add_error_handlers(app, routes.metrics, log_requests=config.log_requests)
    served: ASGIApp = app
    if config.cors_origin:
        served = CORSMiddleware(
            app,
            allow_origins=config.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients send headers of their own with the API key
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return KeepsRequestIds(served)


class Routes:
    """The routes of one server, with the handlers of those that do not generate."""

    def __init__(
        self, service: Service, metrics: Metrics, roles: RoleControl, lag_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.service = service
        self.metrics = metrics
        self._roles = roles
        self._info = ServerInfo(service, lag_s)
        self._rendering: dict[str, asyncio.Task[bytes]] = {}
        """Metrics that will be rendered in the next turn of the event loop, by content type."""

    def routes(self) -> list[Route]:
        """Routes of Starlette, which answer HEAD too where they answer GET: load balancers send it. The routes of
        FastAPI take 0.13 ms longer per request, for signatures that these handlers do not have.
        """
        handlers = [(operation, self._with_key(operation.handler)) for operation in self.protected]
        handlers += [(operation, operation.handler) for operation in self.public]
        return [Route(operation.path, handler, methods=[operation.method]) for operation, handler in handlers]

    @cached_property
    def public(self) -> Sequence[Operation]:
        return (
            # /ping: SageMaker's health check
            *(Operation("GET", path, self.health, reply=Health) for path in ("/health", "/ping")),
            Operation("GET", "/metrics", self.render_metrics),
        )

    @cached_property
    def protected(self) -> Sequence[Operation]:
        service = self.service
        return (
            # first what is called most: routes are tried in turn
            *generate_routes(service),
            *openai_routes(service),
            *responses_routes(service),
            *anthropic_routes(service),
            *(Operation("GET", path, self.model_info, reply=ModelInfo) for path in ("/model_info", "/get_model_info")),
            *(
                Operation("GET", path, self.server_info, reply=ServerReport)
                for path in ("/server_info", "/get_server_info")
            ),
            Operation("GET", "/get_load", self.load, reply=list[Load]),
            Operation("GET", "/version", self.version, reply=Version),
            Operation("GET", "/v1/models", self.models, reply=ModelList),
            Operation("GET", "/v1/models/{model:path}", self.model_card, reply=ModelCard),
            Operation("GET", "/health_generate", self.health_generate, reply=Health),
            Operation("POST", "/abort_request", self.abort_request, AbortBody, AbortReply),
            Operation("POST", "/flush_cache", self.flush_cache),
            Operation("GET", "/role", self.role, reply=RoleReport),
            Operation("POST", "/role", self.switch_role, RoleBody, RoleReport, accepts=True),
            Operation("POST", "/tokenize", self.tokenize, TokenizeBody, TokenizeReply),
            Operation("POST", "/detokenize", self.detokenize, DetokenizeBody, DetokenizeReply),
        )

    def _with_key(self, handler: Handler) -> Handler:
        async def with_key(request: Request) -> Response:
            self.check_api_key(request)
            return await handler(request)

        return with_key

    def check_api_key(self, request: Request) -> None:
        if self.service.config.api_key is None:
            return
        expected = self.service.config.api_key.get_secret_value().encode()
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
        if report["status"] == "ok" and self.service.config.role == "decode":
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
            prompt_ids=(min(self.service.leader.check_available().model.eos_token_ids, default=0),),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            timeout_s=HEALTH_GENERATE_TIMEOUT_S,
            priority=MAX_PRIORITY,  # the probe tests the path, not the length of the queue
        )
        with self.service.leader.open([probe]) as inbox:
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
        self.service.leader.check_available()
        return json_response({"version": package_version()})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or a chat."""
        service = self.service
        return await service.convert(
            request, lambda body: tokenize(body, service.limits(), service.tokenizer, service.chat)
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        service = self.service
        return await service.convert(
            request, lambda body: detokenize(body, service.limits().vocab_size, service.tokenizer)
        )

    async def abort_request(self, request: Request) -> Response:
        """Abort a request, or all of them."""
        fields = await self.service.read(request, partial(parse_body, AbortBody), is_prompt=False)
        if fields.rid is None and not fields.abort_all:
            raise FieldError("rid", "is required, unless abort_all is true")
        return json_response({"aborted": self.service.leader.abort(None if fields.abort_all else fields.rid)})

    async def flush_cache(self, _request: Request) -> Response:
        """Drop all cached prefixes."""
        self.service.leader.flush_cache()
        return Response("The prefix cache is being flushed.\n", media_type="text/plain")

    async def role(self, _request: Request) -> Response:
        """The role of this server, and its last role switch."""
        return json_response(self._roles.report())

    async def switch_role(self, request: Request) -> Response:
        """Drain this server and give it the other role, in the same process and on the same port."""
        check_may_switch(request, self.service.config)
        body = await self.service.read(request, partial(parse_body, RoleBody), is_prompt=False)
        waits = wants_to_wait(request, body)
        switch = await self._roles.request(body.role, body.settings or {}, drain=body.drain is True)
        if switch is not None and not waits:
            return json_response(self._roles.report(), 202)
        if switch is not None:
            await switch.wait()
        return json_response(self._roles.report())


def health_response(report: Health) -> Response:
    return json_response(report) if report["status"] == "ok" else json_response(report, 503, {"Retry-After": "1"})
