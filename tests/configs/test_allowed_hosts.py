"""Hosts that a request may name as bootstrap_host."""

import pytest

from pdserve.common.errors import StartupError
from pdserve.configs.allowed_hosts import AllowedHosts
from pdserve.configs.load import load_config
from pdserve.configs.schema import DecodeConfig


def allowed(**flags: str) -> AllowedHosts:
    config = load_config("decode", None, flags, {})
    assert isinstance(config, DecodeConfig)
    return config.allowed_bootstrap_hosts


def test_only_configured_hosts_are_allowed_by_default() -> None:
    hosts = allowed(prefill="p1:8998,10.0.0.1:8998")
    assert [hosts.allows(host) for host in ("127.0.0.1", "localhost", "p1", "P1", "10.0.0.1")] == [True] * 5
    assert [hosts.allows(host) for host in ("10.0.0.2", "192.168.1.1", "8.8.8.8", "p2")] == [False] * 4


def test_private_networks_are_allowed_with_an_api_key() -> None:
    """Also with a cluster key, although a hostile listener could try to guess it from the handshake."""
    hosts = allowed(api_key="key", cluster_key="a secret of the whole cluster")
    private = ("10.0.0.2", "172.31.0.1", "192.168.1.1", "fd00::1")
    assert [hosts.allows(host) for host in private] == [True] * 4
    assert [hosts.allows(host) for host in ("8.8.8.8", "172.32.0.1", "169.254.169.254", "2001:db8::1")] == [False] * 4
    assert hosts.allows("prefill-0") is None, "it depends on the address"
    assert hosts.allows_at("prefill-0", "10.0.0.9")
    assert not hosts.allows_at("prefill-0", "8.8.8.8")


def test_bootstrap_allow_replaces_private_networks() -> None:
    hosts = allowed(api_key="key", bootstrap_allow="p1, *.prefill.svc, 10.1.0.0/16, 8.8.8.8", prefill="p0:8998")
    assert [hosts.allows(host) for host in ("p0", "p1", "a.prefill.svc", "10.1.2.3", "8.8.8.8")] == [True] * 5
    assert [hosts.allows(host) for host in ("10.2.0.1", "8.8.4.4")] == [False] * 2
    assert not hosts.allows_at("prefill.svc", "10.2.0.1")
    assert hosts.allows_at("p1", "8.8.4.4"), "its name is trusted"


def test_asterisk_allows_every_host() -> None:
    hosts = allowed(bootstrap_allow="*")
    assert hosts.allows("8.8.8.8")
    assert hosts.allows_at("anything", "8.8.8.8")


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.1/8", "a b", "*.*", "p*"])
def test_invalid_entry_is_refused(entry: str) -> None:
    with pytest.raises(StartupError, match=r"bootstrap_allow\[0\]: .*from the command line"):
        allowed(bootstrap_allow=entry)
