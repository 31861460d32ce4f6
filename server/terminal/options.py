"""The options of `pdserve chat` and `pdserve top`. Light: every command imports it."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from ...configs.flags import Flag, add_flags, fields_of, given_flags, read_options
from ...configs.load import SECRET_VARIABLES, secrets_in
from ...configs.setting_types import SPLIT_COMMAS

DECODE_URL, PREFILL_URL = "http://127.0.0.1:8200", "http://127.0.0.1:8100"
"""The ports that servers have by default."""
NEEDS_KEY = f"needs an API key: set {SECRET_VARIABLES['api_key']}"
WRONG_KEY = f"refuses the API key in {SECRET_VARIABLES['api_key']}"
_KEY = f"For servers with an API key, set {SECRET_VARIABLES['api_key']}."


def _check_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT")
    return text.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_check_url)]


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """The flags have the names of curl's."""

    cacert: Annotated[
        str | None, Flag(metavar="FILE"), Field(description="certificates to trust instead of the system's; for https")
    ] = None
    insecure: Annotated[
        bool, Flag(short=("-k",), switch=True), Field(description="trust any certificate; for https")
    ] = False


SYSTEM_TLS = TlsOptions()
"""Trusts the certificates of the system."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: Annotated[ServerUrl, Field(description="URL of a decode server")] = DECODE_URL
    system: Annotated[str | None, Flag(metavar="TEXT"), Field(description="system message; /system changes it")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="maximum tokens of an answer; default: the server's")] = (
        None
    )
    temperature: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, description="0 is greedy; default: the model's")
    ] = None
    api_key: str | None = None
    tls: TlsOptions = SYSTEM_TLS


@dataclass(frozen=True, slots=True)
class TopOptions:
    urls: Annotated[
        tuple[ServerUrl, ...],
        SPLIT_COMMAS,
        Flag("--url", metavar="URL", default=f"{DECODE_URL} and {PREFILL_URL}"),
        Field(description="URL of a server; repeat it for several"),
    ] = (DECODE_URL, PREFILL_URL)
    interval_s: Annotated[
        float, Flag("--interval"), Field(ge=0.1, allow_inf_nan=False, description="seconds between two frames")
    ] = 1.0
    once: Annotated[
        bool, Flag(switch=True), Field(description="print one frame, measured over one interval, and exit")
    ] = False
    api_key: str | None = None
    tls: TlsOptions = SYSTEM_TLS


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, fields_of(ChatOptions), ("url", "system", "max_tokens", "temperature"))
    add_tls_flags(parser)
    parser.epilog = f"{_KEY} Without a terminal, every line of stdin is a message, and only answers are printed."


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, fields_of(TopOptions), ("urls", "interval_s", "once"))
    add_tls_flags(parser)
    parser.epilog = f"{_KEY} Ctrl-C ends it."


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_mutually_exclusive_group(), fields_of(TlsOptions), ("cacert", "insecure"))


def read_chat_options(given: argparse.Namespace, environ: Mapping[str, str]) -> ChatOptions:
    return read_options(ChatOptions, given_flags(given, fields_of(ChatOptions)) | client_options(given, environ))


def read_top_options(given: argparse.Namespace, environ: Mapping[str, str]) -> TopOptions:
    return read_options(TopOptions, given_flags(given, fields_of(TopOptions)) | client_options(given, environ))


def client_options(given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, object]:
    """The options that every HTTP client has, beside its URL."""
    tls = read_options(TlsOptions, given_flags(given, fields_of(TlsOptions)))
    return {"api_key": secrets_in(environ).get("api_key"), "tls": tls}
