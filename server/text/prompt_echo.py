"""`echo` of `/v1/completions`: the prompt as text, which the output follows."""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the position in it where each token begins."""

    text: str
    offsets: tuple[int, ...]


def make_echo(given: object, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """For a prompt given as text, that text; for one given as ids, their text with all special tokens."""
    stream = TextStream(tokenizer, skip_special_tokens=False)
    pieces, offsets, length = [], [], 0
    for token in prompt_ids:
        offsets.append(length)
        pieces.append(stream.push([token]))
        length += len(pieces[-1])
    decoded = "".join(pieces) + stream.finish()
    if not isinstance(given, str):
        return Echo(decoded, tuple(offsets))
    added = max(0, len(decoded) - len(given))  # a BOS token, which the tokenizer prepends
    return Echo(given, tuple(max(0, offset - added) for offset in offsets))
