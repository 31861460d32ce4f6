"""The flags of `pdserve chat` and `pdserve top`, as checked objects. Light: every command imports it."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...common.errors import StartupError
from ...configs.load import SECRET_VARIABLES, secrets_in

DECODE_URL, PREFILL_URL = "http://127.0.0.1:8200", "http://127.0.0.1:8100"
"""The ports that servers have by default."""
NEEDS_KEY = f"needs an API key: set {SECRET_VARIABLES['api_key']}"
WRONG_KEY = f"refuses the API key in {SECRET_VARIABLES['api_key']}"
_KEY = f"For servers with an API key, set {SECRET_VARIABLES['api_key']}."


@dataclass(frozen=True, slots=True)
class TlsOptions:
    cacert: str | None = None
    insecure: bool = False


SYSTEM_TLS = TlsOptions()
"""Trusts the certificates of the system."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str
    system: str | None
    max_tokens: int | None
    temperature: float | None
    api_key: str | None
    tls: TlsOptions = SYSTEM_TLS


@dataclass(frozen=True, slots=True)
class TopOptions:
    urls: tuple[str, ...]
    interval_s: float
    once: bool
    api_key: str | None
    tls: TlsOptions = SYSTEM_TLS


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=DECODE_URL, metavar="URL", help=f"URL of a decode server (default: {DECODE_URL})"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message; /system changes it")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum tokens of an answer; default: the server's"
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's")
    add_tls_flags(parser)
    parser.epilog = f"{_KEY} Without a terminal, every line of stdin is a message, and only answers are printed."


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    both = f"URL of a server; repeat it for several (default: {DECODE_URL} and {PREFILL_URL})"
    parser.add_argument("--url", action="append", metavar="URL", help=both)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two frames (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame, measured over one interval, and exit")
    add_tls_flags(parser)
    parser.epilog = f"{_KEY} Ctrl-C ends it."


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the TLS flags, named as those of curl."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--cacert", metavar="FILE", help="certificates to trust instead of the system's; for https")
    either.add_argument("-k", "--insecure", action="store_true", help="trust any certificate; for https")


def read_chat_options(given: argparse.Namespace, environ: Mapping[str, str]) -> ChatOptions:
    if given.temperature is not None and not 0 <= given.temperature < math.inf:
        raise StartupError(f"--temperature must be a number, at least 0, got {given.temperature:g}")
    if given.max_tokens is not None and given.max_tokens < 1:
        raise StartupError(f"--max-tokens must be at least 1, got {given.max_tokens}")
    return ChatOptions(
        server_url(given.url), given.system, given.max_tokens, given.temperature, _key(environ), read_tls_options(given)
    )


def read_top_options(given: argparse.Namespace, environ: Mapping[str, str]) -> TopOptions:
    if not 0.1 <= given.interval < math.inf:
        raise StartupError(f"--interval must be at least 0.1 seconds, got {given.interval:g}")
    urls = tuple(server_url(url) for url in given.url or (DECODE_URL, PREFILL_URL))
    return TopOptions(urls, given.interval, given.once, _key(environ), read_tls_options(given))


def server_url(text: str, flag: str = "--url") -> str:
    """Raises StartupError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(f"{flag} must be http://HOST:PORT, got {text!r}")
    return text.rstrip("/")


def read_tls_options(given: argparse.Namespace) -> TlsOptions:
    return TlsOptions(given.cacert, given.insecure)


def _key(environ: Mapping[str, str]) -> str | None:
    return secrets_in(environ).get("api_key")
