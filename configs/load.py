"""Loads one validated configuration from a YAML file, flags and the environment; dumps and parses it for processes.

Precedence: flags, then the environment (secrets only), then the file, then the schema's defaults. Errors become a
`StartupError` with one line per problem, which names field, limit, value and source.
"""

import difflib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..common.errors import StartupError
from ..common.machine.address import own_address
from ..common.words import counted
from .key_strength import HOW_TO_MAKE_ONE, describe_weak_key
from .other_names import setting_of_others
from .schema import AnyServerConfig, DecodeConfig, PrefillConfig, ServerConfig

Role = Literal["prefill", "decode"]
ConfigT = TypeVar("ConfigT", bound=ServerConfig)

CONFIG_OF_ROLE: Mapping[Role, type[PrefillConfig] | type[DecodeConfig]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}

SECRET_VARIABLES = {
    "api_key": "PDSERVE_API_KEY",
    "cluster_key": "PDSERVE_CLUSTER_KEY",
    "ssl_keyfile_password": "PDSERVE_SSL_KEYFILE_PASSWORD",
}
"""Environment variable of each secret; the same name with `_FILE` names a file that holds it (container secrets)."""

_PREFIX = "PDSERVE_"
_SAME_WORD = 0.85
"""Similarity of a name and a misspelling of it, which has one or two wrong characters."""

PRESETS = Path(__file__).parent / "presets"

_PARSED_CONFIG: TypeAdapter[AnyServerConfig] = TypeAdapter(Annotated[AnyServerConfig, Field(discriminator="role")])

_WORDING = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys; YAML's own takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(
    role: Role, file: Path | None, flags: Mapping[str, str | bool], environ: Mapping[str, str]
) -> AnyServerConfig:
    """The configuration of one server. `flags` holds only the given flags, by field name.

    Raises StartupError for an unreadable file, an unknown key or a value outside its limits.
    """
    return build_config(
        CONFIG_OF_ROLE[role],
        (
            (f"in {file}", read_config_file(file)),
            ("from the environment", secrets_in(environ)),
            ("from the command line", flags),
        ),
    )


