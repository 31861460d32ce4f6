"""`--advertise-host auto`."""

import socket

import pytest

from pdserve.common.errors import StartupError
from pdserve.configs.load import load_config


def resolve_to(answer: str | OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> str:
        assert name == "container"
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "gethostname", lambda: "container")
    monkeypatch.setattr(socket, "gethostbyname", resolve)


def test_auto_advertises_the_address_of_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to("172.18.0.5", monkeypatch)
    config = load_config("decode", None, {"host": "0.0.0.0", "advertise_host": "auto"}, {})
    assert config.public_host == config.advertise_host == "172.18.0.5"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("127.0.1.1", "container of this machine has the address 127.0.1.1, where peers cannot reach it"),
        (OSError("not known"), "container of this machine has no address: not known"),
    ],
)
def test_auto_does_not_advertise_an_address_that_peers_cannot_reach(
    answer: str | OSError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(answer, monkeypatch)
    with pytest.raises(StartupError) as caught:
        load_config("decode", None, {"host": "0.0.0.0", "advertise_host": "auto"}, {})
    assert str(caught.value) == f"advertise_host auto: the host name {reason}: give an address"
