"""Converts the tokens of one output to text as they arrive: whole characters, without stop tokens and stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from .regex_automata import Automaton
from .stop_regexes import StopRegexes
from .stop_strings import StopStrings
from .tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """Which text ends an output, and which part of the output is shown.

    A stop string or stop regular expression counts only when it is completed by token number `min_new_tokens` or a
    later one. With `show_stop` it stays in the text.
    """

    stop_strings: tuple[str, ...] = ()
    stop_regexes: tuple[Automaton, ...] = ()
    show_stop: bool = False
    hidden_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that are shown even with `skip_special_tokens`, because parsers need them."""
    min_new_tokens: int = 0
    before: Sequence[int] = ()
    """The tokens of the prompt, if the output continues its text. Empty if the output is a text of its own: some
    tokenizers then leave out the space before its first word.
    """


class OutputText:
    """Turns the tokens of one request into text that never shrinks."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._stream = TextStream(tokenizer, rules.skip_special_tokens, rules.kept_token_ids, rules.before)
        self._stops = (
            StopRegexes(rules.stop_strings, rules.stop_regexes, rules.show_stop)
            if rules.stop_regexes
            else StopStrings(rules.stop_strings, rules.show_stop)
        )
        self._rules = rules
        self._tokens = 0
        self.decoded_characters = 0
        """Characters of all tokens so far, shown or held back."""

    @property
    def stop_string(self) -> str | None:
        """The stop string, or the pattern of the stop regular expression, that has ended the text."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now. Must not be called after `stop_string` is set."""
        self._tokens += 1
        return self._take("" if token in self._rules.hidden_token_ids else self._stream.push([token]))

    def finish(self) -> str:
        """Returns the text that was held back, up to a stop string that it completes. No token follows."""
        if self.stop_string is not None:
            return ""
        shown = self._take(self._stream.finish())
        return shown if self.stop_string is not None else shown + self._stops.finish()

    def _take(self, decoded: str) -> str:
        self.decoded_characters += len(decoded)
        return self._stops.push(decoded, armed=self._tokens >= self._rules.min_new_tokens)
