"""The route of SGLang's dialect."""

from starlette.requests import Request
from starlette.responses import Response

from ..common.operation import Operation
from ..service.service import Service
from .models import GenerateBody, GenerateReply, GenerateResult
from .replies import GenerateRendering
from .requests import parse_generate


def generate_routes(service: Service) -> list[Operation]:
    async def generate(request: Request) -> Response:
        """Generate text for one prompt or a list of prompts."""
        call = await service.parse(request, lambda body: parse_generate(body, service.limits(), service.tokenizer))
        token_text = service.tokenizer.token_text if call.fields.return_text_in_logprobs else None
        return await service.respond(request, call, GenerateRendering(call.listed, token_text))

    return [
        Operation("POST", "/generate", generate, GenerateBody, GenerateReply, GenerateResult),
    ]
