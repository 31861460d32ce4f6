"""JSON that arrives in pieces: where a value ends, and a call written as an object with its name and arguments."""

import json
from collections.abc import Callable, Collection
from enum import Enum, auto

_CLOSING = {"{": "}", "[": "]"}
_SPACE = " \n\r\t"
_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one JSON value. Checks strings and brackets, not every detail."""

    def __init__(self) -> None:
        self.complete = False
        self.failed = False
        self._closing: list[str] = []
        self._in_string = False
        self._escaped = False
        self._begun = False
        self._bare = False

    def feed(self, text: str) -> int:
        """How many characters belong to the value. It has `failed` if the next one cannot follow."""
        for at, character in enumerate(text):
            if self._bare and character in f"{_SPACE},]}}":
                self.complete = True
            if self.complete or not self._take(character):
                return at
        return len(text)

    def _take(self, character: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self.complete = not self._closing
        elif character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif character in "]}":
            self.failed = not self._closing or self._closing.pop() != character
            self.complete = not self._closing and not self.failed
        elif not self._begun:
            self._bare = character in "-0123456789tfn"
            self.failed = not self._bare
        self._begun = True
        return not self.failed


class _State(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonCall:
    """Reads `{"name": "f", "arguments": {...}}`, in any order and with other keys between. `begin` is called with the
    name when the arguments begin, `argue` with their text. Where `known` is given, any other name fails.
    """

    def __init__(
        self, begin: Callable[[str], None], argue: Callable[[str], None], known: Collection[str] | None = None
    ) -> None:
        self.complete = False
        self.failed = False
        self._begin, self._argue, self._known = begin, argue, known
        self._state = _State.START
        self._value = JsonValue()
        self._text = ""
        """The key or the value that is read."""
        self._key: object = None
        self._name: str | None = None
        self._arguments = "{}"
        """Of a call that has not begun."""
        self._begun = False
        self._streaming = False

    def feed(self, text: str) -> int:
        """How many characters belong to the object. It has `failed` if it is not a call, or the next character cannot
        follow.
        """
        at = 0
        while at < len(text) and not self.complete and not self.failed:
            if self._state in (_State.KEY, _State.VALUE) and (self._text or text[at] not in _SPACE):
                at += self._read(text[at:])
            else:
                at += self._punctuate(text[at])
        return at

    def _punctuate(self, character: str) -> int:
        match self._state, character:
            case _State.START, "{":
                self._state = _State.KEY
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.COMMA, ",":
                self._state = _State.KEY
            case _State.COMMA, "}":
                self._close()
            case _ if character not in _SPACE:
                self.failed = True
        return 0 if self.failed else 1

    def _read(self, text: str) -> int:
        """Read a part of a key or a value."""
        if not self._text:
            if self._state is _State.KEY and text[0] == "}":
                self._close()
                return 0 if self.failed else 1
            self.failed = not self._may_begin(text[0])
            if self.failed:
                return 0
        taken = self._value.feed(text)
        self._text += text[:taken]
        if self._streaming:
            self._argue(text[:taken])
        self.failed = self._value.failed
        if self._value.complete:
            self._complete_value()
        return taken

    def _may_begin(self, first: str) -> bool:
        """Whether a key or a value may begin with this character. Arguments after the name are passed on at once."""
        if self._state is _State.KEY or self._key == "name":
            return first == '"'
        if self._key not in _ARGUMENT_KEYS or self._begun:
            return True
        if first == "{" and self._name is not None:
            self._begin(self._name)
            self._begun = self._streaming = True
        return first in '{"n'

    def _complete_value(self) -> None:
        text, self._text, self._value = self._text, "", JsonValue()
        if self._streaming:
            self._streaming, self._state = False, _State.COMMA
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._state is _State.KEY:
            self._key, self._state = value, _State.COLON
            return
        self._state = _State.COMMA
        if self._key == "name" and self._name is None:
            self.failed = not value or (self._known is not None and value not in self._known)
            self._name = value
        elif self._key in _ARGUMENT_KEYS and value is not None:
            # some models write the text of the object in a string
            self._arguments = (value or "{}") if isinstance(value, str) else text

    def _close(self) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self._begun:
            self._begin(self._name)
            self._argue(self._arguments)
        self.complete = True
