"""Families whose calls are JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek-V3."""

from abc import abstractmethod
from collections.abc import Callable

from .call_parser import LONGEST_NAME, CallParser, Tools
from .json_scanner import JsonCall, JsonValue


class JsonCallParser(CallParser):
    """The steps that parse JSON in a call. A subclass defines with `_after_json` what comes after the JSON."""

    only_known_names = False
    """For formats without a marker: an object with any other name is content."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._scanner: JsonCall | JsonValue | None = None

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        return self._object

    @abstractmethod
    def _after_json(self) -> bool:
        """The state after the JSON of a call, which has ended."""

    def _object(self) -> bool:
        """An object with the name and the arguments of a call."""
        if self._scanner is None:
            self._scanner = JsonCall(self._begin, self._argue, self._tools if self.only_known_names else None)
        self._consume(self._scanner.feed(self._buffer))
        return self._advance(self._scanner)

    def _arguments(self) -> bool:
        """The arguments of a call that has begun."""
        if self._scanner is None:
            self._scanner = JsonValue()
        self._argue(self._consume(self._scanner.feed(self._buffer)))
        return self._advance(self._scanner)

    def _advance(self, scanner: JsonCall | JsonValue) -> bool:
        if not scanner.failed and not scanner.complete:
            return False
        self._scanner = None
        if scanner.failed:
            self._give_up()
        else:
            self._end()
            self._step = self._after_json
        return True

    def _close(self, end: str, *again: str) -> bool:
        """Skip to the end of a call that is complete. The beginning of the next one ends it too."""
        found = self._until(end, *again)
        if found is None:
            return False
        if found[1] != end:
            self._buffer = found[1] + self._buffer
        self._unsure = ""
        self._step = self._content
        return True


class HermesParser(JsonCallParser):
    r"""`<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    markers = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")

    def _after_json(self) -> bool:
        return self._close("</tool_call>", "<tool_call>")


class Llama3Parser(JsonCallParser):
    """`{"name": "f", "parameters": {...}}` as the whole output, after `<|python_tag|>` or not; several after `;`."""

    markers = ("<|python_tag|>",)
    tags = ("<|python_tag|>",)
    only_known_names = True

    def _start(self) -> bool:
        character = self._skip_space()
        if not character:
            return False
        if character == "{":
            self._step = self._object
        else:
            self._give_up()
        return True

    def _after_json(self) -> bool:
        if self._skip_space() == ";":
            self._consume(1)
            return True
        return self._start()


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call."""

    markers = ("[TOOL_CALLS]",)
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._listed = False

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        return self._form

    def _form(self) -> bool:
        character = self._skip_space()
        if not character:
            return False
        self._listed = character == "["
        if self._listed:
            self._consume(1)
        self._step = self._object if character in "[{" else self._name
        return True

    def _name(self) -> bool:
        found = self._until("[ARGS]", "[CALL_ID]", "{", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._name
        name, end = found[0].strip(), found[1]
        if not name or any(character.isspace() for character in name):
            self._give_up()
            return True
        self._called = name
        if end == "[CALL_ID]":
            self._step = self._call_id
            return True
        self._begin(name)
        if end == "{":
            self._buffer = end + self._buffer
        self._step = self._arguments
        return True

    def _call_id(self) -> bool:
        if self._until("[ARGS]", longest=LONGEST_NAME) is None:
            return self._step != self._call_id
        self._begin(self._called)
        self._step = self._arguments
        return True

    def _after_json(self) -> bool:
        if not self._listed:
            self._step = self._content
            return True
        character = self._skip_space()
        if not character:
            return False
        if character == ",":
            self._consume(1)
            self._step = self._object
        elif character == "]":
            self._consume(1)
            self._unsure = ""
            self._step = self._content
        else:
            self._give_up()
        return True


CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


class DeepSeekParser(JsonCallParser):
    r"""DeepSeek-V3 and R1: `function<sep>f\n```json\n{...}\n```` between the tags of a call; V3.1: `f<sep>{...}`."""

    markers = (CALLS, CALL)
    tags = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        return self._call if marker == CALLS else self._header

    def _call(self) -> bool:
        self._skip_space()
        matched = self._match(CALL)
        if matched:
            self._step = self._header
        elif matched is not None:
            self._give_up()
        return matched is not None

    def _header(self) -> bool:
        found = self._until(SEPARATOR, longest=LONGEST_NAME)
        if found is None:
            return self._step != self._header
        self._called = found[0].strip()
        self._step = self._fence
        return True

    def _fence(self) -> bool:
        """What precedes the arguments: nothing, or the name and the beginning of a code block."""
        found = self._until("{", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._fence
        lines = found[0].split("\n")
        name = lines[0].strip() or self._called
        if not name or any(line.strip() not in ("", "```json", "```") for line in lines[1:]):
            self._give_up()
            return True
        self._begin(name)
        self._buffer = found[1] + self._buffer
        self._step = self._arguments
        return True

    def _after_json(self) -> bool:
        found = self._until(CALL_END, CALLS_END, CALL)
        if found is None:
            return False
        self._unsure = ""
        if found[1] == CALL:
            self._step = self._header
        else:
            self._step = self._next if found[1] == CALL_END else self._content
        return True

    def _next(self) -> bool:
        """Another call, or the end of all calls."""
        self._skip_space()
        for tag, step in ((CALL, self._header), (CALLS_END, self._content)):
            matched = self._match(tag)
            if matched is None:
                return False
            if matched:
                self._unsure = self._unsure if tag == CALL else ""
                self._step = step
                return True
        self._give_up()
        return True
