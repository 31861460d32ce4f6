"""Replies of `/v1/completions` and `/v1/chat/completions` in OpenAI's shape: whole, or as stream chunks.

Choices are ordered by prompt, then by sample. Log-probabilities cover every token that `usage` counts, including the
stop token. In a stream they are sent with the next chunk that has text: the text of their tokens may be held back.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from ....common.sampling import PackedLogprobs, TokenLogprob
from ....scheduler.messages.frontend import Finished
from ...engine.leader_client import rids_of
from ...text.prompt_echo import Echo
from ...text.tokenizer import Tokenizer
from ..common.calls import Call
from ..common.errors import failure_object
from ..common.outputs import Delta, Output
from ..common.parsed_output import Block, BlockBegin, BlockEvent, BlockText
from ..common.rendering import Rendering
from .models import ChatBody, CompletionBody, OpenAiBody, StreamOptions

AT_ONCE = 16
"""Most log-probabilities, with their alternatives, that are encoded at once."""


class OpenAiRendering(Rendering):
    """What the two routes share: the envelope, usage, errors."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, call: Call[OpenAiBody], model_name: str, tokenizer: Tokenizer) -> None:
        first = call.group or call.submits[0].rid
        self._envelope = {"id": f"{self.id_prefix}-{first}", "created": int(time.time()), "model": model_name}
        self._call, self._fields = call, call.fields
        self._options = call.fields.stream_options or StreamOptions()
        self._tokenizer = tokenizer
        self._prompt_of = {rid: submit.prompt_ids for submit in call.submits for rid in rids_of(submit)}
        self._sent_tokens: dict[int, int] = {}

    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:
        if output.failed is not None:
            return [{"error": failure_object(output.failed), "index": index}]
        first = self._sent_tokens.get(index, 0)
        choices = self._chunk_choices(index, output, delta, first)
        if self._has_text(delta) or output.ended:
            self._sent_tokens[index] = len(output.token_ids)
        return [self._chunk(choice, output) for choice in choices]

    def _has_text(self, delta: Delta) -> bool:
        """Whether the delta has text to send. The log-probabilities of all tokens not sent yet then go with it."""
        return bool(delta.text)

    def closing_events(self, outputs: Sequence[Output]) -> Sequence[object]:
        if not self._options.include_usage:
            return ()
        return [self._envelope | {"object": self.chunk_object, "choices": [], "usage": _usage(outputs)}]

    def result(self, outputs: Sequence[Output]) -> dict[str, object]:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return self._envelope | {"object": self.whole_object, "choices": choices, "usage": _usage(outputs)}

    def _chunk(self, choice: dict[str, object], output: Output) -> dict[str, object]:
        chunk: dict[str, object] = {**self._envelope, "object": self.chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = _usage([output])
        elif self._options.include_usage:
            chunk["usage"] = None  # as in OpenAI's API: null in every chunk but the last
        return chunk

    @abstractmethod
    def _chunk_choices(self, index: int, output: Output, delta: Delta, first: int) -> Sequence[dict[str, object]]:
        """The choices for a delta; tokens from `first` on have not been sent yet."""

    @abstractmethod
    def _whole_choice(self, index: int, output: Output) -> dict[str, object]:
        """The choice of a response that is not streamed."""

    def _ending(self, output: Output, finish_reason: str | None) -> dict[str, object]:
        """The fields of a choice that say how it ended. vLLM's `stop_reason` is null for the model's own end token."""
        matched = output.matched_stop
        wanted = isinstance(matched, str) or matched in self._call.submits[0].sampling.stop_token_ids
        return {"finish_reason": finish_reason, "matched_stop": matched, "stop_reason": matched if wanted else None}

    def _token_ids(self, output: Output, first: int) -> dict[str, object]:
        return {"token_ids": output.token_ids[first:]} if self._fields.return_token_ids else {}

    def _prompt_fields(self, output: Output) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self._fields.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_of[output.rid]
        if (top := self._fields.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = _written(output.input_logprobs, lambda entry: self._prompt_logprob(entry, top))
        return fields

    def _prompt_logprob(self, entry: TokenLogprob, top: int) -> dict[str, object] | None:
        """vLLM's shape: the given token and the most likely ones by id; None for the first token."""
        if entry.logprob is None:
            return None
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        logprobs = {entry.token: entry.logprob, **dict(entry.top[:top])}
        return {
            str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": self._token(token)}
            for token, logprob in logprobs.items()
        }

    def _token(self, token_id: int) -> str:
        """The text of a token. A part of a character is written as in OpenAI's API: `bytes:\\xf0\\x9f`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionRendering(OpenAiRendering):
    """With `echo`, the text and the log-probabilities begin with those of the prompt."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, call: Call[CompletionBody], model_name: str, tokenizer: Tokenizer) -> None:
        super().__init__(call, model_name, tokenizer)
        echoes = call.echoes or [Echo("", ())] * len(call.submits)
        self._echo_of = {
            rid: echo for submit, echo in zip(call.submits, echoes, strict=True) for rid in rids_of(submit)
        }

    def _chunk_choices(self, index: int, output: Output, delta: Delta, first: int) -> Sequence[dict[str, object]]:
        return [self._choice(index, output, delta.text, first)] if delta.text or output.ended else ()

    def _whole_choice(self, index: int, output: Output) -> dict[str, object]:
        return self._choice(index, output, output.text, 0)

    def _choice(self, index: int, output: Output, text: str, first: int) -> dict[str, object]:
        begin = self._echo_of[output.rid].text if first == 0 else ""
        choice: dict[str, object] = {"index": index, "text": begin + text, "logprobs": self._logprobs(output, first)}
        choice |= self._ending(output, _finish_reason(output)) if output.ended else {"finish_reason": None}
        if first == 0:
            choice |= self._prompt_fields(output)
        choice |= self._token_ids(output, first)
        return choice

    def _logprobs(self, output: Output, first: int) -> dict[str, object] | None:
        top = self._fields.output_alternatives
        if top is None:
            return None
        echo, entries = self._echo_of[output.rid], output.logprobs[first:]
        offsets = [len(echo.text) + offset for offset in output.text_offsets[first:]]
        if first == 0 and self._call.echoes:
            entries, offsets = [*output.input_logprobs, *entries], [*echo.offsets, *offsets]
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": _written(entries, lambda entry: self._top(entry, top)) if top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, count: int) -> dict[str, float] | None:
        """Log-probabilities of the most likely tokens and the chosen one, by text; None for a prompt's first token."""
        if entry.logprob is None:
            return None
        top = {self._token(token): logprob for token, logprob in entry.top[:count]}
        top.setdefault(self._token(entry.token), entry.logprob)
        return top


class ChatRendering(OpenAiRendering):
    """Content, reasoning and calls are those of `Output.parsed`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, call: Call[ChatBody], model_name: str, tokenizer: Tokenizer) -> None:
        super().__init__(call, model_name, tokenizer)
        self._include_reasoning = call.fields.include_reasoning is not False
        self._started: set[int] = set()

    def _has_text(self, delta: Delta) -> bool:
        return any(self._is_sent(event) for event in delta.blocks)

    def _is_sent(self, event: BlockEvent) -> bool:
        kind = event.block.kind
        if isinstance(event, BlockText):
            return kind != "reasoning" or self._include_reasoning
        return isinstance(event, BlockBegin) and kind == "call"

    def _chunk_choices(self, index: int, output: Output, delta: Delta, first: int) -> Sequence[dict[str, object]]:
        choices = []
        if index not in self._started:
            self._started.add(index)
            choices.append(_delta_choice(index, {"role": "assistant", "content": ""}))
        deltas = [_delta(event) for event in delta.blocks if self._is_sent(event)]
        logprobs = self._logprobs(output, first)
        token_ids = self._token_ids(output, first)
        if output.ended and not deltas and (logprobs is not None or token_ids) and output.token_ids[first:]:
            deltas = [{"content": ""}]
        for made in deltas:
            choices.append(_delta_choice(index, made, logprobs) | token_ids)
            logprobs, token_ids = None, {}
        if output.ended:
            choices.append(_delta_choice(index, {}) | self._ending(output, _chat_finish_reason(output)))
        return choices

    def _chunk(self, choice: dict[str, object], output: Output) -> dict[str, object]:
        chunk = super()._chunk(choice, output)
        delta = choice["delta"]
        assert isinstance(delta, dict)
        return chunk | (self._prompt_fields(output) if "role" in delta else {})

    def result(self, outputs: Sequence[Output]) -> dict[str, object]:
        return super().result(outputs) | self._prompt_fields(outputs[0])

    def _whole_choice(self, index: int, output: Output) -> dict[str, object]:
        parsed = output.message
        message: dict[str, object] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
        if parsed.reasoning and self._include_reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_called(call, call.text) for call in parsed.calls]
        logprobs = self._logprobs(output, 0)
        ending = self._ending(output, _chat_finish_reason(output))
        return {"index": index, "message": message, "logprobs": logprobs, **ending, **self._token_ids(output, 0)}

    def _logprobs(self, output: Output, first: int) -> dict[str, object] | None:
        top = self._fields.output_alternatives
        if top is None:
            return None

        def write(entry: TokenLogprob) -> dict[str, object]:
            alternatives = [self._entry(token, logprob) for token, logprob in entry.top[:top]]
            return self._entry(entry.token, entry.logprob) | {"top_logprobs": alternatives}

        return {"content": _written(output.logprobs[first:], write), "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, object]:
        return {"token": self._token(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}


def _written(entries: Sequence[TokenLogprob] | PackedLogprobs, write: Callable[[TokenLogprob], object]) -> list[object]:
    """Log-probabilities with their alternatives. Those of a long output are encoded one by one: to encode them at once
    would hold the interpreter's lock for long.
    """
    if len(entries) <= AT_ONCE:
        return [write(entry) for entry in entries]
    return [msgspec.Raw(msgspec.json.encode(write(entry))) for entry in entries]


def _delta(event: BlockEvent) -> dict[str, object]:
    block = event.block
    if isinstance(event, BlockBegin):
        return {"tool_calls": [{"index": block.call_index, **_called(block, "")}]}
    assert isinstance(event, BlockText)
    if block.kind == "call":
        return {"tool_calls": [{"index": block.call_index, "function": {"arguments": event.text}}]}
    return {"content" if block.kind == "text" else "reasoning_content": event.text}


def _called(call: Block, arguments: str) -> dict[str, object]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _delta_choice(index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _finish_reason(output: Output) -> str | None:
    if not output.ended:
        return None
    if isinstance(output.terminal, Finished) and not output.complete:
        return output.terminal.reason.type
    return "stop" if output.aborted is None else "abort"


def _chat_finish_reason(output: Output) -> str | None:
    reason = _finish_reason(output)
    return "tool_calls" if reason == "stop" and output.message.calls else reason


def _usage(outputs: Sequence[Output]) -> dict[str, object]:
    """Token counts of a call. The tokens of a prompt count once, because its samples share it."""
    firsts = [output for output in outputs if output.sample == 0] or outputs[:1]
    prompt_tokens = sum(output.prompt_tokens for output in firsts)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    usage: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
    }
    chats = [output.parsed for output in outputs if output.parsed is not None]
    if chats:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(chat.reasoning_tokens for chat in chats)}
    return usage
