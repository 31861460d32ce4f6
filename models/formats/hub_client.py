"""The HTTP client of `huggingface_hub`, which checks what an endpoint answers before the library uses it.

The library joins ETags, commits and file names of an answer to paths of its cache, and reads answers of any size. So
hooks of its client check every answer: names stay in the cache, and nothing is endless. Raises StartupError.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx

from ...common.errors import StartupError
from .json_fields import bare, shown
from .model_files import check_values, is_inside

MOST_SMALL_BYTES = 64 << 20
"""Bytes of a file that is not weights, and of one whose size the endpoint does not tell."""
MOST_ANSWER_BYTES, MOST_ANSWER_VALUES = 16 << 20, 1 << 20
"""Bytes and JSON values of all answers to one question that are not files: lists have several pages."""
_MOST_PAGES = 1000
_MOST_REDIRECT_BYTES = 1 << 16
_ANSWER_S = 30.0
"""How long one answer that is not a file may take."""
_SILENCE_S = 10.0
_RETRY_AFTER_S = 10
_LOST = 3
"""A file is given up when this many of its connections in a row were lost after fewer than `_PROGRESS_BYTES`."""
_PROGRESS_BYTES = 1 << 20

_ID: Final = re.compile(r"[0-9a-fA-F]{40,64}")
_ETAG: Final = re.compile(r'(W/)?"?(?P<id>[^"]*)"?')
_SMALL_FILE: Final = re.compile(r".*\.(json|jinja)")


class AnswerChecks:
    """The hooks of a client. What they know is reset with each question to the endpoint."""

    def __init__(self) -> None:
        self.begin(Path.cwd())

    def begin(self, folder: Path) -> None:
        """Before a question to the endpoint, or downloads to this folder."""
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._answers = self._answer_bytes = 0

    def asking(self, request: httpx.Request) -> None:
        if request.url.scheme not in ("http", "https"):
            raise StartupError(f"{_shown(request)}: the endpoint leads to an address that is not of http or https")
        request.headers["Accept-Encoding"] = "identity"
        limits = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            kind: min(limits.get(kind) or _SILENCE_S, _SILENCE_S) for kind in ("connect", "read", "write", "pool")
        }

    def answered(self, response: httpx.Response) -> None:
        request, headers = response.request, response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise _refused(request, "Content-Encoding", headers["Content-Encoding"], "identity")
        if (commit := headers.get("X-Repo-Commit")) is not None:
            _check_id(request, "X-Repo-Commit", commit)
        if "Retry-After" in headers:
            headers["Retry-After"] = str(_RETRY_AFTER_S)
        target = str(request.url.join(headers["Location"])) if response.has_redirect_location else None
        if request.method == "HEAD":
            self._check_file(response, target)
            return
        size = self._sizes.get(str(request.url))
        if target is not None:
            if size is not None:
                self._sizes[target] = size
            self._bound(response, _MOST_REDIRECT_BYTES)
        elif size is not None:
            response.stream = _Bounded(response, size, self._lost)
        else:
            self._check_answer(response)

    def _check_file(self, response: httpx.Response, target: str | None) -> None:
        """The library takes the name of a blob and the size of a file from here."""
        request, headers = response.request, response.headers
        if response.is_error:
            return
        if (etag := headers.get("X-Linked-Etag") or headers.get("ETag")) is not None:
            found = _ETAG.fullmatch(etag)
            if target is None or "X-Linked-Etag" in headers or _leaves(request.url, target):
                _check_id(request, "ETag", etag if found is None else found["id"])
        if (xet := headers.get("X-Xet-Hash")) is not None:
            _check_id(request, "X-Xet-Hash", xet)
        length = headers.get("X-Linked-Size") or (None if target is not None else headers.get("Content-Length"))
        if length is not None and (not length.isascii() or not length.isdigit() or len(length) > 18):
            raise _refused(request, "Content-Length", length, "a number of bytes")
        size = MOST_SMALL_BYTES if length is None else int(length)
        if _SMALL_FILE.fullmatch(request.url.path) and size > MOST_SMALL_BYTES:
            raise _refused(request, "Content-Length", size, f"at most {MOST_SMALL_BYTES}")
        existing = next(folder for folder in (self._folder, *self._folder.absolute().parents) if folder.exists())
        if size > (free := shutil.disk_usage(existing).free):
            raise _refused(request, "Content-Length", size, f"at most {free}, the free bytes of {self._folder}")
        self._sizes.update(dict.fromkeys((str(request.url), target or str(request.url)), size))

    def _check_answer(self, response: httpx.Response) -> None:
        """Read an answer that is not a file; ids and names in it become parts of paths."""
        request = response.request
        self._answers += 1
        if self._answers > _MOST_PAGES:
            raise StartupError(f"{_shown(request)}: more than {_MOST_PAGES} pages")
        body = self._bound(response, MOST_ANSWER_BYTES - self._answer_bytes)
        self._answer_bytes += len(body)
        check_values(_shown(request), body, MOST_ANSWER_VALUES)
        try:
            answer = json.loads(body)
        except ValueError:
            return  # of a proxy, for example: the library names the status
        except RecursionError:
            raise StartupError(f"{_shown(request)}: the JSON of the answer is nested too deeply") from None
        if isinstance(answer, dict) and answer.get("sha") is not None:
            _check_id(request, "sha", answer["sha"])
        for entry in _dicts(answer.get("siblings") if isinstance(answer, dict) else answer):
            name = entry.get("path", entry.get("rfilename", "file"))
            if not isinstance(name, str) or not is_inside(name):
                raise _refused(request, "the name of a file", name, "inside the repository")
            lfs = next(_dicts([entry.get("lfs")]), {})
            for field in ("oid", "blobId", "xetHash", "sha256"):
                for value in (entry.get(field), lfs.get(field)):
                    if value is not None:
                        _check_id(request, f"{field} of {shown(name)}", value)

    def _bound(self, response: httpx.Response, most: int) -> bytes:
        """Read an answer of at most this many bytes."""
        parts, size, ends_at = [], 0, time.monotonic() + _ANSWER_S
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        for part in stream:
            size += len(part)
            if size > most:
                raise StartupError(f"{_shown(response.request)}: the answer must have at most {most} bytes")
            if time.monotonic() > ends_at:
                raise StartupError(f"{_shown(response.request)}: no answer within {_ANSWER_S:g} s")
            parts.append(part)
        stream.close()
        response.stream = httpx.ByteStream(b"".join(parts))
        return b"".join(parts)


class _Bounded(httpx.SyncByteStream):
    """The content of a file, not longer than was announced, from a connection that was not lost too often."""

    def __init__(self, response: httpx.Response, most: int, lost: dict[str, int]) -> None:
        assert isinstance(response.stream, httpx.SyncByteStream)
        self._stream, self._request, self._most, self._lost = response.stream, response.request, most, lost

    def __iter__(self) -> Iterator[bytes]:
        size, url = 0, str(self._request.url)
        try:
            for part in self._stream:
                size += len(part)
                if size > self._most:
                    raise _refused(
                        self._request, "the content", f"more than {self._most} bytes", "as long as announced"
                    )
                yield part
        except httpx.TransportError as error:
            self._lost[url] = self._lost.get(url, 0) + 1 if size < _PROGRESS_BYTES else 0
            if self._lost[url] >= _LOST:
                raise StartupError(f"{_shown(self._request)}: {_LOST} connections were lost: {bare(error)}") from None
            raise

    def close(self) -> None:
        self._stream.close()


@cache
def checked_client() -> AnswerChecks:
    """Let `huggingface_hub` use such a client from now on. Returns its checks."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    checks = AnswerChecks()

    def new_client() -> httpx.Client:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], checks.asking],
            "response": [*hooks["response"], checks.answered],
        }
        return client

    set_client_factory(new_client)
    if constants.ENDPOINT != constants._HF_DEFAULT_ENDPOINT:  # hf_xet has a client of its own, which checks nothing
        constants.HF_HUB_DISABLE_XET = True
    return checks


def _check_id(request: httpx.Request, field: str, value: Any) -> None:
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise _refused(request, field, value, "40 to 64 hexadecimal digits")


def _refused(request: httpx.Request, field: str, value: Any, expected: str) -> StartupError:
    return StartupError(f"{_shown(request)}: {field} must be {expected}, got {shown(value)}")


def _shown(request: httpx.Request) -> str:
    return bare(request.url.copy_with(query=None, userinfo=b""))


def _leaves(url: httpx.URL, target: str) -> bool:
    """Whether a redirect leads to another host: then the library takes the ETag of the redirect."""
    return httpx.URL(target).host != url.host


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    return (value for value in (values if isinstance(values, list) else ()) if isinstance(value, dict))
