"""Loading of settings: precedence and error messages."""

import json
import secrets
from pathlib import Path

import pytest
from pydantic import ValidationError

from pdserve.common.errors import StartupError
from pdserve.configs.load import (
    PRESETS,
    Role,
    find_config_file,
    load_config,
    parse_config,
    public_dict,
    read_config_file,
    revealed_dict,
)
from pdserve.configs.schema import DecodeConfig, PrefillConfig

SECRET = "a secret of many characters"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "server.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "page_size: 32\nport: 9000\nprefill: [a:1, b:2]\n")
    config = load_config("decode", file, {"port": "9001", "verify_kv": True}, {})
    assert isinstance(config, DecodeConfig)
    assert (config.page_size, config.port, config.verify_kv) == (32, 9001, True)
    assert config.prefill == ("a:1", "b:2")
    assert config.max_running_requests == DecodeConfig().max_running_requests


def test_flags_are_parsed_into_the_types_of_the_schema() -> None:
    config = load_config(
        "decode", None, {"prefill": "a:1, b:2", "kv_memory_gib": "1.5", "threads": "2", "queue_timeout_s": "3"}, {}
    )
    assert isinstance(config, DecodeConfig)
    assert (config.prefill, config.kv_memory_gib, config.threads) == (("a:1", "b:2"), 1.5, 2)
    assert config.queue_timeout_s == 3.0


def test_secrets_come_from_a_flag_else_the_environment_else_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "api_key: from-file\n")
    environ = {"PDSERVE_API_KEY": "from-environment", "PDSERVE_CLUSTER_KEY": ""}

    def api_key(flags: dict[str, str | bool], variables: dict[str, str]) -> str:
        secret = load_config("prefill", file, flags, variables).api_key
        assert secret is not None
        return secret.get_secret_value()

    assert api_key({"api_key": "from-flag"}, environ) == "from-flag"
    assert api_key({}, environ) == "from-environment"
    assert api_key({}, {}) == "from-file"
    assert load_config("prefill", file, {}, environ).cluster_key is None, "an empty variable is no key"


def test_secret_is_read_from_a_file_named_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\n", encoding="utf-8")
    config = load_config("prefill", None, {"host": "0.0.0.0"}, {"PDSERVE_CLUSTER_KEY_FILE": str(tmp_path / "key")})
    assert config.cluster_key is not None
    assert config.cluster_key.get_secret_value() == SECRET
    with pytest.raises(StartupError, match=r"PDSERVE_CLUSTER_KEY_FILE: cannot read .*absent"):
        load_config("prefill", None, {}, {"PDSERVE_CLUSTER_KEY_FILE": str(tmp_path / "absent")})


def test_empty_api_key_is_refused(tmp_path: Path) -> None:
    """With an empty key, every client would be authorized."""
    (tmp_path / "key").touch()
    with pytest.raises(StartupError, match=r"^api_key: must have at least 1 character \(.*, got a secret from the env"):
        load_config("decode", None, {}, {"PDSERVE_API_KEY_FILE": str(tmp_path / "key")})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PDSERVE_APIKEY", "PDSERVE_API_KEY"),
        ("PDSERVE_API_KEYS", "PDSERVE_API_KEY"),
        ("PDSERVE_CLUSTERKEY_FILE", "PDSERVE_CLUSTER_KEY_FILE"),
    ],
)
def test_misspelt_variable_of_a_secret_is_refused(name: str, meant: str) -> None:
    with pytest.raises(StartupError, match=rf"^{name} in the environment is not known: did you mean {meant}\?$"):
        load_config("decode", None, {}, {name: SECRET})


def test_other_variables_are_ignored() -> None:
    """Kubernetes sets such variables for a Service with the name pdserve."""
    others = ("PDSERVE_PORT", "PDSERVE_SERVICE_HOST", "PDSERVE_PORT_8200_TCP_ADDR", "PDSERVE_CLIENTS", "PDSERVE_URL")
    assert load_config("decode", None, {}, dict.fromkeys(others, "tcp://10.0.0.1:8200")) == DecodeConfig()


