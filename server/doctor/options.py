"""The options of `pdserve doctor`."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from ...configs.flags import Flag, add_config_flag, add_flags, fields_of, given_flags, read_options
from ...configs.load import Role, find_config_file, load_config
from ...configs.schema import AnyServerConfig, DecodeConfig
from ...configs.setting_types import SPLIT_COMMAS

SETTINGS = (
    *("model", "host", "port", "advertise_host", "device", "tp", "pp", "dp_attention", "transport"),
    *("ib_device", "ib_gid_index", "kv_memory_gib"),
)
"""Settings of every server that the checks use."""
_FLAGS = ("role", "peers", "measures", "as_json", "strict")


def _check_peer(peer: str) -> str:
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("must be HOST:PORT of a control port, such as 10.0.0.5:8998")
    return peer


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    config: AnyServerConfig
    role: Annotated[Role, Field(description="role of the server that this machine is to run")] = "decode"
    peers: Annotated[
        tuple[Annotated[str, AfterValidator(_check_peer)], ...],
        SPLIT_COMMAS,
        Flag("--peer"),
        Field(
            description="control port of a prefill server for a test handshake; repeat for several (default: prefill "
            "of --config)"
        ),
    ] = ()
    measures: Annotated[bool, Flag("--transfer"), Field(description="measure a transfer on this machine")] = True
    as_json: Annotated[bool, Flag("--json", switch=True), Field(description="print findings and facts as JSON")] = False
    strict: Annotated[
        bool, Flag(switch=True), Field(description="exit with 1 if there are warnings and no failure")
    ] = False


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser, fields_of(DoctorOptions), _FLAGS)
    add_flags(parser.add_argument_group("settings"), DecodeConfig.model_fields, SETTINGS)


def read_doctor_options(given: argparse.Namespace, environ: Mapping[str, str]) -> DoctorOptions:
    flags = given_flags(given, _FLAGS)
    role: Role = "prefill" if flags.get("role") == "prefill" else "decode"
    config = load_config(role, find_config_file(given.config), given_flags(given, SETTINGS), environ)
    options = read_options(DoctorOptions, {**flags, "config": config})
    if not options.peers and given.config is not None and isinstance(config, DecodeConfig):
        return replace(options, peers=config.prefill)
    return options
