"""The route of OpenAI's newer dialect of a chat."""

from starlette.requests import Request
from starlette.responses import Response

from ..common.operation import Operation
from ..service.service import Service
from .models import ResponseEvent, ResponseObject, ResponsesBody
from .replies import ResponsesRendering
from .requests import parse_response


def responses_routes(service: Service) -> list[Operation]:
    async def responses(request: Request) -> Response:
        """OpenAI's newer API of a chat: the output is a list of items. Responses are not stored."""
        call, fields = await service.parse(
            request, lambda body: parse_response(body, service.limits(), service.tokenizer, service.chat)
        )
        return await service.respond(request, call, ResponsesRendering(call, fields, service.model_name))

    return [
        Operation("POST", "/v1/responses", responses, ResponsesBody, ResponseObject, ResponseEvent),
    ]