@pytest.mark.parametrize(
    "name", ["PDSERVE_CLUSTER_NAME", "PDSERVE_CLUSTER", "PDSERVE_PID_FILE", "PDSERVE_SSL_KEYFILE", "PDSERVE_API_KEY_ID"]
)
def test_variables_that_resemble_those_of_secrets_are_ignored(name: str) -> None:
    assert load_config("decode", None, {}, {name: "x"}) == DecodeConfig()


def test_misspelt_variable_is_ignored_if_the_secret_is_set() -> None:
    config = load_config("decode", None, {}, {"PDSERVE_API_KEY": SECRET, "PDSERVE_API_KEY_2": SECRET})
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == SECRET


@pytest.mark.parametrize(
    "key", ["x" * 32, "passwordpassword", "0123456789abcdef" * 2, "correct horse battery", "abcd1234efgh5678"]
)
def test_weak_cluster_key_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match=r"the minimum is 2\^50; make one with: openssl rand -hex 32") as refused:
        load_config("decode", None, {}, {"PDSERVE_CLUSTER_KEY": key})
    assert str(refused.value).startswith("cluster_key from the environment is too weak: about 2^")
    assert key not in str(refused.value)


@pytest.mark.parametrize(
    "key",
    ["8f3a92c17b04e65d", secrets.token_hex(16), secrets.token_hex(64), secrets.token_urlsafe(24), SECRET],
    ids=["16 digits", "32 digits", "128 digits", "base64", "a phrase"],
)
def test_random_keys_and_long_phrases_are_accepted(key: str) -> None:
    config = load_config("prefill", None, {"cluster_key": key}, {})
    assert config.cluster_key is not None


