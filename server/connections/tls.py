"""TLS of the HTTP port: checks the certificate before the model is loaded, and makes a client context for probes."""

import ssl

from ...common.errors import StartupError
from ...configs.schema import AnyServerConfig


def check_tls(config: AnyServerConfig) -> None:
    """Raise StartupError unless the files hold a certificate and its key. Loads them as uvicorn does later."""
    if config.ssl_certfile is None:
        return
    assert config.ssl_keyfile is not None, "the configuration has both or none"
    for field in ("ssl_certfile", "ssl_keyfile"):
        _check_readable(field, getattr(config, field))

    encrypted = False

    def password() -> str:  # OpenSSL would ask for it on the terminal
        nonlocal encrypted
        encrypted = True
        if config.ssl_keyfile_password is None:
            raise StartupError(f"ssl_keyfile {config.ssl_keyfile} is encrypted: set PDSERVE_SSL_KEYFILE_PASSWORD")
        return config.ssl_keyfile_password.get_secret_value()

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except ssl.SSLError as error:
        raise StartupError(_explain(config, error, encrypted)) from None
    except (OSError, ValueError) as error:  # ValueError: a password that OpenSSL cannot take
        raise StartupError(f"ssl_certfile {config.ssl_certfile}, ssl_keyfile {config.ssl_keyfile}: {error}") from None


def own_server_context(config: AnyServerConfig) -> ssl.SSLContext | None:
    """The TLS context of a client on the same machine; None without TLS. It trusts only the server's own certificate,
    and ignores the name in it: the client connects to an address that may not be in the certificate.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the anchor, not its issuer
    context.load_verify_locations(config.ssl_certfile)
    return context


def _check_readable(field: str, path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123 (not read)
            pass
    except OSError as error:
        raise StartupError(f"{field} {path}: {error.strerror}") from None


def _explain(config: AnyServerConfig, error: ssl.SSLError, encrypted: bool) -> str:
    """Finds out which file is wrong: OpenSSL does not say, and its error texts differ between versions."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile {config.ssl_keyfile} is not the key of the certificate in {config.ssl_certfile}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(config.ssl_certfile)
    except ssl.SSLError:
        return f"ssl_certfile {config.ssl_certfile} holds no certificate in PEM format"
    if encrypted:
        return f"ssl_keyfile_password is not the password of {config.ssl_keyfile}"
    return f"ssl_keyfile {config.ssl_keyfile} holds no private key in PEM format"
