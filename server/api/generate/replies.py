"""Replies of `/generate` in SGLang's native shape: whole, or as stream events."""

from collections.abc import Callable, Iterable, Sequence

from ....common.sampling import TokenLogprob
from ....scheduler.messages.frontend import Failed
from ...text.growing_json import GrowingArray, GrowingString
from ..common.errors import failure_object
from ..common.outputs import Delta, Output
from ..common.rendering import Rendering

TokenText = Callable[[int], str]
"""The text of a single token."""


class GenerateRendering(Rendering):
    """Text, ids and log-probabilities are cumulative. If the outputs are `listed`, events have an `index`.

    With `token_text`, entries of log-probabilities have the text of their token, otherwise null.
    """

    def __init__(self, listed: bool, token_text: TokenText | None = None) -> None:
        self._listed = listed
        self._token_text = token_text
        self._results: dict[int, CumulativeResult] = {}

    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:
        if index not in self._results:
            self._results[index] = CumulativeResult(self._token_text)
        result = self._results[index]
        if not result.add(output, delta) and not output.ended:
            return ()
        rendered = result.render(output)
        return [rendered | {"index": index} if self._listed else rendered]

    def result(self, outputs: Sequence[Output]) -> object:
        rendered = []
        for output in outputs:
            whole = CumulativeResult(self._token_text)
            whole.add(output, Delta(output.text, first_token=0))
            rendered.append(whole.render(output))
        return rendered if self._listed else rendered[0]


class CumulativeResult:
    """One output in SGLang's shape. Each part is encoded only once."""

    def __init__(self, token_text: TokenText | None) -> None:
        self._text = GrowingString()
        self._token_ids = GrowingArray()
        self._logprobs = LogprobColumns(token_text)
        self._input_logprobs = LogprobColumns(token_text)
        self._has_inputs = False

    def add(self, output: Output, delta: Delta) -> bool:
        """Add the new part of the output. Returns False if there is no new text and no new token."""
        self._text.append(delta.text)
        for token in output.token_ids[delta.first_token :]:
            self._token_ids.append(token)
        self._logprobs.extend(output.logprobs[delta.first_token :])
        if output.wanted_logprobs is not None and not self._has_inputs:
            self._has_inputs = bool(output.input_logprobs)
            self._input_logprobs.extend(output.input_logprobs)
        return bool(delta.text) or delta.first_token < len(output.token_ids)

    def render(self, output: Output) -> dict[str, object]:
        meta = _meta_info(output)
        if output.wanted_logprobs is not None:
            meta["input_token_logprobs"] = self._input_logprobs.chosen.encoded()
            meta["output_token_logprobs"] = self._logprobs.chosen.encoded()
            if output.wanted_logprobs.top:
                meta["input_top_logprobs"] = self._input_logprobs.top.encoded()
                meta["output_top_logprobs"] = self._logprobs.top.encoded()
        rendered: dict[str, object] = {
            "text": self._text.encoded(),
            "output_ids": self._token_ids.encoded(),
            "meta_info": meta,
        }
        if output.failed is not None:
            rendered["error"] = failure_object(output.failed)
        return rendered


class LogprobColumns:
    """`[logprob, token id, text]` of each token, and of its most likely alternatives.

    The first token of a prompt has no log-probability and no alternatives: both are null.
    """

    def __init__(self, token_text: TokenText | None) -> None:
        self._token_text = token_text
        self.chosen = GrowingArray()
        self.top = GrowingArray()

    def extend(self, tokens: Iterable[TokenLogprob]) -> None:
        for token in tokens:
            self.chosen.append(self._entry(token.token, token.logprob))
            top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
            self.top.append(None if token.logprob is None else top)

    def _entry(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, None if self._token_text is None else self._token_text(token_id)


def _meta_info(output: Output) -> dict[str, object]:
    meta: dict[str, object] = {
        "id": output.rid,
        "finish_reason": _finish_reason(output),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "cached_tokens_details": output.cached_tokens_details,
    }
    if output.ended:
        meta["e2e_latency"] = output.elapsed_s
        meta["timeline"] = output.timeline
        if output.kv_path:
            meta["kv_path"] = output.kv_path
    return meta


def _finish_reason(output: Output) -> dict[str, object] | None:
    terminal = output.terminal
    if terminal is None:
        return None
    if output.stop_string is not None:
        return {"type": "stop", "matched": output.stop_string}
    if output.aborted is not None:
        return {"type": "abort", "message": output.aborted}
    if isinstance(terminal, Failed):
        failure = {"message": terminal.message, "status_code": terminal.status, "err_type": terminal.code}
        return {"type": "abort", **failure}
    reason = terminal.reason
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    return {"type": "length", "length": reason.length if reason.length is not None else output.completion_tokens}