@pytest.mark.parametrize(
    ("role", "text", "flags", "expected"),
    [
        ("decode", "page-size: 8", {}, ["unknown setting 'page-size' in {file}: did you mean page_size?"]),
        ("decode", "pagesize: 8", {}, ["unknown setting 'pagesize' in {file}: did you mean page_size"]),
        ("decode", "chunk_size: 8", {}, ["'chunk_size' in {file}: it is a setting of 'pdserve prefill' only"]),
        ("decode", "max-num-seqs: 8", {}, ["setting 'max-num-seqs' in {file}: here it is max_running_requests"]),
        ("decode", "enforce_eager: true", {}, ["setting 'enforce_eager' in {file}: here it is 'cuda_graphs: false'"]),
        ("decode", "qqq: 8", {}, ["unknown setting 'qqq' in {file}"]),
        ("prefill", "role: decode", {}, ["role: must be 'prefill', got 'decode' in {file}"]),
        ("decode", "port: 0", {}, ["port: must be greater than or equal to 1, got 0 in {file}"]),
        ("decode", "", {"port": "70000"}, ["port: must be less than or equal to 65535, got '70000' from the"]),
        ("decode", "", {"page_size": "many"}, ["page_size: must be a whole number, got 'many' from the command line"]),
        ("decode", "page_size: 1.5", {}, ["page_size: must be a whole number, got 1.5 in {file}"]),
        ("decode", "verify_kv: often", {}, ["verify_kv: must be true or false, got 'often' in {file}"]),
        ("decode", "model: 7", {}, ["model: must be text, got 7 in {file}"]),
        ("decode", "", {"device": "gpu"}, ["device: not of the expected form (auto, cpu, cuda or cuda:N), got"]),
        ("decode", "prefill: [a:1, b]", {}, ["prefill[1]: not of the expected form", "HOST:PORT", "got 'b' in {file}"]),
        ("decode", "kv_tokens: 9\nkv_memory_gib: 1", {}, ["kv_tokens and kv_memory_gib both size the KV pool"]),
        ("prefill", "host: 0.0.0.0", {}, ["host 0.0.0.0 exposes the control port", "PDSERVE_CLUSTER_KEY"]),
        ("prefill", "port: 8998", {}, ["HTTP port and bootstrap_port of prefill are both 8998: choose"]),
        ("decode", "- a\n- b", {}, ["{file}: must hold settings as 'name: value' lines, found list"]),
        ("decode", "port: [", {}, ["{file}: not valid YAML: while parsing"]),
        ("decode", "tp: 2\npp: 2\ntp: 4", {}, ["{file}: not valid YAML: 'tp' is given twice", "line 3"]),
        ("decode", "kv_memory_gib: .inf", {}, ["kv_memory_gib: must be a finite number, got inf in {file}"]),
        ("decode", "", {"queue_timeout_s": "inf"}, ["queue_timeout_s: must be a finite number, got 'inf' from the"]),
        ("decode", "", {"host": "0.0.0.0"}, ["host '0.0.0.0' is not where peers can send KV: set advertise_host"]),
        ("decode", "", {"advertise_host": "::1"}, ["advertise_host '::1' is not where peers can send KV"]),
    ],
)  # fmt: skip
def test_invalid_setting_is_reported_in_one_line_with_its_name(
    tmp_path: Path, role: Role, text: str, flags: dict[str, str | bool], expected: list[str]
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(StartupError) as caught:
        load_config(role, file, flags, {})
    (line,) = str(caught.value).splitlines()
    for part in expected:
        assert part.format(file=file) in line


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(StartupError) as caught:
        load_config("decode", None, {"port": "0", "page_size": "0", "dtype": "int3"}, {})
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["dtype", "page_size", "port"]


def test_invalid_secret_is_not_shown(tmp_path: Path) -> None:
    file = write(tmp_path, "api_key: [12345678]\n")
    with pytest.raises(StartupError) as caught:
        load_config("decode", file, {}, {})
    assert "api_key: " in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_parse_config_is_the_inverse_of_revealed_dict() -> None:
    for role in ("prefill", "decode"):
        flags: dict[str, str | bool] = {"cluster_key": SECRET, "page_size": "64", "threads": "3"}
        config = load_config(role, None, flags, {})
        revealed = json.dumps(revealed_dict(config))
        assert SECRET in revealed
        assert parse_config(json.loads(revealed)) == config
    with pytest.raises(ValidationError):
        parse_config({"role": "decode", "port": 0})


def test_public_dict_is_json_without_secrets() -> None:
    config = load_config("prefill", None, {"cluster_key": SECRET, "api_key": "short-key"}, {})
    text = json.dumps(public_dict(config))
    assert SECRET not in text
    assert "short-key" not in text
    assert json.loads(text)["bootstrap_port"] == 8998


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_presets_are_valid_for_both_roles(preset: Path, role: Role) -> None:
    assert find_config_file(preset.stem) == preset
    assert read_config_file(preset)
    config = load_config(role, preset, {"advertise_host": "this-machine"}, {"PDSERVE_CLUSTER_KEY": SECRET})
    assert config.model_fields_set > {"cluster_key"}


def test_config_path_takes_precedence_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("local").write_text("port: 1\n", encoding="utf-8")
    assert load_config("prefill", find_config_file("local"), {}, {}) == PrefillConfig(port=1)
    with pytest.raises(StartupError, match=r"--config locale: no such file, and no preset .*container, local"):
        find_config_file("locale")
    with pytest.raises(StartupError, match=r"--config \./container: no such file"):
        find_config_file("./container")
    with pytest.raises(StartupError, match="Is a directory"):
        read_config_file(tmp_path)


def test_server_that_receives_no_kv_may_bind_to_all_addresses() -> None:
    """For example `pdserve serve` in a container. The ports of Mooncake stay on loopback."""
    alone = {"local_prefill": "always", "host": "0.0.0.0"}
    config = load_config("decode", None, alone, {})
    assert (config.host, config.public_host) == ("0.0.0.0", "127.0.0.1")
    assert load_config("decode", None, {**alone, "host": "10.0.0.7"}, {}).public_host == "127.0.0.1"
    assert load_config("decode", None, {**alone, "advertise_host": "me"}, {}).public_host == "me"
    for other in ({"prefill": "10.0.0.1:8998"}, {"kv_store": "mooncake://10.0.0.1:50051"}, {"local_prefill": "auto"}):
        with pytest.raises(StartupError, match="set advertise_host"):
            load_config("decode", None, {**alone, **other}, {})
        assert load_config("decode", None, {**alone, **other, "host": "10.0.0.7"}, {}).public_host == "10.0.0.7"
