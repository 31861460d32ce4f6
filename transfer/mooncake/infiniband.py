"""The InfiniBand and RoCE devices (HCAs) of this machine, and which of them a rank uses (`--ib-device`)."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...common.errors import StartupError

SYSFS: Final = Path("/sys/class/infiniband")

_FORMS: Final = "give a device (mlx5_0), one per local rank (mlx5_0,mlx5_1) or a map (0=mlx5_0,1=mlx5_2, or as JSON)"


def port_states(sysfs: Path = SYSFS) -> dict[str, str]:
    """The state of each device, by name: ACTIVE if one of its ports is, else the state of its first port."""
    return {device.name: _state(device) for device in (sorted(sysfs.iterdir()) if sysfs.is_dir() else ())}


def _state(device: Path) -> str:
    ports: list[str] = []
    for port in sorted((device / "ports").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # the device has just been removed
            ports.append((port / "state").read_text(encoding="ascii").rpartition(":")[2].strip())  # "4: ACTIVE"
    return "ACTIVE" if "ACTIVE" in ports else next(iter(ports), "without ports")


def port_problem(devices: Sequence[str], sysfs: Path = SYSFS) -> str | None:
    """Why none of these devices can be used now, or None if one can."""
    states = {device: _state(sysfs / device) for device in devices}
    if not states or "ACTIVE" in states.values():
        return None
    return "no port is active: " + ", ".join(f"{device} is {state}" for device, state in states.items())


def devices_for_rank(setting: str | None, local_rank: int, *, sysfs: Path = SYSFS) -> tuple[str, ...]:
    """The devices of the rank on GPU `local_rank` of this machine; empty if the machine has no active one.

    Without a setting these are all active devices: Mooncake chooses among them by their distance to the memory. Raises
    StartupError if the setting cannot be parsed or names a device that is missing or down.
    """
    states = port_states(sysfs)
    if setting is None:
        return tuple(name for name, state in states.items() if state == "ACTIVE")
    wanted = _parse(setting, local_rank)
    for name in wanted:
        if states.get(name) != "ACTIVE":
            present = ", ".join(f"{device} ({state})" for device, state in states.items()) or "none"
            found = f"is {states[name]}" if name in states else "does not exist"
            raise StartupError(f"ib_device {name} {found}; devices of this machine: {present}")
    return wanted


def _parse(setting: str, local_rank: int) -> tuple[str, ...]:
    """The devices that a setting names for one rank. Only the JSON map can name several: {"0": "mlx5_0,mlx5_1"}."""
    if setting.lstrip().startswith("{"):
        try:
            entries = msgspec.json.decode(setting, type=dict[int, str])
        except msgspec.MsgspecError as error:
            raise StartupError(f"ib_device is not a map from GPU index to device ({error}): {_FORMS}") from error
        return _names(_entry_of(local_rank, entries, setting), setting)
    names = _names(setting, setting)
    if not any("=" in name for name in names):
        return (names[local_rank % len(names)],)
    by_rank: dict[int, str] = {}
    for name in names:
        index, _, device = name.partition("=")
        if not (index.isdecimal() and device):
            raise StartupError(f"ib_device has {name!r}: {_FORMS}")
        by_rank[int(index)] = device
    return (_entry_of(local_rank, by_rank, setting),)


def _names(text: str, setting: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise StartupError(f"ib_device {setting!r} has an empty name: {_FORMS}")
    return names


def _entry_of(local_rank: int, entries: dict[int, str], setting: str) -> str:
    if local_rank not in entries:
        raise StartupError(f"ib_device names no device for GPU {local_rank}: {setting}")
    return entries[local_rank]
