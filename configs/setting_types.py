"""The types of settings: named choices, ports, endpoints, origins and URLs, with the checks of their values."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .allowed_hosts import check_entry

MAX_PORT = 65535


def _split_commas(value: object) -> object:
    """Split a flag such as `a:1,b:2`; a YAML file may have a list."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def check_ports(endpoints: str) -> str:
    """Returns HOST:PORT[,HOST:PORT...], which a scheme may precede. Raises ValueError for a port out of range."""
    for endpoint in endpoints.split(","):
        if not 1 <= int(endpoint.rpartition(":")[2]) <= MAX_PORT:
            raise ValueError(f"the port must be between 1 and {MAX_PORT}")
    return endpoints


def _check_origin(origin: str) -> str:
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", origin) is None:
        raise ValueError("must be * or an origin as browsers send it: scheme://host or scheme://host:port, no path")
    return origin


Endpoint = Annotated[str, Field(pattern=r"^[^\s:/]+:[0-9]{1,5}$", description="HOST:PORT"), AfterValidator(check_ports)]
SPLIT_COMMAS = BeforeValidator(_split_commas)
Endpoints = Annotated[tuple[Endpoint, ...], SPLIT_COMMAS]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], SPLIT_COMMAS]
HostEntries = Annotated[tuple[Annotated[str, AfterValidator(check_entry)], ...], SPLIT_COMMAS]
Port = Annotated[int, Field(ge=1, le=MAX_PORT)]
KvStoreUrl = Annotated[
    str,
    Field(
        pattern=r"^(mooncake://[^\s:/,]+:[0-9]{1,5}|etcd://[^\s:/,]+:[0-9]{1,5}(,[^\s:/,]+:[0-9]{1,5})*)$",
        description="mooncake://HOST:PORT or etcd://HOST:PORT[,HOST:PORT...]",
    ),
    AfterValidator(check_ports),
]
TransportSetting = Literal["auto", "rdma", "nvlink", "tcp"]
LoadFormat = Literal["auto", "dummy"]
DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
KvDtypeSetting = Literal["auto", "fp8_e4m3"]
IndexDtypeSetting = Literal["auto", "model", "fp8_e4m3"]
StagingSetting = Literal["auto", "on", "off"]
LocalPrefillSetting = Literal["auto", "never", "always"]
DispatchSetting = Literal["prefix", "load"]
CpuKernelsSetting = Literal["auto", "numba", "torch"]
ToolParserName = Literal[
    "auto",
    "none",
    "deepseek-v3",
    "deepseek-v31",
    "deepseek-v32",
    "deepseek-v4",
    "glm45",
    "glm47",
    "hermes",
    "hermes-lenient",
    "llama3-json",
    "mistral",
    "mistral-v11",
    "pythonic",
    "qwen3-coder",
]
ReasoningParserName = Literal["auto", "none", "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "mistral", "qwen3"]
