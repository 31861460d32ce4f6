"""Versions of installed packages, read from their metadata: importing torch for that would take seconds."""

from functools import cache
from importlib import metadata

from ...transfer.mooncake.library import WHEELS


@cache
def version_of(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def package_version() -> str:
    """The version of pdserve; `unknown` in a checkout that is not installed."""
    return version_of("pdserve") or "unknown"


def mooncake_wheels() -> dict[str, str]:
    """The installed wheels of Mooncake. More than one is a mistake: they overwrite each other's files."""
    return {wheel: version for wheel in WHEELS if (version := version_of(wheel)) is not None}


def installed_versions() -> dict[str, str]:
    """Versions for the labels of `pdserve_build_info`; empty if something is not installed."""
    mooncake = next(iter(mooncake_wheels().values()), "")
    return {"version": version_of("pdserve") or "", "torch": version_of("torch") or "", "mooncake": mooncake}
