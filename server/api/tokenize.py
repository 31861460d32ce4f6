"""`/tokenize` and `/detokenize`: convert a prompt to token ids without generating, and token ids to text."""

from typing import Annotated

from annotated_types import MaxLen
from typing_extensions import TypedDict

from ..text.chat_format import ChatFormat
from ..text.tokenizer import TextStream, Tokenizer
from .common.calls import LONG_TEXT_CHARACTERS, check_text
from .common.fields import Body, Boolean, FieldError, Text, TokenIds, check_token_ids, optional, parse_body
from .common.limits import Limits
from .openai.chat_requests import encode_chat, render_chat
from .openai.models import Messages, TemplateFields

MOST_DETOKENIZED = 1 << 18
"""Most token ids of one call of /detokenize."""
DECODED_AT_ONCE = 1 << 14
"""Token ids. Decoding them holds the interpreter's lock for about 8 ms."""


class TokenizeBody(TemplateFields):
    """Either `prompt`, as `/generate` and `/v1/completions` take it, or `messages`, as a chat."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Boolean | None = optional("For `prompt`. Default true.")


class TokenizeReply(TypedDict):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class DetokenizeBody(Body):
    has_token_ids = True

    tokens: Annotated[TokenIds, MaxLen(MOST_DETOKENIZED)]
    skip_special_tokens: Boolean | None = optional("Default true.")


class DetokenizeReply(TypedDict):
    text: str


def tokenize(body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> TokenizeReply:
    """Tokenizes a prompt or a chat. A text that is too long for a prompt is accepted up to a million characters, so
    that clients can cut it.
    """
    fields = parse_body(TokenizeBody, body)
    if (fields.prompt is None) == (fields.messages is None):
        given = "both were" if fields.prompt is not None else "neither was"
        raise FieldError("prompt", f"or messages: give exactly one of them; {given} given")
    if fields.messages is not None:
        text = render_chat(fields, fields.messages, tokenizer, chat).text
        check_text(text, "messages", limits, tokenizer, allowed=LONG_TEXT_CHARACTERS)
        tokens = encode_chat(text, tokenizer)
    else:
        assert fields.prompt is not None
        check_text(fields.prompt, "prompt", limits, tokenizer, allowed=LONG_TEXT_CHARACTERS)
        special = fields.add_special_tokens is not False
        tokens = tuple(tokenizer.encode(fields.prompt, add_special_tokens=special))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": limits.max_total_tokens}


def detokenize(body: bytes, vocab_size: int, tokenizer: Tokenizer) -> DetokenizeReply:
    fields = parse_body(DetokenizeBody, body, vocab_size)
    tokens = check_token_ids(fields.tokens, "tokens", vocab_size)
    stream = TextStream(tokenizer, skip_special_tokens=fields.skip_special_tokens is not False)
    pieces = [stream.push(tokens[at : at + DECODED_AT_ONCE]) for at in range(0, len(tokens), DECODED_AT_ONCE)]
    return {"text": "".join([*pieces, stream.finish()])}
