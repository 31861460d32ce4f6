"""HTTP clients of the commands. They use no proxy for servers of this machine, and check certificates."""

import ssl
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import httpx

from ...common.errors import StartupError
from ...configs.schema import LOOPBACK_HOSTS
from .options import TlsOptions

_HINT = "; --cacert FILE trusts this server's certificate, --insecure trusts any"


_NO_PROXY = {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in LOOPBACK_HOSTS}
"""httpx's `mounts`, which exclude servers of this machine from the environment's proxies: these cannot reach them."""


def open_client(
    urls: Collection[str], tls: TlsOptions, headers: Mapping[str, str], timeout: httpx.Timeout
) -> httpx.Client:
    """A client for these servers. Raises StartupError for a file without certificates, or a proxy of unknown kind."""
    verify = verification(tls)
    if all(urlsplit(url).hostname in LOOPBACK_HOSTS for url in urls):
        # With a transport httpx does not look at the proxies of the environment, some of which it cannot use.
        return httpx.Client(headers=headers, timeout=timeout, transport=httpx.HTTPTransport(verify=verify))
    try:
        return httpx.Client(headers=headers, timeout=timeout, verify=verify, mounts=_NO_PROXY)
    except (ImportError, ValueError) as error:
        raise StartupError(f"the proxy in the environment (all_proxy) cannot be used: {error}") from None


def verification(options: TlsOptions) -> ssl.SSLContext | bool:
    """httpx's `verify`. Raises StartupError for a file without certificates."""
    if options.cacert is None:
        return not options.insecure
    try:
        context = ssl.create_default_context(cafile=options.cacert)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(
            f"--cacert {options.cacert}: cannot be read as certificates in PEM format: {error}"
        ) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may hold the server's certificate itself
    return context


def context(options: TlsOptions) -> ssl.SSLContext:
    """The TLS context for connections without httpx."""
    verify = verification(options)
    if isinstance(verify, ssl.SSLContext):
        return verify
    made = ssl.create_default_context()
    if not verify:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def describe(error: httpx.HTTPError) -> str:
    """The message of an error, with the flags that help if the certificate is not trusted."""
    text = str(error) or type(error).__name__
    return f"{text}{_HINT}" if "CERTIFICATE_VERIFY_FAILED" in text else text
