"""The output of one request so far: token ids, text that can be sent, log-probabilities and its end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....common.errors import AbortedError
from ....common.sampling import LogprobParams, PackedLogprobs, TokenLogprob
from ....scheduler.messages.frontend import Failed, Finished, Prefilled
from ...engine.inbox import Progress
from ...text.output_text import OutputText
from ...text.parsers.events import Event, merged
from .parsed_output import BlockEvent, ParsedOutput


@dataclass(slots=True)
class Delta:
    """The new part of an output: its text, its tokens from index `first_token` on and, for a chat, the events of its
    blocks.
    """

    text: str
    first_token: int
    blocks: Sequence[BlockEvent] = ()


class Output:
    """The output of one request. It only grows.

    Token ids include the stop token that ended the request; the text does not. A stop string makes the output
    `complete` before the leader has ended the request: later tokens are ignored, and only the terminal message is
    awaited.
    """

    def __init__(
        self,
        rid: str,
        prompt_tokens: int,
        text: OutputText,
        logprobs: LogprobParams | None = None,
        sample: int = 0,
        parsed: ParsedOutput | None = None,
    ) -> None:
        self.rid = rid
        self.sample = sample
        self.wanted_logprobs = logprobs
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text_offsets: list[int] = []
        """With log-probabilities: the position in the text where each token begins."""
        self.unwritten = 0
        """How much work it is to write what no event has yet: tokens, those with log-probabilities times _weight."""
        self.input_logprobs = PackedLogprobs()
        self.cached_tokens = 0
        self.cached_tokens_details = {"device": 0, "host": 0, "storage": 0}
        """Where the KV of the cached tokens was."""
        self.terminal: Finished | Failed | None = None
        self.complete = False
        """Whether a stop string has ended the text."""
        self.parsed = parsed
        """The message of a chat; None for other outputs."""
        self._prompt_tokens = prompt_tokens
        self._weight = 1 if logprobs is None else 10 * (1 + logprobs.top)
        self._text = text
        self._pieces: list[str] = []
        self._started_at = time.monotonic()
        self._ended_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def message(self) -> ParsedOutput:
        """The message of a chat: reasoning, text and tool calls."""
        assert self.parsed is not None, "an output of a chat has a parser"
        return self.parsed

    @property
    def stop_string(self) -> str | None:
        """The stop string, or the pattern of the stop regular expression, that completed the output."""
        return self._text.stop_string

    @property
    def ended(self) -> bool:
        return self.terminal is not None

    @property
    def failed(self) -> Failed | None:
        """The failure that ended the output; None if it was complete before, and for an abort."""
        return self.terminal if isinstance(self.terminal, Failed) and not self.complete and not self.aborted else None

    @property
    def aborted(self) -> str | None:
        """Why the output was aborted, if it was. As in SGLang, the response is then the output so far, not an error."""
        terminal = self.terminal
        if isinstance(terminal, Failed) and terminal.code == AbortedError.code and not self.complete:
            return terminal.message
        return None

    @property
    def matched_stop(self) -> str | int | None:
        """What ended the output: a stop string, the pattern of a stop regular expression, or a token id."""
        if self.ended and not self.complete and isinstance(self.terminal, Finished):
            return self.terminal.reason.matched
        return self.stop_string

    @property
    def prompt_tokens(self) -> int:
        return self.terminal.prompt_tokens if isinstance(self.terminal, Finished) else self._prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def timeline(self) -> dict[str, float]:
        return self.terminal.timeline if isinstance(self.terminal, Finished) else {}

    @property
    def kv_path(self) -> str:
        """How the KV of its prompt got to the decode server; empty if unknown."""
        return self.terminal.kv_path if isinstance(self.terminal, Finished) else ""

    @property
    def elapsed_s(self) -> float:
        return (self._ended_at or time.monotonic()) - self._started_at

    def advance(self, progress: Progress) -> Delta:
        """Add new events; returns the new part of the output. No event may follow a terminal one."""
        assert self.terminal is None, f"request {self.rid} has an event after its terminal event"
        first_token = len(self.token_ids)
        self.unwritten += self._weight * len(progress.token_ids)
        if progress.prefilled is not None:
            self.input_logprobs = PackedLogprobs(progress.prefilled.input_logprobs)
            self.unwritten += self._weight * len(self.input_logprobs)
            self._note_cached(progress.prefilled)
        events: list[Event] = []
        text = self._take_tokens(progress, events)
        if progress.terminal is not None:
            rest = self._text.finish()
            self.complete = self._text.stop_string is not None
            text += rest
            if self.parsed is not None:
                events += self.parsed.push(rest) + self.parsed.finish()
            self.terminal = progress.terminal
            if isinstance(self.terminal, Finished):
                self._note_cached(self.terminal)
            self._ended_at = time.monotonic()
        if text:
            self._pieces.append(text)
        return Delta(text, first_token, () if self.parsed is None else self.parsed.collect(merged(events)))

    def _note_cached(self, message: Prefilled | Finished) -> None:
        total, host, storage = message.cached_tokens, message.host_tokens, message.stored_tokens
        self.cached_tokens = total
        self.cached_tokens_details = {"device": total - host - storage, "host": host, "storage": storage}

    def _take_tokens(self, progress: Progress, events: list[Event]) -> str:
        with_logprobs = self.wanted_logprobs is not None
        assert not with_logprobs or len(progress.logprobs) == len(progress.token_ids), "a token without its logprob"
        visible = ""
        for index, token in enumerate(progress.token_ids):
            if self.complete:
                break
            self.token_ids.append(token)
            if with_logprobs:
                self.logprobs.append(progress.logprobs[index])
                self.text_offsets.append(self._text.decoded_characters)
            piece = self._text.push(token)
            self.complete = self._text.stop_string is not None
            visible += piece
            if self.parsed is not None:
                events += self.parsed.push(piece, tokens=1)
        return visible
