"""Structural tags: free text in which some begin strings are followed by structured content and an end string.

Two spellings, both of SGLang: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and the newer
`{"type": "structural_tag", "format": {...}}`, whose formats are const_string, json_schema, regex, any_text, sequence,
or, tag, triggered_tags and tags_with_separator.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...common.sampling import ReasoningTags

_ANY = r"/(.|\n)*/"
_SPACE = r"/[ \n]{0,8}/"


def structural_tag_to_lark(
    tag: Any,
    special_tokens: Mapping[str, int],
    inline_schema: Callable[[object, bool], str],
    check_regex: Callable[[str], str],
) -> str:
    """A Lark grammar; raises ValueError, KeyError or TypeError for anything else than the two spellings."""
    builder = _Builder(special_tokens, inline_schema, check_regex)
    if not isinstance(tag, dict):
        raise TypeError("must be an object")
    if "structures" in tag:
        tags = [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        start = builder.triggered({"triggers": tag["triggers"], "tags": tags})
    elif "format" in tag:
        start = builder.format(tag["format"])
    else:
        raise ValueError("it has neither structures nor format")
    return "\n".join(["%llguidance {}", f"start: {start}", *builder.rules]) + "\n"


class _Builder:
    """Collects rules. Every method returns an expression that may stand in a rule."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        inline_schema: Callable[[object, bool], str],
        check_regex: Callable[[str], str],
    ) -> None:
        self.rules: list[str] = []
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._inline_schema = inline_schema
        self._check_regex = check_regex

    def format(self, given: Mapping[str, Any], *, last: bool = True) -> str:
        """`last`: nothing follows it, so that any text may run to the end."""
        match given["type"]:
            case "const_string":
                return json.dumps(given["value"]) if given.get("text") else self._literal(given["value"])
            case "json_schema":
                return self._rule(self._inline_schema(given["json_schema"], bool(given.get("lenient"))))
            case "regex":
                return self._rule(f"/{_escaped(self._check_regex(given['pattern']))}/")
            case "any_text" if last:
                return self._rule(_ANY)
            case "sequence":
                elements = given["elements"]
                return " ".join(
                    self.format(each, last=last and index == len(elements) - 1) for index, each in enumerate(elements)
                )
            case "or":
                return self._rule(" | ".join(self.format(each, last=last) for each in given["elements"]))
            case "tag":
                return self._tag(given["begin"], given)
            case "triggered_tags" if last:
                return self.triggered(given)
            case "tags_with_separator":
                return self._separated(given)
            case kind:
                raise ValueError(f"format {kind!r} is not supported at this place")

    def triggered(self, given: Mapping[str, Any]) -> str:
        """Any text; a trigger in it begins one of the tags. With `at_least_one` a tag comes first, without text before
        it. With `stop_after_first` nothing follows the first tag.
        """
        if not given["tags"]:
            raise ValueError("tags must not be empty")
        options = []
        for tag in given["tags"]:
            trigger = next((text for text in given["triggers"] if text and tag["begin"].startswith(text)), None)
            if trigger is None:
                raise ValueError(f"no trigger is a prefix of {tag['begin']!r}")
            body = self._tag(tag["begin"][len(trigger) :], tag)
            options.append(f"{self._until(trigger)} {body}")
        tags = self._rule(" | ".join(options))
        rest = f"{tags}* {self._text()}"
        if given.get("at_least_one"):
            first = self._rule(" | ".join(self._tag(tag["begin"], tag) for tag in given["tags"]))
            return first if given.get("stop_after_first") else f"{first} {rest}"
        return self._rule(f"{tags} | {self._text()}") if given.get("stop_after_first") else rest

    def _separated(self, given: Mapping[str, Any]) -> str:
        """Tags and nothing else, with a string between two of them. With `any_space`, white space may follow each tag,
        and that of the separator may differ.
        """
        if not given["tags"]:
            raise ValueError("tags must not be empty")
        tags = self._rule(" | ".join(self._tag(tag["begin"], tag) for tag in given["tags"]))
        separator, after = self._literal(given["separator"]), ""
        if given.get("any_space"):
            text = given["separator"].strip()
            separator, after = f"{_SPACE} {self._literal(text)} {_SPACE}" if text else _SPACE, _SPACE
        several = f"{tags} {after}"
        if not given.get("stop_after_first"):
            several = self._rule(f"{tags} ({separator} {tags})* {after}")
        return several if given.get("at_least_one") else f"({several})?"

    def _tag(self, begin: str, tag: Mapping[str, Any]) -> str:
        """The begin string, the content and the end string."""
        content, end = tag["content"], tag["end"]
        if content["type"] == "any_text" and end:
            return f"{self._literal(begin)} {self._until(end)}"
        return f"{self._literal(begin)} {self.format(content, last=False)} {self._literal(end)}"

    def _until(self, end: str) -> str:
        """Any text, then `end`. If `end` has a special token, the text before that token has none."""
        before, *rest = self._split.split(end, maxsplit=1) if self._split is not None else [end]
        if rest:
            return f"{self._text(before)} {self._literal(''.join(rest))}"
        return self._rule(f"{_ANY} {json.dumps(end)}", lazy=True)

    def _text(self, end: str = "") -> str:
        """Any text without special tokens, that ends with `end`."""
        if not end:
            return self._rule(_ANY)
        self.rules.append(f"TEXT_{len(self.rules)}: {_ANY} {json.dumps(end)}")
        return f"TEXT_{len(self.rules) - 1}"

    def _literal(self, text: str) -> str:
        """Text in which special tokens, which are no text to the tokenizer, are written as tokens."""
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _escaped(pattern: str) -> str:
    r"""A pattern between slashes: a slash is written as \/."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")


def reasoning_to_lark(tags: ReasoningTags, special_tokens: Mapping[str, int]) -> str:
    """A Lark grammar of an output whose reasoning precedes the rule `@answer`."""
    builder = _Builder(special_tokens, lambda *_: "", str)
    span = {
        "type": "tag",
        "begin": "" if tags.is_open else tags.open,
        "content": {"type": "any_text"},
        "end": tags.close,
    }
    after = f"{builder.format(span)} {_SPACE} @answer"
    start = after if tags.is_open else f"@answer | {_SPACE} {after}"
    return "\n".join(["%llguidance {}", f"start: {start}", *builder.rules]) + "\n"
