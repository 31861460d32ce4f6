"""A server that speaks the Hugging Face Hub's protocol, as far as downloads use it: model info, file tree, and files
with ETag, commit and byte ranges. Repositories are directories.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)
_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class FakeHub:
    """`tokens` are the Authorization headers of clients; `requests` are `METHOD path` without queries."""

    root: Path
    url: str = ""
    gated: set[str] = field(default_factory=set)
    gguf: dict[str, str] = field(default_factory=dict)
    """Architecture of the GGUF files of a repository, as the Hub reads it."""
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    down: bool = False
    cut: set[str] = field(default_factory=set)
    """Files whose first download breaks off after 1,000 bytes."""
    before_file: Callable[[], object] = nullcontext
    """Called before the content of a file is sent."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that replace those of files."""
    instead: "Callable[[BaseHTTPRequestHandler, str], bool]" = lambda _handler, _path: False
    """Answers a request to a path in another way. Returns whether it has."""

    @property
    def downloaded(self) -> list[str]:
        """Files whose content was fetched, in order."""
        matches = [_FILE.fullmatch(request.removeprefix("GET ")) for request in self.requests]
        return [match["name"] for match in matches if match is not None]


@contextmanager
def serving(root: Path) -> Iterator[FakeHub]:
    hub = FakeHub(root)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def hub_of_this_process(root: Path, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve the repositories below `root` to huggingface_hub in this process, with an empty cache."""
    patch.setenv("NO_PROXY", "127.0.0.1")
    patch.delenv("HF_TOKEN", raising=False)
    with serving(root) as server:
        use_endpoint(server.url, patch)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
    huggingface_hub.close_session()


def use_endpoint(url: str, patch: pytest.MonkeyPatch) -> None:
    """Change the constants of huggingface_hub: it reads the environment only when it is imported."""
    huggingface_hub.close_session()
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.tokens.add(self.headers.get("Authorization"))
        if self.hub.down:
            return self._refuse(503, "")
        if self.hub.instead(self, path):
            self.close_connection = True
            return None
        for pattern in (_TREE, _API, _FILE):
            if (match := pattern.fullmatch(path)) is not None:
                break
        else:
            return self._refuse(404, "EntryNotFound")
        repo, revision = match["repo"], match["revision"] or "main"
        directory = self.hub.root / repo
        if not directory.is_dir():
            return self._refuse(401, "RepoNotFound")
        if revision not in REVISIONS:
            return self._refuse(404, "RevisionNotFound")
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        if pattern is _TREE:
            return self._send_json([{"type": "file", "path": name, **_blob(file)} for name, file in files.items()])
        if pattern is _API:
            siblings = [
                {"rfilename": name, "blobId": "b" * 40, "size": file.stat().st_size} for name, file in files.items()
            ]
            info = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            if repo in self.hub.gguf:
                info["gguf"] = {"architecture": self.hub.gguf[repo]}
            return self._send_json(info)
        if repo in self.hub.gated and self.headers.get("Authorization") is None:
            return self._refuse(403, "GatedRepo")
        if match["name"] not in files:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(files[match["name"]])

    def _send_file(self, file: Path) -> None:
        if self.command == "GET":
            self.hub.before_file()
        content = file.read_bytes()
        begin = 0
        if (asked := self.headers.get("Range")) is not None:
            first = re.fullmatch(r"bytes=(\d+)-", asked)
            assert first is not None, asked
            begin = int(first[1])
        self.send_response(206 if begin else 200)
        usual = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        for name, value in (usual | self.hub.headers).items():
            self.send_header(name, value)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        if self.command == "GET" and file.name in self.hub.cut:
            self.hub.cut.remove(file.name)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:1000])
            self.close_connection = True
            return
        self._end(content[begin:])

    def _send_json(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._end(json.dumps(value).encode())

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self._end(b"")

    def _end(self, content: bytes) -> None:
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _blob(file: Path) -> dict[str, object]:
    return {"size": file.stat().st_size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}
