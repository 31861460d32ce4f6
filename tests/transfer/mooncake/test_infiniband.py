"""Which HCA a rank uses, with fake sysfs trees."""

from pathlib import Path

import pytest

from pdserve.common.errors import StartupError
from pdserve.transfer.mooncake.infiniband import devices_for_rank, port_problem, port_states


def machine(root: Path, **devices: str) -> Path:
    """A sysfs tree with these devices; a value has the state of each port, for example `ACTIVE` or `DOWN,ACTIVE`."""
    numbers = {"DOWN": 1, "INIT": 2, "ACTIVE": 4}
    for device, states in devices.items():
        for port, state in enumerate(states.split(","), start=1):
            path = root / device / "ports" / str(port)
            path.mkdir(parents=True)
            (path / "state").write_text(f"{numbers[state]}: {state}\n")
    return root


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return machine(tmp_path, mlx5_0="ACTIVE", mlx5_1="DOWN,ACTIVE", mlx5_2="DOWN", mlx5_3="ACTIVE")


def test_devices_and_their_states(sysfs: Path) -> None:
    (sysfs / "mlx5_9").mkdir()
    (sysfs / "mlx5_8" / "ports" / "1").mkdir(parents=True)  # is being removed
    assert port_states(sysfs) == {
        "mlx5_0": "ACTIVE",
        "mlx5_1": "ACTIVE",
        "mlx5_2": "DOWN",
        "mlx5_3": "ACTIVE",
        "mlx5_8": "without ports",
        "mlx5_9": "without ports",
    }
    assert port_states(sysfs / "nothing") == {}


def test_devices_have_a_problem_if_no_port_of_them_is_active(sysfs: Path) -> None:
    assert port_problem(("mlx5_2", "mlx5_1"), sysfs) is None
    assert port_problem((), sysfs) is None
    assert port_problem(("mlx5_2", "mlx5_8"), sysfs) == ("no port is active: mlx5_2 is DOWN, mlx5_8 is without ports")


def test_without_a_setting_all_active_devices_are_used(sysfs: Path, tmp_path: Path) -> None:
    assert devices_for_rank(None, 1, sysfs=sysfs) == ("mlx5_0", "mlx5_1", "mlx5_3")
    assert devices_for_rank(None, 0, sysfs=tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("setting", "by_rank"),
    [
        ("mlx5_3", ["mlx5_3", "mlx5_3", "mlx5_3"]),
        ("mlx5_0,mlx5_1", ["mlx5_0", "mlx5_1", "mlx5_0"]),
        (" mlx5_0 , mlx5_3 ", ["mlx5_0", "mlx5_3", "mlx5_0"]),
        ("0=mlx5_3,2=mlx5_1,1=mlx5_0", ["mlx5_3", "mlx5_0", "mlx5_1"]),
        ('{"0": "mlx5_3", "1": "mlx5_0", "2": "mlx5_1"}', ["mlx5_3", "mlx5_0", "mlx5_1"]),
    ],
)
def test_setting_names_a_device_for_each_rank(setting: str, by_rank: list[str], sysfs: Path) -> None:
    assert [devices_for_rank(setting, rank, sysfs=sysfs) for rank in range(3)] == [(name,) for name in by_rank]


def test_json_map_can_give_a_rank_several_devices(sysfs: Path) -> None:
    assert devices_for_rank('{"0": "mlx5_0, mlx5_3"}', 0, sysfs=sysfs) == ("mlx5_0", "mlx5_3")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mlx5_7", r"mlx5_7 does not exist; .*: mlx5_0 \(ACTIVE\), .*, mlx5_2 \(DOWN\), mlx5_3 \(ACTIVE\)$"),
        ("mlx5_2", r"mlx5_2 is DOWN; devices of this machine: mlx5_0"),
        ("1=mlx5_0", "names no device for GPU 0: 1=mlx5_0"),
        ('{"1": "mlx5_0"}', "names no device for GPU 0"),
        ("mlx5_0,,mlx5_1", "has an empty name"),
        ("0=mlx5_0,mlx5_1", "ib_device has 'mlx5_1': give a device"),
        ("gpu=mlx5_0", "ib_device has 'gpu=mlx5_0'"),
        ("0=", "ib_device has '0='"),
        ('{"zero": "mlx5_0"}', "not a map from GPU index to device"),
        ("{0: mlx5_0}", "not a map from GPU index to device"),
    ],
)
def test_invalid_setting_is_refused(setting: str, message: str, sysfs: Path) -> None:
    with pytest.raises(StartupError, match=message):
        devices_for_rank(setting, 0, sysfs=sysfs)


def test_setting_is_refused_on_a_machine_without_devices(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="mlx5_0 does not exist; devices of this machine: none"):
        devices_for_rank("mlx5_0", 0, sysfs=tmp_path)
