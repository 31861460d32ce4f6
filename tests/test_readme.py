"""Commands, settings and targets in the README and deployment files exist; the settings table matches the schema."""

import re
import runpy
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.configs.flags import given_flags
from pdserve.configs.load import CONFIG_OF_ROLE, Role, find_config_file, load_config
from pdserve.server.cli import exit_code_of, make_parser
from pdserve.server.launch.up import KILL_MARGIN_S

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "examples/curl.sh", "deploy/docker-compose.yml")


def pdserve_commands(text: str) -> list[list[str]]:
    """The arguments of every `pdserve ...` line in a code block, comments removed."""
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^pdserve +(.*)$", blocks, re.MULTILINE)
    return [line.partition("#")[0].split() for line in lines]


# Any: YAML of a foreign schema
def services() -> dict[str, Any]:
    compose = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text(encoding="utf-8"))
    return {name: service for name, service in compose["services"].items() if name != "check"}


@pytest.mark.parametrize(
    "name", ["settings_table", "sizing_table", "metrics_table", "models_table", "lost_prefill_table"]
)
def test_tables_in_docs_match_the_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "docs" / f"{name}.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


def test_commands_of_the_first_page_on_running_parse() -> None:
    commands = pdserve_commands((ROOT / "docs" / "running.md").read_text(encoding="utf-8"))
    assert {"up", "serve", "prefill", "decode"} <= {command[0] for command in commands}
    for command in commands:
        _, unknown = make_parser().parse_known_args(command)
        assert unknown == []


@pytest.mark.parametrize("name", services())
def test_compose_file_servers_have_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.configs.load.own_address", lambda: "172.18.0.5")
    role, *arguments = services()[name]["command"]
    options, unknown = make_parser().parse_known_args([role, *arguments])
    assert unknown == []
    flags = given_flags(options, CONFIG_OF_ROLE[role].model_fields)
    environ = {"PDSERVE_CLUSTER_KEY": "a key of more than sixteen characters"}
    config = load_config(role, find_config_file(options.config), flags, environ)
    assert config.public_host == ("172.18.0.5" if role == "prefill" else name), "prefill may have several containers"
    assert config.shutdown_timeout_s < int(services()[name]["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("role", CONFIG_OF_ROLE)
def test_systemd_unit_starts_and_stops_both_roles(role: Role, tmp_path: Path) -> None:
    unit = ConfigParser(interpolation=None, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # names with capitals: the documented way
    unit.read(ROOT / "deploy" / "pdserve@.service", encoding="utf-8")
    service = unit["Service"]
    _, *arguments = service["ExecStart"].replace("%i", role).split()
    options, unknown = make_parser().parse_known_args(arguments)
    assert (options.command, options.config, unknown) == (role, f"/etc/pdserve/{role}.yaml", [])
    (tmp_path / "cluster_key").write_text("a key of more than sixteen characters\n", encoding="utf-8")
    variable, value = service["Environment"].replace("%d", str(tmp_path)).split("=")
    config = load_config(role, None, {}, {variable: value})
    assert config.cluster_key is not None
    assert int(service["TimeoutStopSec"]) >= config.shutdown_timeout_s + KILL_MARGIN_S
    assert service["KillMode"] == "mixed", "a leader that gets SIGTERM itself drains nothing"
    assert int(service["RestartPreventExitStatus"]) == exit_code_of(lambda: load_and_fail(role))


def load_and_fail(role: Role) -> int:
    load_config(role, None, {"port": "0"}, {})
    return 0


def test_image_is_built_from_the_sources_of_the_wheel() -> None:
    """Everything else is left out of the context, so that a change there does not install the package again."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    scripts = re.findall(r"deploy/\w+\.py", dockerfile)
    needed = {
        *build["targets"]["wheel"]["only-include"],
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "deploy/locks",
        *scripts,
    }
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == needed
    dependencies = dockerfile.index("--requirement /tmp/requirements.txt")
    package = dockerfile.index("--no-deps /src")
    assert dependencies < package, "a changed source file would install all dependencies again"
    assert "COPY" not in dockerfile[:package], "a copied source file would, too"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_and_local_links_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^(?:    )?make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / link).exists(), f"{document} links to {link}"
