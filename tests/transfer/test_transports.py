"""The choice of a transport, by what the two sides say of themselves."""

import pytest

from pdserve.configs.errors import StartupError
from pdserve.transfer.messages import Rank
from pdserve.transfer.transports import (
    choose_route,
    describe_transport_mismatch,
    machine_id,
    open_nvlink_receiver,
)

HERE = Rank(0, "127.0.0.1:1", (), machine_id(), "127.0.0.1:2")
ELSEWHERE = Rank(0, "10.0.0.9:1", (), "another machine", "10.0.0.9:2")
TCP_ONLY = Rank(0, "127.0.0.1:1", (), machine_id(), None)


def test_gpus_of_one_machine_write_to_each_other() -> None:
    assert choose_route("auto", HERE, on_gpu=True) == ("nvlink", "127.0.0.1:2")
    assert choose_route("nvlink", HERE, on_gpu=True) == ("nvlink", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("setting", "rank", "on_gpu"),
    [("tcp", HERE, True), ("auto", HERE, False), ("auto", ELSEWHERE, True), ("auto", TCP_ONLY, True)],
)
def test_everything_else_goes_over_tcp(setting: str, rank: Rank, on_gpu: bool) -> None:
    assert choose_route(setting, rank, on_gpu=on_gpu) == ("tcp", rank.session)  # type: ignore[arg-type]


def test_nvlink_that_cannot_be_is_refused_at_pairing() -> None:
    assert describe_transport_mismatch("nvlink", HERE, HERE) is None
    assert "another machine" in str(describe_transport_mismatch("nvlink", HERE, ELSEWHERE))
    assert "tcp only" in str(describe_transport_mismatch("nvlink", HERE, TCP_ONLY))
    assert describe_transport_mismatch("auto", HERE, ELSEWHERE) is None


def test_nvlink_needs_a_pool_on_a_gpu() -> None:
    assert open_nvlink_receiver("auto", "127.0.0.1", 0, 1, on_gpu=False) is None
    assert open_nvlink_receiver("tcp", "127.0.0.1", 0, 1, on_gpu=True) is None
    with pytest.raises(StartupError, match="host memory"):
        open_nvlink_receiver("nvlink", "127.0.0.1", 0, 1, on_gpu=False)
