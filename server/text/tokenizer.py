"""Text to token ids and back, chat templates, and streamed text. No torch, no transformers.

Hugging Face directories have a tokenizer.json, which is used unchanged. For GGUF files the same pipeline is built from
their metadata (models/formats/gguf_tokenizer.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from ...configs.errors import ClientError, StartupError
from ...configs.words import whole_characters
from ...models.formats.gguf_file import open_gguf
from ...models.formats.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer
from ...models.formats.token_bytes import TokenBytes
from ...models.formats.tokenizer_settings import read_tokenizer_settings, special_token_text
from ...models.loading.catalog import CHAT_TEMPLATE_FILES, ModelSource
from ...models.loading.tokenizer_file import hf_tokenizer
from .token_floor import TokenFloor

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 64
_GGUF_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# Message content is what the client sent: text, or the parts of a multimodal message, as its template expects.
ChatMessage = Mapping[str, Any]


def load_tokenizer(source: ModelSource) -> "Tokenizer":
    """The tokenizer of a located model; raises StartupError when it cannot be built."""
    if source.format == "gguf":
        file = open_gguf(source.path)
        named = {name: file.metadata.get(key) for name, key in _GGUF_TEMPLATES.items()}
        return Tokenizer(
            gguf_tokenizer(file),
            eos_token_ids=source.config.eos_token_ids,
            special_tokens=gguf_special_tokens(file),
            chat_template=_if_text(named["default"]),
            tool_template=_if_text(named["tool_use"]),
        )
    backend = hf_tokenizer(source.path)
    settings = read_tokenizer_settings(source.path)
    texts = {role: special_token_text(settings.get(role)) for role in _SPECIAL_ROLES}
    templates = _hf_chat_templates(source.path, settings)
    return Tokenizer(
        backend,
        eos_token_ids=source.config.eos_token_ids,
        special_tokens={role: text for role, text in texts.items() if text is not None},
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
    )


class Tokenizer:
    """Thread-safe: after construction it only fills caches, at most once per id.

    `eos_token_ids` are those of the model's configuration and the tokenizer's own end token. `tool_template` is the
    chat template of requests with tools; None: the same as of others.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.special_tokens = dict(special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self.tool_template = chat_template if tool_template is None else tool_template
        self._template, self._tool_template = (
            None if text is None else compile_template(text) for text in (self.chat_template, self.tool_template)
        )
        token_bytes = TokenBytes(backend)
        self._special = token_bytes.special
        self._byte_tokens = token_bytes.byte_tokens
        self._bytes = {token: byte for byte, token in self._byte_tokens.items()}
        self.floor = TokenFloor(backend, token_bytes.find)
        self.token_bytes = cache(token_bytes.find)
        """The bytes that a token adds to a text, which may be a part of a character; none for an unknown id."""
        self.length_alone = cache(lambda token_id: len(self.decode((token_id,), skip_special_tokens=False)))
        """Characters of a token that is decoded alone."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def template_has_tools(self) -> bool:
        """Whether the chat template of requests with tools reads `tools`."""
        if self.tool_template is None:
            return False
        return "tools" in jinja2.meta.find_undeclared_variables(_template_environment().parse(self.tool_template))

    @cached_property
    def template_tests_content(self) -> bool:
        """Whether the chat templates test if a message has content. Others would write `None`."""
        test = re.compile(r"content(['\"]\])? is (not )?none", re.IGNORECASE)
        return all(test.search(template or "") for template in (self.chat_template, self.tool_template))

    @cached_property
    def template_has_developer(self) -> bool:
        """Whether the chat templates have the role `developer`, OpenAI's newer name of `system`. Many ignore messages
        of roles that they do not have.
        """
        return all("developer" in (template or "") for template in (self.chat_template, self.tool_template))

    def special_tokens_in(self, texts: Sequence[str]) -> frozenset[int]:
        """The special tokens that are a part of one of these texts."""
        return frozenset(
            token for token in self._special if (own := self.token_text(token)) and any(own in text for text in texts)
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the BOS that the post-processor adds. A rendered chat has one: pass False.

        Encodes a batch of one, because only the batch call releases the GIL.
        """
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        if not self._bytes.keys().isdisjoint(token_ids):
            return self._decode_with_bytes(token_ids, skip_special_tokens)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _decode_with_bytes(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library replaces every byte of a run of byte tokens that is not valid as a whole, so the first byte of a
        character would change those before it. Only bytes that belong to no character are replaced here.
        """
        ids: list[int] = []
        heard = (token for token in token_ids if not self.is_silent(token, skip_special_tokens))
        for is_run, tokens in groupby(heard, self._bytes.__contains__):
            if is_run:
                text = bytes(self._bytes[token] for token in tokens).decode(errors="replace")
                ids += (self._byte_tokens[byte] for byte in text.encode())
            else:
                ids += tokens
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` always leaves this id out: it is outside the vocabulary, or skipped."""
        return (skip_special_tokens and token_id in self._special) or self._backend.id_to_token(token_id) is None

    def token_text(self, token_id: int) -> str:
        """A single token as text; a part of a character shows as a replacement character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """`messages` rendered with the model's template; raises ClientError when the template refuses them.

        `variables` are the template's own (Qwen3 has `enable_thinking`), without the names that are set here.
        """
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise ClientError("messages: this model has no chat template; send a text prompt instead")
        try:
            rendered = template.render(
                {
                    **self.special_tokens,
                    **(variables or {}),
                    # as in transformers: templates test `tools is not none`, which is true for an undefined name
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is foreign code on the client's values: it can raise anything
            raise ClientError(f"messages: the model's chat template refuses them: {error}") from error
        return whole_characters(rendered)


class TextStream:
    """Turns tokens into text deltas whose concatenation is the decoded whole.

    Text that later tokens may still change is held back: a character whose bytes have not all arrived. A push decodes
    a bounded number of tokens for any output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        """`kept_token_ids` are special tokens that are not skipped. `before` are tokens whose text is continued."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = kept_token_ids
        self._decode_skips = skip_special_tokens and not kept_token_ids  # otherwise push leaves them out
        self._window: list[int] = []  # [context) is emitted, kept because a decoder treats the first token differently
        self._context = 0
        self._emitted = 0  # characters of the window's text that were returned
        last = next((token for token in reversed(before) if self._is_heard(token)), None)
        if last is not None and not (text := self._decode([last])).endswith(_REPLACEMENT):
            self._window, self._context, self._emitted = [last], 1, len(text)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens, possibly none."""
        self._window += filter(self._is_heard, token_ids)
        text = self._decode(self._window)
        unfinished = int(text.endswith(_REPLACEMENT))  # the bytes of an unfinished character decode to one replacement
        delta = text[self._emitted : len(text) - unfinished]
        self._emitted += len(delta)
        if not unfinished and delta:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            alone = self._context == 1
            self._emitted = self._tokenizer.length_alone(self._window[0]) if alone else len(self._decode(self._window))
        elif len(self._window) >= _LONGEST_WINDOW:
            self._shorten_window(text)
        return delta

    def finish(self) -> str:
        """The text that was held back, with replacement characters."""
        delta = self._decode(self._window)[self._emitted :]
        self._emitted += len(delta)
        return delta

    def _is_heard(self, token: int) -> bool:
        return token in self._kept or not self._tokenizer.is_silent(token, self._skip_special_tokens)

    def _shorten_window(self, text: str) -> None:
        """Drop the older half of a window in which no character is complete: a run of invalid bytes.

        The cut is where the two parts decode to the same text as the whole.
        """
        for cut in range(len(self._window) // 2, 0, -1):
            before = self._decode(self._window[:cut])
            if len(before) <= self._emitted and before + self._decode(self._window[cut:]) == text:
                self._window = self._window[cut:]
                self._context = 0
                self._emitted -= len(before)
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._decode_skips)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; serving renders only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates expect; sandboxed, because they come with the weights."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@cache
def compile_template(text: str) -> jinja2.Template:
    try:
        return _template_environment().from_string(text)
    except jinja2.TemplateError as error:
        raise StartupError(f"the model's chat template cannot be compiled: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML. The options are those of transformers, which templates of GLM use."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _hf_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name: `default`, and `tool_use` if requests with tools have another one. Files take precedence over
    tokenizer_config.json, which has one template, or a list with names.
    """
    paths = {name: directory / file for name, file in CHAT_TEMPLATE_FILES.items() if (directory / file).is_file()}
    if paths:
        return {name: _read_text(path) for name, path in paths.items()}
    given = settings.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: cannot be read: {error}") from error


def _if_text(value: object) -> str | None:
    return value if isinstance(value, str) else None
