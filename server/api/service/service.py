"""What the routes of all dialects use: reads and parses bodies, and answers calls."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....common.errors import UnavailableError
from ....common.sampling import SamplingParams
from ....configs.schema import AnyServerConfig
from ...engine.grammar_checker import GrammarChecker
from ...engine.leader_client import LeaderClient, rids_of
from ...observability.loop_work import LoopWork
from ...observability.request_ids import client_request_id
from ...observability.request_log import leg_line
from ...text.chat_format import ChatFormat
from ...text.output_text import OutputText
from ...text.tokenizer import Tokenizer
from ..common.calls import Call
from ..common.fields import FieldError
from ..common.limits import Limits
from ..common.outputs import Output
from ..common.rendering import Rendering
from ..common.routing import RoutingFields, check_addressed_role, check_rooms
from .arriving_bodies import ArrivingBodies
from .generation import GenerationResponse, prefill_leg, run_until_disconnect
from .lanes import Lanes
from .request_body import read_body

log = logging.getLogger("pdserve.frontend")

ParsedT = TypeVar("ParsedT")


class Service:
    """One server in its present role. `former` returns its configuration in the role that it had before."""

    def __init__(
        self,
        config: AnyServerConfig,
        tokenizer: Tokenizer,
        leader: LeaderClient,
        default_sampling: SamplingParams,
        former: Callable[[], AnyServerConfig | None],
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatFormat.of(tokenizer, config.tool_parser, config.reasoning_parser)
        self._former = former
        self._arriving = ArrivingBodies(config.max_arriving_bytes)
        self._lanes = Lanes(config.max_parsing_bytes)
        self._grammars = GrammarChecker(config.model, config.load_format)
        self.serve(config, leader, default_sampling)

    def serve(self, config: AnyServerConfig, leader: LeaderClient, default_sampling: SamplingParams) -> None:
        """Pass all later requests to this leader. A role switch must not change settings that both roles have."""
        self.config = config
        self.leader = leader
        self._default_sampling = default_sampling

    def start(self) -> None:
        """Start the grammar compiler. Call this while the leader loads the model."""
        if self.config.role == "decode":
            self._grammars.start()

    def close(self) -> None:
        """End the grammar compiler. Requests that wait for it fail with 503."""
        self._grammars.close()

    @property
    def model_name(self) -> str:
        """The name that clients see; before the model is loaded, the configured one."""
        ready = self.leader.ready
        return self.config.served_model_name or (ready.model.name if ready else self.config.model)

    def limits(self) -> Limits:
        ready = self.leader.check_available()  # checked again: the role may have changed while the body arrived
        return Limits.of(self.config, ready, self._default_sampling)

    async def read(self, request: Request, parse: Callable[[bytes], ParsedT], *, is_prompt: bool) -> ParsedT:
        body = await read_body(request, self.config.max_body_bytes, self._arriving)
        LoopWork.begin(request.scope, len(body))
        return await self._lanes.run(request, body, parse, is_prompt=is_prompt)

    async def parse(self, request: Request, parse: Callable[[bytes], ParsedT], *, is_prompt: bool = True) -> ParsedT:
        """As `read`, on a healthy server."""
        self.leader.check_healthy()
        return await self.read(request, parse, is_prompt=is_prompt)

    async def convert(self, request: Request, convert: Callable[[bytes], object]) -> Response:
        """The response of a route that does not generate."""
        return json_response(await self.parse(request, convert, is_prompt=False))

    async def respond(self, request: Request, call: Call[RoutingFields], rendering: Rendering) -> Response:
        check_addressed_role(request.url.hostname, call.submits, self.config, self._former())
        client = request.client.host if request.client is not None else ""
        role = self.config.role
        if role == "decode":  # prefill ignores grammars: the decode server with the same body checks them
            for name, grammar in call.grammars:
                checking = asyncio.ensure_future(self._grammars.check(grammar, client))
                if (problem := await run_until_disconnect(checking, request.receive)) is not None:
                    raise FieldError(name, problem)
            if self.config.role != role:
                raise UnavailableError("this server has switched from decode to prefill while it compiled the grammar")
        outputs = begin_outputs(call, self.tokenizer)
        if role == "prefill":
            check_rooms(call.submits)
            if self.config.log_requests:
                request_id = client_request_id(request.scope)
                for submit in call.submits:
                    log.info("%s", leg_line(submit.rid, len(submit.prompt_ids), submit.room, request_id))
            return prefill_leg(outputs, rendering, stream=call.stream)
        messages = [msgspec.structs.replace(submit, client=client) for submit in call.submits]
        return GenerationResponse(self.leader, messages, outputs, rendering, stream=call.stream, group=call.group)


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
