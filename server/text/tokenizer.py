"""Tokenizes and detokenizes text, renders chat templates, and streams text. Imports neither torch nor transformers.

Hugging Face directories have a tokenizer.json, which is used unchanged. For GGUF files an equal pipeline is built from
their metadata (models/formats/gguf_tokenizer.py).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from ...common.errors import ClientError, StartupError
from ...common.words import whole_characters
from ...models.formats.gguf_file import open_gguf
from ...models.formats.gguf_tokenizer import gguf_special_tokens
from ...models.formats.model_files import read_model_file
from ...models.formats.token_bytes import TokenBytes
from ...models.formats.tokenizer_settings import read_tokenizer_settings, special_token_text
from ...models.loading.catalog import CHAT_TEMPLATE_FILES, ModelSource
from ...models.loading.tokenizer_file import read_tokenizer
from .chat_templates import compile_template, limited_rendering, variables_of
from .token_floor import TokenFloor

_MOST_TEMPLATE_BYTES = 1 << 20
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 64
_LONGEST_SILENCE = 128
"""The last token of a prompt that has a text is searched among so many: a prompt may have a million without one, and
its outputs, of which a call has hundreds, begin on the event loop.
"""
_GGUF_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# Message content is what the client sent: text, or the parts of a multimodal message, as its template expects.
ChatMessage = Mapping[str, Any]


def load_tokenizer(source: ModelSource) -> "Tokenizer":
    """The tokenizer of a located model; raises StartupError when it cannot be built."""
    backend = read_tokenizer(source)
    if source.format == "gguf":
        file = open_gguf(source.path)
        special_tokens = gguf_special_tokens(file)
        templates = {
            name: text for name, key in _GGUF_TEMPLATES.items() if isinstance(text := file.metadata.get(key), str)
        }
    else:
        settings = read_tokenizer_settings(source.path)
        texts = {role: special_token_text(settings.get(role)) for role in _SPECIAL_ROLES}
        special_tokens = {role: text for role, text in texts.items() if text is not None}
        templates = _hf_chat_templates(source.path, settings)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
    )


class Tokenizer:
    """Thread-safe: after construction it only fills caches, at most once per id.

    `tool_template` is the chat template for requests with tools; None if they use `chat_template`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
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
        """Returns the bytes that a token adds to a text, possibly a part of a character; no bytes for an unknown id."""
        self.length_alone = cache(lambda token_id: len(self.decode((token_id,), skip_special_tokens=False)))
        """Returns the number of characters of a token that is decoded alone."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def template_has_tools(self) -> bool:
        """Whether the chat template of requests with tools reads `tools`."""
        if self.tool_template is None:
            return False
        return "tools" in variables_of(self.tool_template)

    @cached_property
    def template_tests_content(self) -> bool:
        """Whether the chat templates test if the content of a message is none. Templates without such a test would
        write the text `None`.
        """
        test = re.compile(r"content(['\"]\])? is (not )?none", re.IGNORECASE)
        return all(test.search(template or "") for template in (self.chat_template, self.tool_template))

    @cached_property
    def template_has_developer(self) -> bool:
        """Whether the chat templates know the role `developer`, OpenAI's newer name of `system`. Many templates ignore
        messages of roles that they do not know.
        """
        return all("developer" in (template or "") for template in (self.chat_template, self.tool_template))

    def special_tokens_in(self, texts: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens whose text occurs in one of these texts."""
        return frozenset(
            token for token in self._special if (own := self.token_text(token)) and any(own in text for text in texts)
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. With `add_special_tokens`, the post-processor adds a BOS token if the model
        uses one; pass False for a rendered chat, which has it already.

        Encodes a batch of one, because only the batch call releases the GIL.
        """
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`, without ids outside the vocabulary."""
        if not self._bytes.keys().isdisjoint(token_ids):
            return self._decode_with_bytes(token_ids, skip_special_tokens)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _decode_with_bytes(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decodes byte tokens, and replaces only bytes that belong to no valid character.

        The library replaces every byte of a run of byte tokens if the run as a whole is not valid UTF-8. An unfinished
        character at the end of a run would so change the characters before it.
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
        """Whether `decode` leaves this id out, because it is outside the vocabulary or a special token to skip."""
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
        """Renders `messages` with the model's chat template; raises ClientError when the template refuses them.

        `variables` are those that only this template has, such as Qwen3's `enable_thinking`. They cannot replace the
        variables that are set here.
        """
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise ClientError("messages: this model has no chat template; send a text prompt instead")
        try:
            with limited_rendering():
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
        except Exception as error:  # a template is third-party code that runs on the client's values
            raise ClientError(f"messages: the model's chat template refuses them: {error}") from error
        return whole_characters(rendered)


class TextStream:
    """Converts tokens to text deltas. Their concatenation is the text of all tokens decoded together.

    A character whose bytes have not all arrived is held back, because later tokens still change it. Each push decodes a
    bounded number of tokens (the window), however long the output is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        """`kept_token_ids` are special tokens that are not skipped. `before` are the tokens whose text the output
        continues.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = kept_token_ids
        self._decode_skips = skip_special_tokens and not kept_token_ids  # otherwise push() leaves special tokens out
        self._window: list[int] = []  # the tokens that the next push decodes, together with the new ones
        # The first `_context` tokens of the window are returned already. They stay, because a decoder treats the first
        # token of a text differently.
        self._context = 0
        self._emitted = 0  # characters of the window's text that were returned
        latest = itertools.islice(reversed(before), _LONGEST_SILENCE)
        last = next((token for token in latest if self._is_heard(token)), None)
        if last is not None and not (text := self._decode([last])).endswith(_REPLACEMENT):
            self._window, self._context, self._emitted = [last], 1, len(text)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that no later token can change, possibly none."""
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
        """Returns the text that was held back, with replacement characters for incomplete ones. No token follows."""
        delta = self._decode(self._window)[self._emitted :]
        self._emitted += len(delta)
        return delta

    def _is_heard(self, token: int) -> bool:
        return token in self._kept or not self._tokenizer.is_silent(token, self._skip_special_tokens)

    def _shorten_window(self, text: str) -> None:
        """Drop up to half of a window in which no character gets complete: it is a run of invalid bytes.

        The window is cut at the last place in its first half where the two parts, decoded one by one, have the same
        text as the whole.
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


def _hf_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: `default`, and `tool_use` if requests with tools have a template of their
    own. Template files take precedence over tokenizer_config.json, which has one template or a list of named ones.
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
        return read_model_file(path, _MOST_TEMPLATE_BYTES).decode("utf-8")
    except ValueError as error:
        raise StartupError(f"{path}: cannot be read: {error}") from error
