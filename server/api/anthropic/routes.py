"""The routes of Anthropic's dialect."""

from starlette.requests import Request
from starlette.responses import Response

from ..common.operation import Operation
from ..service.service import Service
from .errors import PATH
from .models import CountTokensBody, CountTokensReply, MessageErrorReply, MessageEvent, MessageReply, MessagesBody
from .replies import MessagesRendering
from .requests import count_tokens, parse_message


def anthropic_routes(service: Service) -> list[Operation]:
    async def messages(request: Request) -> Response:
        """Anthropic's API of a chat."""
        call = await service.parse(
            request, lambda body: parse_message(body, service.limits(), service.tokenizer, service.chat)
        )
        return await service.respond(request, call, MessagesRendering(call, service.model_name))

    async def count(request: Request) -> Response:
        """The number of tokens of a prompt for `/v1/messages`."""
        return await service.convert(
            request, lambda body: count_tokens(body, service.limits(), service.tokenizer, service.chat)
        )

    return [
        Operation("POST", PATH, messages, MessagesBody, MessageReply, MessageEvent, MessageErrorReply),
        Operation("POST", f"{PATH}/count_tokens", count, CountTokensBody, CountTokensReply, error=MessageErrorReply),
    ]
