"""Finds where a JSON value ends in text that arrives in pieces."""

_CLOSING = {"{": "}", "[": "]"}
_SPACE = " \n\r\t"


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
        """Returns how many characters of `text` belong to the value. If the next character cannot follow, sets
        `failed`.
        """
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
