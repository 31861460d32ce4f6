"""`/`: files of the live page have a content type and a strict CSP, and scripts use only fields of /server_info."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import SecretStr

from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.counters import DECODE_COUNTERS, PREFILL_COUNTERS
from pdserve.scheduler.messages.frontend import PeerStatus
from pdserve.scheduler.messages.lifecycle import PrefillState, State
from pdserve.server.api.info import ServerReport
from pdserve.server.api.live_page import FOLDER
from pdserve.server.observability.recent_requests import RecentRequest
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server

ROOT = Path(__file__).parents[3]
SCRIPTS = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.js")))


class Page(HTMLParser):
    """The ids and the referenced files of index.html; inline scripts and styles are errors."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.files: list[str] = []
        self.feed((FOLDER / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "style" not in given, f"the CSP refuses inline styles: {tag}"
        assert not [name for name in given if name.startswith("on")], f"the CSP refuses inline scripts: {tag}"
        if (name := given.get("id")) is not None:
            assert name not in self.ids, f"{name} is used twice"
            self.ids.add(name)
        if tag == "script":
            self.files.append(given["src"] or "")
        elif tag == "link" and given["rel"] == "stylesheet":
            self.files.append(given["href"] or "")


async def test_page_and_its_files_are_served_with_types_and_a_strict_policy(decode: RunningServer) -> None:
    paths = {"/": "text/html", **{f"/{name}": "" for name in Page().files}}
    paths |= {f"/page/{name}": "text/javascript" for name in re.findall(r'from "\./([\w.]+)"', SCRIPTS)}
    assert len(paths) > 5
    for path, kind in paths.items():
        response = await decode.http.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"].startswith(kind), path
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert (await decode.http.get("/page/style.css")).headers["content-type"].startswith("text/css")
    assert (await decode.http.head("/")).status_code == 200


async def test_unknown_files_are_not_found(decode: RunningServer) -> None:
    for path in ("/page/none.js", "/page/..%2Fapp.py", "/page/%2e%2e%2finfo.py"):
        assert (await decode.http.get(path)).status_code == 404, path


async def test_page_needs_no_api_key_but_its_data_does(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(api_key=SecretStr("key"))) as server:
        for path in ("/", "/page/main.js"):
            assert (await server.http.get(path)).status_code == 200
        assert (await server.http.get("/server_info")).status_code == 401
        assert "/page/{name}" not in (await server.http.get("/openapi.json")).json()["paths"]


def test_page_loads_nothing_from_other_hosts() -> None:
    for path in FOLDER.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", path.read_text())
        assert [address for address in addresses if "www.w3.org" not in address] == [], path.name


def test_every_element_that_the_scripts_use_exists() -> None:
    used = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPTS)) | {"prefill-side", "decode-side"}
    assert len(used) > 15
    assert used <= Page().ids


@pytest.mark.parametrize(
    ("variable", "known"),
    [
        ("info", ServerReport.__annotations__.keys()),
        ("request", RecentRequest.__annotations__.keys()),
        ("peer", PeerStatus.__struct_fields__),
    ],
)
def test_every_field_that_the_scripts_read_is_in_the_reply(variable: str, known: list[str]) -> None:
    read = set(re.findall(rf"\b{variable}\.(\w+)", SCRIPTS))
    assert len(read) > 4
    assert read <= set(known)


def test_counters_and_gauges_of_the_scripts_exist() -> None:
    counters = set(re.findall(r'since\("(\w+)"\)', SCRIPTS))
    assert len(counters) > 4
    assert counters <= {*DECODE_COUNTERS, *PREFILL_COUNTERS}
    gauges = set(re.findall(r"\bgauges\.(\w+)", SCRIPTS))
    engine = "\n".join(path.read_text() for path in (ROOT / "scheduler").rglob("*.py"))
    assert len(gauges) > 5
    assert [name for name in sorted(gauges) if f'"{name}"' not in engine] == []


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        ("decode", set(State) - {State.ENDED}),
        ("prefill", set(PrefillState) - {PrefillState.CLOSED}),
    ],
)
def test_page_shows_every_state_of_a_request_that_has_not_ended(role: str, shown: set[str]) -> None:
    (flow,) = re.findall(r"const FLOW = \{(.*?)\};", SCRIPTS, re.DOTALL)
    (states,) = re.findall(rf"{role}: \[(.*?)\]", flow, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', states)) == shown