def build_config(model: type[ConfigT], layers: Sequence[tuple[str, Mapping[str, object]]]) -> ConfigT:
    """Validate settings given as (source, name -> value); later layers win. Raises StartupError."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, given in layers:
        values.update(given)
        origins.update(dict.fromkeys(given, origin))
    unknown = [
        f"unknown setting {key!r} {origins[key]}{_hint(model, key)}" for key in values if key not in model.model_fields
    ]
    if unknown:
        raise StartupError("\n".join(unknown))
    if values.get("advertise_host") == "auto":
        try:
            values["advertise_host"] = own_address()
        except ValueError as error:
            raise StartupError(f"advertise_host auto: {error}: give an address") from None
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        raise StartupError("\n".join(_explain(model, problem, origins) for problem in error.errors())) from None
    if config.cluster_key is not None:
        weakness = describe_weak_key(config.cluster_key.get_secret_value())
        if weakness is not None:
            raise StartupError(f"cluster_key {origins['cluster_key']} {weakness}")
    return config


def config_in_role(
    role: Role, current: AnyServerConfig, earlier: AnyServerConfig | None, given: Mapping[str, object]
) -> AnyServerConfig:
    """The configuration of a running server in another role.

    Settings of both roles and the port stay as in `current`. The others are those of `earlier`, its last configuration
    in `role`, and of `given`, which wins. Raises StartupError.
    """
    shared = {*ServerConfig.model_fields, "port"}
    fixed = [
        f"setting {name!r} cannot change with the role: it is a setting of both roles"
        for name in given
        if name in shared
    ]
    if "role" in given:
        fixed.append("unknown setting 'role' in settings: role is a field beside settings")
    if fixed:
        raise StartupError("\n".join(fixed))
    kept = {name: getattr(current, name) for name in (*current.model_fields_set, "port") if name in shared}
    own = {} if earlier is None else {name: getattr(earlier, name) for name in earlier.model_fields_set - shared}
    layers = (("from the start", kept), (f"from the last time as {role}", own), ("in settings", given))
    return build_config(CONFIG_OF_ROLE[role], layers)


def find_config_file(name: str | None) -> Path | None:
    """The file of `--config NAME`: a path, or else the preset of that name in configs/presets. None without a name."""
    if name is None:
        return None
    path = Path(name)
    if path.is_file():
        return path
    preset = PRESETS / f"{name}.yaml"
    if path.name == name and preset.is_file():
        return preset
    names = ", ".join(sorted(found.stem for found in PRESETS.glob("*.yaml")))
    raise StartupError(f"--config {name}: no such file, and no preset of that name (presets: {names})")


def read_config_file(file: Path | None) -> dict[str, object]:
    """The top-level mapping of a YAML file, keys unchecked. No file or an empty one is an empty mapping."""
    if file is None:
        return {}
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise StartupError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{file}: not a UTF-8 text file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number or a date that Python refuses
        raise StartupError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise StartupError(f"{file}: must hold settings as 'name: value' lines, found {type(data).__name__}")
    return data


def secrets_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Secrets from the environment. An empty variable counts as unset: compose files set empty ones.

    Raises StartupError for an unreadable file and for a misspelt name: without its key, a server would be open.
    """
    _check_spelling(environ)
    found: dict[str, str] = {}
    for field, variable in SECRET_VARIABLES.items():
        file = environ.get(f"{variable}_FILE")
        if value := environ.get(variable):
            found[field] = value
        elif file:
            try:
                found[field] = Path(file).read_text(encoding="utf-8").strip(" \t\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise StartupError(f"{variable}_FILE: cannot read {file}: {error}") from None
    return found


def _check_spelling(environ: Mapping[str, str]) -> None:
    """Deployments have variables of their own, such as PDSERVE_CLUSTER_NAME: only names that are almost those of a
    secret that is not given are refused.
    """
    missing = [name for name in SECRET_VARIABLES.values() if not environ.get(name) and not environ.get(f"{name}_FILE")]
    own_parts = [f"{name}{end}".removeprefix(_PREFIX) for name in missing for end in ("", "_FILE")]
    for name in sorted(environ):
        own_part = name.removeprefix(_PREFIX)
        if own_part == name or own_part in own_parts:
            continue
        if near := difflib.get_close_matches(own_part, own_parts, n=1, cutoff=_SAME_WORD):
            raise StartupError(f"{name} in the environment is not known: did you mean {_PREFIX}{near[0]}?")


def revealed_dict(config: AnyServerConfig) -> dict[str, object]:
    """Every field as plain JSON values, secrets **revealed**: for a child's stdin only, never for a log or argv."""
    data = public_dict(config)
    for name in SECRET_VARIABLES:
        secret = getattr(config, name)
        data[name] = secret.get_secret_value() if isinstance(secret, SecretStr) else None
    return data


def parse_config(data: Mapping[str, object]) -> AnyServerConfig:
    """The inverse of `revealed_dict`. Trusts its source: raises pydantic's ValidationError."""
    return _PARSED_CONFIG.validate_python(data)


def public_dict(config: AnyServerConfig) -> dict[str, object]:
    """Every field as plain JSON values, secrets masked: for /server_info and logs."""
    return config.model_dump(mode="json")


def _hint(model: type[ServerConfig], key: str) -> str:
    """A suggestion for an unknown key."""
    for role, other in CONFIG_OF_ROLE.items():
        if key in other.model_fields:
            return f": it is a setting of 'pdserve {role}' only"
    if (instead := setting_of_others(key)) is not None:
        return f": {instead}"
    near = difflib.get_close_matches(key.replace("-", "_"), model.model_fields, n=3, cutoff=0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def explain(problem: ErrorDetails, field: FieldInfo | None) -> str:
    """What is wrong with a value, without the value. `field` is that of the value."""
    if problem["type"] == "string_pattern_mismatch" and field is not None:
        return f"not of the expected form ({field.description})"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _WORDING.get(problem["type"], message)


def _explain(model: type[ServerConfig], problem: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One line for one problem; the value of a secret is not shown."""
    if not problem["loc"]:
        return explain(problem, None)
    field = str(problem["loc"][0])
    message = explain(problem, model.model_fields[field])
    if problem["type"] == "too_short" and field in SECRET_VARIABLES:
        message = f"must have at least {counted(problem['ctx']['min_length'], 'character')} ({HOW_TO_MAKE_ONE})"
    place = field + "".join(f"[{part}]" for part in problem["loc"][1:])
    value = "a secret" if field in SECRET_VARIABLES else repr(problem["input"])
    return f"{place}: {message}, got {value} {origins.get(field, '')}".rstrip()
