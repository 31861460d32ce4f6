"""The command line of `pdserve doctor`."""

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from ...common.errors import StartupError
from ...configs.flags import add_flags, given_flags
from ...configs.load import find_config_file, load_config
from ...configs.schema import AnyServerConfig, DecodeConfig

SETTINGS = (
    *(
        "model",
        "host",
        "port",
        "advertise_host",
        "device",
        "tp",
        "pp",
        "dp_attention",
        "transport",
        "ib_device",
        "ib_gid_index",
    ),
    "kv_memory_gib",
)
"""Settings of every server that the checks use."""


class DoctorOptions(NamedTuple):
    config: AnyServerConfig
    peers: tuple[str, ...]
    """Control ports of prefill servers, HOST:PORT."""
    measures: bool
    """Measure a transfer."""
    as_json: bool
    strict: bool
    """Exit with 1 if there are warnings."""


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, or the name of a preset; flags win")
    parser.add_argument(
        "--role", choices=("decode", "prefill"), default="decode", help="role of the server that this machine is to run"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="control port of a prefill server for a test handshake; repeat for several (default: prefill of --config)",
    )
    parser.add_argument(
        "--transfer", action=argparse.BooleanOptionalAction, default=True, help="measure a transfer on this machine"
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings and no failure")
    add_flags(parser.add_argument_group("settings"), DecodeConfig.model_fields, SETTINGS)


def read_doctor_options(options: argparse.Namespace, environ: Mapping[str, str]) -> DoctorOptions:
    file = find_config_file(options.config)
    config = load_config(options.role, file, given_flags(options, SETTINGS), environ)
    peers = tuple(options.peer)
    if not peers and file is not None and isinstance(config, DecodeConfig):
        peers = config.prefill
    for peer in peers:
        host, _, port = peer.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise StartupError(f"--peer must be HOST:PORT of a control port, such as 10.0.0.5:8998; got {peer!r}")
    return DoctorOptions(config, peers, options.transfer, options.json, options.strict)
