"""Versions of what is installed, from its metadata: importing torch takes seconds."""

from functools import cache
from importlib import metadata

from ...transfer.mooncake.library import WHEELS


@cache
def version_of(distribution: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def package_version() -> str:
    """Of pdserve; it may run from a checkout without an install."""
    return version_of("pdserve") or "unknown"


def mooncake_wheels() -> dict[str, str]:
    """The installed wheels of Mooncake. More than one is a mistake: they overwrite each other's files."""
    return {wheel: version for wheel in WHEELS if (version := version_of(wheel)) is not None}


def installed_versions() -> dict[str, str]:
    """Labels of the build; an empty version if something is not installed."""
    mooncake = next(iter(mooncake_wheels().values()), "")
    return {"version": version_of("pdserve") or "", "torch": version_of("torch") or "", "mooncake": mooncake}
