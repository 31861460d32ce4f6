"""The text of the prompt that `/v1/completions` with `echo` returns before the output."""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the position in it where each token begins."""

    text: str
    offsets: tuple[int, ...]


def make_echo(given: object, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """Returns the client's own text for a prompt that was given as text, and the decoded text, with all special tokens,
    for one that was given as token ids.
    """
    stream = TextStream(tokenizer, skip_special_tokens=False)
    pieces, offsets, length = [], [], 0
    for token in prompt_ids:
        offsets.append(length)
        pieces.append(stream.push([token]))
        length += len(pieces[-1])
    decoded = "".join(pieces) + stream.finish()
    if not isinstance(given, str):
        return Echo(decoded, tuple(offsets))
    added = max(0, len(decoded) - len(given))  # the text of a BOS token that the tokenizer has prepended
    return Echo(given, tuple(max(0, offset - added) for offset in offsets))
