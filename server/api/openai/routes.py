"""The routes of OpenAI's dialect: completions and chats."""

from starlette.requests import Request
from starlette.responses import Response

from ..common.operation import Operation
from ..service.service import Service
from .chat_requests import parse_chat
from .models import ChatBody, ChatChunk, ChatCompletion, Completion, CompletionBody, StreamError
from .replies import ChatRendering, CompletionRendering
from .requests import parse_completion


def openai_routes(service: Service) -> list[Operation]:
    async def completions(request: Request) -> Response:
        """Generate text for one prompt or a list of prompts, in OpenAI's shape."""
        call = await service.parse(request, lambda body: parse_completion(body, service.limits(), service.tokenizer))
        return await service.respond(request, call, CompletionRendering(call, service.model_name, service.tokenizer))

    async def chat_completions(request: Request) -> Response:
        """Continue a chat, rendered with the model's own template."""
        call = await service.parse(
            request, lambda body: parse_chat(body, service.limits(), service.tokenizer, service.chat)
        )
        return await service.respond(request, call, ChatRendering(call, service.model_name, service.tokenizer))

    completion_event, chat_event = Completion | StreamError, ChatChunk | StreamError

    return [
        Operation("POST", "/v1/completions", completions, CompletionBody, Completion, completion_event),
        Operation("POST", "/v1/chat/completions", chat_completions, ChatBody, ChatCompletion, chat_event),
    ]
