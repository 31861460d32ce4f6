"""The settings of `pdserve up`: one set of names for a prefill and a decode server on this machine.

A setting applies to each of the two servers that has it. Exceptions: `port` is the port of the decode server, which
clients use, and `prefill_port` that of the prefill server. `host` applies to the decode server only, because the two
servers talk over loopback; `kv_events_port` does, too. Without a cluster key in the environment the pair gets a random
one, because other users of this machine can connect to loopback as well.
"""

import secrets
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import NamedTuple

from pydantic.fields import FieldInfo

from ...common.errors import StartupError
from ...configs.load import PRESETS, build_config, read_config_file, secrets_in
from ...configs.schema import DecodeConfig, PrefillConfig
from .ports import check_port

LOOPBACK = "127.0.0.1"

_DECIDED_HERE = frozenset({"role", "prefill", "advertise_host", "cluster_key", "nnodes", "node_rank", "dist_init_addr"})


class PairConfig(NamedTuple):
    prefill: PrefillConfig
    decode: DecodeConfig


def _pair_fields() -> dict[str, FieldInfo]:
    fields = {**PrefillConfig.model_fields, **DecodeConfig.model_fields}
    prefill_port = copy(PrefillConfig.model_fields["port"])
    prefill_port.description = "HTTP port of the prefill server"
    ports = {"port": fields.pop("port"), "prefill_port": prefill_port}
    return {name: field for name, field in {**ports, **fields}.items() if name not in _DECIDED_HERE}


PAIR_FIELDS: Mapping[str, FieldInfo] = _pair_fields()
"""The settings of `pdserve up`, as flags and in its file."""


def load_pair_config(file: Path | None, flags: Mapping[str, str | bool], environ: Mapping[str, str]) -> PairConfig:
    """Both configurations, from the preset `local`, then `file`, then the environment, then `flags`."""
    given = read_config_file(file)
    for name in sorted(_DECIDED_HERE & given.keys()):
        raise StartupError(f"{name} in {file}: 'pdserve up' sets it itself; remove it")
    layers = (
        ("of 'pdserve up'", {"cluster_key": secrets.token_hex(32)}),
        ("in the preset 'local'", read_config_file(PRESETS / "local.yaml")),
        (f"in {file}", given),
        ("from the environment", secrets_in(environ)),
        ("from the command line", flags),
    )
    prefill = build_config(PrefillConfig, [(origin, _prefill_part(layer)) for origin, layer in layers])
    wiring = {"prefill": (f"{LOOPBACK}:{prefill.bootstrap_port}",), "advertise_host": LOOPBACK}
    decode = build_config(
        DecodeConfig, [*((origin, _decode_part(layer)) for origin, layer in layers), ("of 'pdserve up'", wiring)]
    )
    return PairConfig(prefill, decode)


def check_ports(pair: PairConfig) -> None:
    """Raise StartupError when a port of the pair is taken, naming the flag that changes it."""
    wanted = (
        (pair.decode.host, pair.decode.port, "--port"),
        (pair.prefill.host, pair.prefill.port, "--prefill-port"),
        (pair.prefill.host, pair.prefill.bootstrap_port, "--bootstrap-port"),
        *((pair.decode.host, port, "--kv-events-port") for port in pair.decode.kv_events_ports),
    )
    flags: dict[int, str] = {}
    for _, port, flag in wanted:
        if (other := flags.setdefault(port, flag)) != flag:
            raise StartupError(f"{other} and {flag} are both {port}: choose different ports")
    for host, port, flag in wanted:
        check_port(host, port, flag)


def _prefill_part(layer: Mapping[str, object]) -> dict[str, object]:
    names = PrefillConfig.model_fields.keys() - {"host", "port", "kv_events_port"}
    part = {name: value for name, value in layer.items() if name in names}
    return part | ({"port": layer["prefill_port"]} if "prefill_port" in layer else {})


def _decode_part(layer: Mapping[str, object]) -> dict[str, object]:
    """All settings but those that only prefill has. Unknown names stay in: `build_config` refuses them."""
    others = PrefillConfig.model_fields.keys() - DecodeConfig.model_fields.keys() | {"prefill_port"}
    return {name: value for name, value in layer.items() if name not in others}
