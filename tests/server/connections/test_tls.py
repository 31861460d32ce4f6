"""TLS settings that cannot work are refused before anything starts; test_frontend_process.py serves with TLS."""

from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import SecretStr, ValidationError

from pdserve.common.errors import StartupError
from pdserve.configs.flags import to_flags
from pdserve.configs.load import public_dict
from pdserve.configs.schema import DecodeConfig
from pdserve.server.connections.tls import check_tls, own_server_context
from pdserve.server.launch.pair import load_pair_config
from pdserve.server.launch.up import banner, base_url, server_environ


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, its key with and without a password, the key of another certificate, and a text file."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    certificate = authority.issue_cert("server.example.com")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    authority.issue_cert("other.example.com").private_key_pem.write_to_path(directory / "other.pem")
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open sesame"))
    (directory / "encrypted.pem").write_bytes(encrypted)
    (directory / "text.pem").write_text("nothing of that kind\n")
    return directory


def config_of(files: Path, cert: str = "cert.pem", key: str = "key.pem", password: str | None = None) -> DecodeConfig:
    secret = None if password is None else SecretStr(password)
    return DecodeConfig(ssl_certfile=str(files / cert), ssl_keyfile=str(files / key), ssl_keyfile_password=secret)


def test_matching_certificate_and_key_are_accepted(files: Path) -> None:
    check_tls(DecodeConfig())
    check_tls(config_of(files))
    check_tls(config_of(files, key="encrypted.pem", password="open sesame"))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"cert": "absent.pem"}, "ssl_certfile .*absent.pem: No such file"),
        ({"key": "absent.pem"}, "ssl_keyfile .*absent.pem: No such file"),
        ({"cert": "text.pem"}, "ssl_certfile .*text.pem holds no certificate in PEM format"),
        ({"key": "text.pem"}, "ssl_keyfile .*text.pem holds no private key in PEM format"),
        ({"key": "other.pem"}, "ssl_keyfile .*other.pem is not the key of the certificate in .*cert.pem"),
        ({"key": "encrypted.pem"}, "ssl_keyfile .*encrypted.pem is encrypted: set PDSERVE_SSL_KEYFILE_PASSWORD"),
        ({"key": "encrypted.pem", "password": "wrong"}, "ssl_keyfile_password is not the password of .*encrypted.pem"),
        ({"key": "encrypted.pem", "password": "x" * 2000}, "password cannot be longer"),
    ],
)
def test_unusable_certificates_and_keys_are_refused(files: Path, given: dict[str, str], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        check_tls(config_of(files, **given))


@pytest.mark.parametrize(("given", "missing"), [("ssl_certfile", "ssl_keyfile"), ("ssl_keyfile", "ssl_certfile")])
def test_certificate_needs_a_key_and_a_key_needs_a_certificate(given: str, missing: str) -> None:
    with pytest.raises(ValidationError, match=f"{given} needs {missing}"):
        DecodeConfig.model_validate({given: "a.pem"})


def test_both_servers_of_a_pair_use_tls(files: Path) -> None:
    flags = {"ssl_certfile": str(files / "cert.pem"), "ssl_keyfile": str(files / "encrypted.pem")}
    pair = load_pair_config(None, flags, {"PDSERVE_SSL_KEYFILE_PASSWORD": "open sesame"})
    for server in pair:
        check_tls(server)
        assert base_url(server) == f"https://127.0.0.1:{server.port}"
        assert not [flag for flag in to_flags(server) if "sesame" in flag]
        assert server_environ(server)["PDSERVE_SSL_KEYFILE_PASSWORD"] == "open sesame"
        assert "sesame" not in str(public_dict(server))
        assert own_server_context(server) is not None
    assert any(line.startswith(f"  curl -k https://127.0.0.1:{pair.decode.port}/generate ") for line in banner(pair))
    assert f"  pdserve chat --url https://127.0.0.1:{pair.decode.port} --insecure" in banner(pair)
