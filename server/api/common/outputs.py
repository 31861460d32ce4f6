"""The output of one request so far: token ids, text that can be sent, log-probabilities and its end."""

import time
from dataclasses import dataclass

from ....configs.sampling import LogprobParams, TokenLogprob
from ....scheduler.messages.frontend import Failed, Finished
from ...engine.leader_client import Progress
from ...text.output_text import OutputText


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of an output: text, and the tokens from `first_token` on."""

    text: str
    first_token: int


class Output:
    """The output of one request. It only grows.

    Token ids include the stop token that ended the request; the text does not. A stop string completes the output
    (`complete`): later tokens are ignored, and only the leader's terminal message is missing.
    """

    def __init__(
        self,
        rid: str,
        prompt_tokens: int,
        text: OutputText,
        logprobs: LogprobParams | None = None,
        sample: int = 0,
    ) -> None:
        self.rid = rid
        self.sample = sample
        self.wanted_logprobs = logprobs
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text_offsets: list[int] = []
        """With log-probabilities: the position in the text where each token begins."""
        self.input_logprobs: tuple[TokenLogprob, ...] = ()
        self.cached_tokens = 0
        self.terminal: Finished | Failed | None = None
        self._prompt_tokens = prompt_tokens
        self._text = text
        self._pieces: list[str] = []
        self._started_at = time.monotonic()
        self._ended_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that completed the output."""
        return self._text.stop_string

    @property
    def complete(self) -> bool:
        return self.stop_string is not None

    @property
    def ended(self) -> bool:
        return self.terminal is not None

    @property
    def failed(self) -> Failed | None:
        """The failure that ended it. A failure of an output that was complete does not count."""
        return self.terminal if isinstance(self.terminal, Failed) and not self.complete else None

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
        """Add new events. No event may follow a terminal one."""
        assert self.terminal is None, f"request {self.rid} has an event after its terminal event"
        first_token = len(self.token_ids)
        if progress.prefilled is not None:
            self.input_logprobs = progress.prefilled.input_logprobs
            self.cached_tokens = progress.prefilled.cached_tokens
        text = self._take_tokens(progress)
        if progress.terminal is not None:
            text += self._text.finish()
            self.terminal = progress.terminal
            if isinstance(self.terminal, Finished):
                self.cached_tokens = self.terminal.cached_tokens
            self._ended_at = time.monotonic()
        if text:
            self._pieces.append(text)
        return Delta(text, first_token)

    def _take_tokens(self, progress: Progress) -> str:
        with_logprobs = self.wanted_logprobs is not None
        assert not with_logprobs or len(progress.logprobs) == len(progress.token_ids), "a token without its logprob"
        visible = ""
        for index, token in enumerate(progress.token_ids):
            if self.stop_string is not None:
                break
            self.token_ids.append(token)
            if with_logprobs:
                self.logprobs.append(progress.logprobs[index])
                self.text_offsets.append(self._text.decoded_characters)
            visible += self._text.push(token)
        return visible
