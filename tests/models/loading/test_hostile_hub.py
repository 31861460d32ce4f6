"""Endpoints of the Hugging Face Hub (HF_ENDPOINT, a mirror) that are made to harm: each is refused with one line, and
nothing is written outside the cache.
"""

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pdserve.models.loading.catalog import WEIGHT_FILE, WEIGHT_INDEX
from pdserve.models.loading.hub import find_on_hub
from tests.cluster.servers import python_path
from tests.hub_server import COMMIT, FakeHub, hub_of_this_process, serving
from tests.models.loading.refusals import files_below, read_model, refused
from tests.models.loading.test_hostile_models import ENTRY, safetensors
from tests.server.http_harness import write_byte_model

MODEL = "acme/tiny"
INFO, TREE = f"/api/models/{MODEL}", f"/api/models/{MODEL}/tree/{COMMIT}"
FILE = f"/{MODEL}/resolve/{COMMIT}/"
Spoil = Callable[[FakeHub], None]
Handler = BaseHTTPRequestHandler


def with_header(name: str, value: str) -> Spoil:
    return lambda hub: hub.headers.update({name: value})


def answer(handler: Handler, status: int, body: bytes = b"", /, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Connection", "close")
    for name, value in (
        {"Content-Length": str(len(body))} | {k.replace("_", "-"): v for k, v in headers.items()}
    ).items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        with contextlib.suppress(OSError):
            handler.wfile.write(body)


def with_answer(path: str, send: Callable[[Handler], None], method: str | None = None) -> Spoil:
    """Another answer to requests whose path begins like this."""

    def instead(handler: Handler, asked: str) -> bool:
        if not asked.startswith(path) or handler.command != (method or handler.command):
            return False
        send(handler)
        return True

    return lambda hub: setattr(hub, "instead", instead)


def with_json(path: str, value: object) -> Spoil:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return with_answer(path, lambda handler: answer(handler, 200, text))


def info(**fields: object) -> dict[str, object]:
    siblings = [{"rfilename": name, "size": 9} for name in ("config.json", "tokenizer.json", WEIGHT_FILE)]
    return {"_id": "1", "id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings, "tags": []} | fields


def endless(handler: Handler, chunk: bytes = b" " * (1 << 20)) -> None:
    handler.send_response(200)
    handler.send_header("Connection", "close")  # else a client may use the connection again while it is closed
    handler.send_header("ETag", f'"{COMMIT}"')
    handler.send_header("X-Repo-Commit", COMMIT)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while handler.command != "HEAD":
            handler.wfile.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")


def longer_than_told(handler: Handler) -> None:
    if handler.command == "HEAD":
        answer(handler, 200, b"x" * 1000, ETag=f'"{COMMIT}"', X_Repo_Commit=COMMIT)
    else:
        endless(handler)


def cut_off(handler: Handler) -> None:
    handler.send_response(200)
    for name, value in {"ETag": f'"{COMMIT}"', "X-Repo-Commit": COMMIT, "Content-Length": "100000"}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(b"x" * 100)


def to(target: str, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: answer(handler, 302, Location=target, **headers)


def next_page(handler: Handler) -> None:
    page = json.dumps([{"type": "file", "path": "a", "size": 1, "oid": COMMIT}]).encode()
    answer(
        handler,
        200,
        page,
        Link=f'<{handler.headers["Host"]}>; rel="next"'.replace("<", "<http://").replace(">", TREE + ">", 1),
    )


FILE_HEADERS = {"ETag": f'"{COMMIT}"', "X_Repo_Commit": COMMIT}
OUT = "../../../../../outside"
HEX = "must be 40 to 64 hexadecimal digits, got"

ENDPOINTS: dict[str, tuple[Spoil, str]] = {
    "ETag with a path": (with_header("ETag", f'"{OUT}"'), f"resolve/{COMMIT}/.*: ETag {HEX} '{OUT}'"),
    "ETag with an absolute path": (with_header("ETag", '"/tmp/outside"'), f"ETag {HEX} '/tmp/outside'"),
    "weak ETag with a path": (with_header("ETag", f'W/"{OUT}"'), f"ETag {HEX} '{OUT}'"),
    "linked ETag with a path": (with_header("X-Linked-Etag", f'"{OUT}"'), f"ETag {HEX} '{OUT}'"),
    "short ETag": (with_header("ETag", '"abc"'), f"ETag {HEX} 'abc'"),
    "ETag of a redirect to another host": (
        with_answer(FILE, to("http://localhost:1/a", ETag=f'"{OUT}"', X_Repo_Commit=COMMIT), "HEAD"),
        f"ETag {HEX} '{OUT}'",
    ),
    "commit of a file with a path": (with_header("X-Repo-Commit", OUT), f"X-Repo-Commit {HEX} '{OUT}'"),
    "commit of a missing file with a path": (
        with_answer(FILE, lambda handler: answer(handler, 404, X_Repo_Commit=OUT, X_Error_Code="EntryNotFound")),
        f"X-Repo-Commit {HEX} '{OUT}'",
    ),
    "Xet hash with a path": (with_header("X-Xet-Hash", OUT), f"X-Xet-Hash {HEX} '{OUT}'"),
    "commit with a path": (with_json(INFO, info(sha=OUT)), f"{INFO}: sha {HEX} '{OUT}'"),
    "commit a number": (with_json(INFO, info(sha=7)), f"sha {HEX} 7"),
    "short commit": (with_json(INFO, info(sha="abc")), f"sha {HEX} 'abc'"),
    "no commit": (with_json(INFO, info(sha=None)), "does not answer as a Hub does: AssertionError"),
    "file name that leads out": (
        with_json(INFO, info(siblings=[{"rfilename": "../../a.gguf"}])),
        "the name of a file must be inside the repository, got '../../a.gguf'",
    ),
    "absolute file name": (
        with_json(INFO, info(siblings=[{"rfilename": "/etc/passwd"}])),
        "the name of a file must be inside the repository, got '/etc/passwd'",
    ),
    "file name a number": (with_json(INFO, info(siblings=[{"rfilename": 7}])), "the name of a file must be .* got 7"),
    "blob with a path": (
        with_json(INFO, info(siblings=[{"rfilename": "a", "blobId": OUT}])),
        f"blobId of 'a' {HEX} '{OUT}'",
    ),
    "listed file name that leads out": (
        with_json(TREE, [{"type": "file", "path": "a/../../b", "size": 1, "oid": COMMIT}]),
        "the name of a file must be inside the repository, got 'a/../../b'",
    ),
    "listed hash with a path": (
        with_json(TREE, [{"type": "file", "path": "a", "size": 1, "oid": COMMIT, "lfs": {"oid": OUT, "size": 1}}]),
        f"oid of 'a' {HEX} '{OUT}'",
    ),
    "list of numbers": (with_json(TREE, [1, 2]), "does not answer as a Hub does: TypeError"),
    "entry without fields": (with_json(TREE, [{"type": "file"}]), "does not answer as a Hub does: KeyError"),
    "info a list": (with_json(INFO, [1]), "does not answer as a Hub does: TypeError"),
    "siblings a number": (with_json(INFO, info(siblings=7)), "does not answer as a Hub does: TypeError"),
    "info no JSON": (with_json(INFO, b"<html>"), "cannot be reached .*and it is not in the cache"),
    "deep info": (with_json(INFO, b'{"a":' * 100_000), "the JSON of the answer is nested too deeply"),
    "info of many values": (
        with_json(INFO, b"[" + b"1," * 2_000_000),
        "must have at most 1048576 JSON values, and may",
    ),
    "endless info": (with_answer(INFO, endless), f"{INFO}: the answer must have at most 16777216 bytes"),
    "packed info": (
        with_answer(INFO, lambda handler: answer(handler, 200, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")),
        "Content-Encoding must be identity, got 'gzip'",
    ),
    "endless pages": (with_answer(TREE, next_page), "more than 100 pages"),
    "info that leads to itself": (with_answer(INFO, to(INFO)), "Exceeded maximum allowed redirects"),
    "info that leads to a file here": (
        with_answer(INFO, to("file:///etc/passwd")),
        "/etc/passwd: the endpoint leads to an address that is not of http",
    ),
    "endless redirect": (with_answer(INFO, lambda handler: endless_redirect(handler)), "must have at most 65536 bytes"),
    "file that leads to itself": (with_answer(FILE, to(FILE + "config.json", **FILE_HEADERS)), "Exceeded .* redirects"),
    "file that leads to a file here": (
        with_answer(FILE, to("file:///etc/passwd", **FILE_HEADERS)),
        "/etc/passwd: the endpoint leads to an address that is not of http",
    ),
    "file longer than told": (
        with_answer(FILE, longer_than_told),
        "the content must be as long as announced, got 'more th",
    ),
    "file without a length": (
        with_answer(FILE, endless),
        "the content must be as long as announced, got 'more than 671",
    ),
    "file always cut off": (
        with_answer(FILE, cut_off),
        "3 connections were lost: peer closed connection|Server disconnected without sending a response",
    ),
    "file of a negative length": (
        with_header("X-Linked-Size", "-1"),
        "Content-Length must be a number of bytes, got '-1'",
    ),
    "file of a huge length": (
        with_header("X-Linked-Size", "9" * 18),
        "config.json|json: Content-Length must be at most 67108",
    ),
    "file of a length with 5,000 digits": (
        with_header("X-Linked-Size", "9" * 5000),
        "Content-Length must be a number of",
    ),
    "file shorter than told": (with_header("X-Linked-Size", "12345"), "file should be of size 12345 but has size"),
    "packed file": (with_header("Content-Encoding", "gzip"), "Content-Encoding must be identity, got 'gzip'"),
    "configuration of another kind": (
        with_answer(FILE + "config.json", lambda handler: answer(handler, 200, b"[1]", **FILE_HEADERS)),
        "config.json: expected a JSON object",
    ),
}


def endless_redirect(handler: Handler) -> None:
    handler.send_response(302)
    handler.send_header("Connection", "close")
    handler.send_header("Location", INFO)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # between the tries of the library
    monkeypatch.setattr("pdserve.models.formats.hub_client._MOST_PAGES", 100)
    model = write_byte_model(tmp_path / "hub" / MODEL)
    (model / WEIGHT_FILE).write_bytes(safetensors({"a": ENTRY}))
    with hub_of_this_process(tmp_path / "hub", tmp_path / "cache", monkeypatch) as server:
        yield server


def download() -> None:
    found = find_on_hub(MODEL, None)
    assert found is not None
    read_model(found.download())


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_hostile_endpoint_is_refused(kind: str, hub: FakeHub, tmp_path: Path) -> None:
    spoil, named = ENDPOINTS[kind]
    spoil(hub)
    before = files_below(tmp_path, without=tmp_path / "cache")
    with refused(named):
        download()
    assert files_below(tmp_path, without=tmp_path / "cache") == before


def test_endpoint_is_used_where_nothing_is_wrong(hub: FakeHub) -> None:
    download()
    assert WEIGHT_FILE in hub.downloaded


def test_index_from_an_endpoint_names_files_of_the_repository(hub: FakeHub) -> None:
    model = hub.root / MODEL
    (model / WEIGHT_FILE).rename(model / "a.safetensors")
    for name in ("/etc/passwd", "../../../../etc/passwd", "*"):
        (model / WEIGHT_INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with refused(f"index.json names '{name}', which is not inside" if "/" in name else r"\* is missing"):
            download()
        shutil.rmtree(hub.root.parent / "cache")
    assert "a.safetensors" not in hub.downloaded


def test_token_is_not_sent_to_another_host(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(tmp_path / "hub") as other:
        target = other.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        with_answer(FILE, lambda handler: to(target + handler.path, **FILE_HEADERS)(handler))(hub)
        with contextlib.suppress(Exception):
            download()
    assert other.requests
    assert other.tokens == {None}
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.parametrize("kind", ["ETag with a path", "endless info"])
def test_command_ends_with_one_line(kind: str, hub: FakeHub, tmp_path: Path) -> None:
    spoil, named = ENDPOINTS[kind]
    spoil(hub)
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    command = (sys.executable, "-P", "-m", "pdserve.server", "serve", "--model", MODEL)
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pdserve: error:")]
    assert "Traceback" not in done.stderr
    assert re.search(named, line), line
