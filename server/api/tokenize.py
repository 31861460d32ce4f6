"""`/tokenize` and `/detokenize`: what a prompt comes to before it is sent, by the tokenizer and template that serve."""

from ...configs.words import shown
from ..text.tokenizer import Tokenizer
from .common.fields import FieldError, Fields, check_token_ids, decode_object
from .common.limits import Limits
from .native.requests import check_text
from .openai.requests import MAX_MESSAGES, encode_chat, read_chat

LONG_TEXT_CHARACTERS = 1 << 20


def tokenize(body: bytes, limits: Limits, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of `prompt` as `/generate` and `/v1/completions` see it, or of `messages` as a chat.

    Also of text that is too long for a prompt, so that clients can cut it, up to a megabyte.
    """
    fields = Fields(decode_object(body))
    messages = fields.array("messages", MAX_MESSAGES)
    prompt = fields.raw("prompt")
    if (prompt is None) == (messages is None):
        given = "both were" if prompt is not None else "neither was"
        raise FieldError("prompt", f"or messages: give exactly one of them; {given} given")
    if messages is not None:
        text = read_chat(fields, messages, tokenizer)
        _check_size(text, "messages", limits, tokenizer)
        return encode_chat(text, tokenizer)
    if not isinstance(prompt, str):
        raise FieldError("prompt", f"must be a string, got {shown(prompt)}")
    _check_size(prompt, "prompt", limits, tokenizer)
    return tuple(tokenizer.encode(prompt, add_special_tokens=fields.boolean("add_special_tokens", True)))


def _check_size(text: str, name: str, limits: Limits, tokenizer: Tokenizer) -> None:
    if len(text) > LONG_TEXT_CHARACTERS:
        check_text(text, name, limits, tokenizer)


def detokenize(body: bytes, vocab_size: int, tokenizer: Tokenizer) -> str:
    """The text of `tokens`."""
    fields = Fields(decode_object(body))
    tokens = check_token_ids(fields.raw("tokens"), "tokens", vocab_size)
    return tokenizer.decode(tokens, skip_special_tokens=fields.boolean("skip_special_tokens", True))
