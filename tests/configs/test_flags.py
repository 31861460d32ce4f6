"""Command-line flags: each setting has one, and a configuration can be passed on as flags."""

import argparse

import pytest

from pdserve.configs.flags import add_flags, flag_of, given_flags, to_flags
from pdserve.configs.load import CONFIG_OF_ROLE, Role, load_config
from pdserve.server.cli import main, make_parser


def parse(role: Role, arguments: list[str]) -> dict[str, str | bool]:
    fields = CONFIG_OF_ROLE[role].model_fields
    parser = argparse.ArgumentParser()
    add_flags(parser, fields, [name for name in fields if name != "role"])
    return given_flags(parser.parse_args(arguments), fields)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_field_has_a_flag_with_its_default_and_range_in_the_help(role: Role) -> None:
    fields = CONFIG_OF_ROLE[role].model_fields
    parser = argparse.ArgumentParser(prog="p")
    add_flags(parser, fields, [name for name in fields if name != "role"])
    text = " ".join(parser.format_help().split())
    for name in fields:
        assert name == "role" or flag_of(name) in text
    assert "tokens per KV page; prefill and decode may differ (default: 16; 1 to 1024)" in text
    assert "(default: 0.4; above 0, up to 60)" in text
    assert "--verify-kv, --no-verify-kv" in text


def test_only_given_flags_are_reported() -> None:
    assert parse("decode", []) == {}
    assert parse("decode", ["--page-size", "8", "--no-verify-kv"]) == {"page_size": "8", "verify_kv": False}
    assert parse("decode", ["--prefill", "a:1", "--prefill", "b:2,c:3"]) == {"prefill": "a:1,b:2,c:3"}


def test_flag_names_of_sglang_are_accepted() -> None:
    arguments = ["--model-path", "/m", "--disaggregation-bootstrap-port=9", "--chunked-prefill-size", "64"]
    assert parse("prefill", arguments) == {"model": "/m", "bootstrap_port": "9", "chunk_size": "64"}


def test_flags_for_a_child_process_keep_all_settings() -> None:
    flags: dict[str, str | bool] = {
        "prefill": "a:1,b:2",
        "page_size": "8",
        "verify_kv": False,
        "kv_memory_gib": "0.5",
        "served_model_name": "--odd name",
    }
    config = load_config("decode", None, {**flags, "api_key": "hush-hush"}, {})
    arguments = to_flags(config)
    assert "hush" not in " ".join(arguments)
    assert load_config("decode", None, {**parse("decode", arguments), "api_key": "hush-hush"}, {}) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--keep=1", "--seed=x"],
            "--seed must be a whole number, got 'x'\n--keep must be at least 0, below 1",
        ),
        (["bench", "--rate=0"], "--rate must be above 0, got '0'"),
        (["bench", "--dataset=books"], "--dataset must be 'random' or 'sharegpt', got 'books'"),
        (["top", "--url=http://a:1", "--url=b:2"], "--url must be http://HOST:PORT, got 'b:2'"),
        (["top", "--interval=nan"], "--interval must be a finite number, got 'nan'"),
        (["store", "--port=65536"], "--port must be 1 to 65535, got '65536'"),
        (["doctor", "--peer=a"], "--peer must be HOST:PORT of a control port, such as 10.0.0.5:8998, got 'a'"),
        (["plan", "--speed=1"], "--speed is for a load: give --input-len N or --trace FILE, too"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_option_of_a_command_is_named_with_its_limit_and_value(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = [line.removeprefix("pdserve: error: ") for line in capsys.readouterr().err.splitlines()]
    assert "\n".join(lines).startswith(message)


def test_help_of_a_command_has_short_names_switches_and_defaults_as_they_are_typed() -> None:
    shown = {name: " ".join(parser.format_help().split()) for name, parser in subparsers().items()}
    assert "-k, --insecure trust any certificate" in shown["chat"]
    assert "--no-once" not in shown["top"]
    assert "--transfer, --no-transfer" in shown["doctor"]
    assert "--slo-ttft-ms MS, --slo-ttft MS" in shown["plan"]
    assert "--gpus NxGPU" in shown["plan"]
    assert "(default: 8xH200)" in shown["plan"]
    assert "--memory SIZE memory to lend: 512MiB, 8GiB (default: 4GiB)" in shown["store"]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    commands = make_parser().get_default("commands")
    return dict(commands.choices)
