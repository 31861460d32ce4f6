"""The command line as real processes: exit codes and output."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from pdserve.common.errors import StartupError
from pdserve.server.cli import exit_code_of, main
from pdserve.server.launch.pair import PAIR_FIELDS, check_ports, load_pair_config
from pdserve.server.launch.up import server_environ
from tests.cluster.servers import ForkedCommand
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "COLUMNS": "200"}


def pdserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdserve.server", *arguments]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=30, check=False)


def pdserve_forked(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Forked processes have imported everything already."""
    with contextlib.closing(ForkedCommand(*arguments, environment={"COLUMNS": "200"})) as command:
        return command.finish()


def test_help_is_printed_without_arguments() -> None:
    result = pdserve()
    assert result.returncode == 0
    for command in ("prefill", "decode", "serve", "up", "demo", "version"):
        assert re.search(rf"^    {command} +\w", result.stdout, re.MULTILINE)


def test_help_of_a_command_is_about_that_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--help"])
    assert "model families" not in capsys.readouterr().out
    assert main([]) == 0
    assert "model families" in capsys.readouterr().out


@pytest.mark.parametrize("spelling", ["version", "--version"])
def test_version_prints_all_versions(spelling: str) -> None:
    result = pdserve(spelling)
    assert result.returncode == 0
    assert re.fullmatch(
        r"pdserve \S+.*, Python 3\.\d+\.\d+, torch \S+, mooncake-transfer-engine\S* \S+\n", result.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--page-sise", "8"], "unknown argument --page-sise: did you mean --page-size"),
        (["decode", "--prefill", "a:1,b:65536"], "prefill[1]: the port must be between 1 and 65535, got 'b:65536'"),
        (
            ["decode", "--chunk-size=64"],
            "unknown argument --chunk-size: it is for 'pdserve prefill' and 'pdserve up' and",
        ),
        (["serve", "--prefill=a:1"], "unknown argument --prefill: it is for 'pdserve decode'"),
        (["serve", "Qwen/Qwen3-8B"], "unexpected argument 'Qwen/Qwen3-8B': a model is given as --model Qwen/Qwen3-8B"),
        (["decode", "--model", "a", "--prefill", "b:1", "c:1"], "unknown argument c:1 (see 'pdserve decode --help')"),
        (["decode", "--tp-size=2"], "unknown argument --tp-size: here it is --tp"),
        (["serve", "--itl-target-ms", "40"], "unknown argument --itl-target-ms: here it is --slo-itl-ms"),
        (["up", "--enforce-eager"], "unknown argument --enforce-eager: here it is --no-cuda-graphs"),
        (["serve", "--mem-fraction-static", "0.9"], "--mem-fraction-static: kv_memory_fraction is the share of"),
        (["bench", "--num-prompts", "3"], "unknown argument --num-prompts: here it is --requests"),
        (["decode", "--qqq"], "unknown argument --qqq (see 'pdserve decode --help')"),
        (["serve", "--bogus"], "unknown argument --bogus (see 'pdserve serve --help')"),
        (["serve", "--hots=::1"], "unknown argument --hots: did you mean --host"),
        (["serve", f"--model={__file__}"], "this file is not a model: its name does not end in .gguf"),
        (["plan", f"--model={__file__}"], "this file is not a model: its name does not end in .gguf"),
        (["decode", "--page-size"], "argument --page-size: expected one argument (see 'pdserve decode --help')"),
        (["decode", "--page-size=0"], "page_size: must be greater than or equal to 1, got '0' from the command line"),
        (["decode", "--config=absent.yaml"], "--config absent.yaml: no such file, and no preset of that name"),
        (["prefill", "--host=0.0.0.0"], "host 0.0.0.0 exposes the control port: set cluster_key"),
        (["prefil"], "unknown command 'prefil': did you mean prefill? (see 'pdserve --help')"),
        (["server"], "unknown command 'server': did you mean serve"),
        (["run"], "unknown command 'run': the commands are prefill, decode, serve,"),
        (["router"], "unknown command 'router': put sglang-router or smg before the servers"),
        (["up", "--port=x"], "port: must be a whole number, got 'x' from the command line"),
        (["up", "--nnodes=2"], "unknown argument --nnodes: it is for 'pdserve prefill' and 'pdserve decode'"),
        (["demo", "--max-new-tokens=0"], "--max-new-tokens must be at least 1, got '0'"),
        (["up", "--port=8100"], "--port and --prefill-port are both 8100: choose different ports"),
    ],
)
def test_mistake_is_reported_in_one_line_with_exit_code_2(arguments: list[str], message: str) -> None:
    code, out, err = pdserve_forked(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("pdserve: error: ")
    assert message in line


def test_all_mistakes_are_reported_at_once() -> None:
    unknown = pdserve_forked("decode", "--page-sise", "8", "--qqq=1")[2].splitlines()
    assert [line.split()[4].rstrip(":") for line in unknown] == ["--page-sise", "--qqq"]
    wrong = pdserve_forked("decode", "--tp=0", "--port=x", "--prefill=a")[2].splitlines()
    assert {line.split()[2] for line in wrong} == {"tp:", "port:", "prefill[0]:"}


def test_the_command_line_does_not_import_torch() -> None:
    script = (
        "import sys; from pdserve.server.cli import main; import pdserve.server.launch.up\n"
        "try: main(['decode', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], env=ENVIRON, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--input-len=8 --rate=2", "goodput needs --slo-ttft-ms"), ("--gpus=none", "--gpus 'none': give")],
)
def test_mistakes_in_a_plan_are_found_before_its_modules_are_imported(arguments: str, message: str) -> None:
    script = (
        "import sys; from pdserve.server.cli import main\n"
        f"main(['plan', *{arguments.split()}])\n"
        "print([name for name in sys.modules if name == 'torch' or name.endswith('.command')])"
    )
    command = [sys.executable, "-P", "-c", script]
    result = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True)
    assert (result.stdout, message in result.stderr) == ("[]\n", True), result.stderr


def test_interrupt_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    """The command line imports a module that sends SIGINT to its process, so the signal arrives during an import."""
    interrupting = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "difflib.py").write_text(interrupting + "os.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8")
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}:{ENVIRON['PYTHONPATH']}"}
    command = [sys.executable, "-P", "-m", "pdserve.server", "serve"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_sigterm_while_modules_are_imported_ends_the_first_process_of_a_container(tmp_path: Path) -> None:
    """For that process, the kernel ignores signals without a handler; here the signal is ignored in the same way."""
    (tmp_path / "difflib.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n", encoding="utf-8")
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}:{ENVIRON['PYTHONPATH']}"}
    python = [sys.executable, "-P", "-m", "pdserve.server", "serve"]
    command = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", *python]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "")


def test_up_passes_each_server_its_settings() -> None:
    flags: dict[str, str | bool] = {
        "port": "1200",
        "prefill_port": "1100",
        "bootstrap_port": "1998",
        "host": "0.0.0.0",
        "chunk_size": "64",
        "max_running_requests": "3",
        "page_size": "8",
    }
    assert flags.keys() <= PAIR_FIELDS.keys()
    prefill, decode = load_pair_config(None, flags, {"PDSERVE_API_KEY": "key"})
    assert (prefill.port, prefill.bootstrap_port, prefill.host, prefill.chunk_size) == (1100, 1998, "127.0.0.1", 64)
    assert (decode.port, decode.host, decode.public_host) == (1200, "0.0.0.0", "127.0.0.1")
    assert (decode.prefill, decode.max_running_requests) == (("127.0.0.1:1998",), 3)
    assert prefill.page_size == decode.page_size == 8
    assert prefill.shutdown_timeout_s == decode.shutdown_timeout_s == 5, "of the preset 'local'"
    assert prefill.api_key == decode.api_key is not None


def test_up_generates_a_cluster_key() -> None:
    """Without one, every user of the machine could connect to the control port."""
    prefill, decode = load_pair_config(None, {}, {})
    assert prefill.cluster_key is not None
    assert prefill.cluster_key == decode.cluster_key
    assert prefill.cluster_key != load_pair_config(None, {}, {}).prefill.cluster_key
    assert server_environ(prefill)["PDSERVE_CLUSTER_KEY"] == prefill.cluster_key.get_secret_value()
    given = "of the environment 7f3c9b51d2"
    prefill, decode = load_pair_config(None, {}, {"PDSERVE_CLUSTER_KEY": given})
    assert prefill.cluster_key == decode.cluster_key == SecretStr(given)


def test_up_passes_only_one_pool_size_setting(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("kv_tokens: 4096\nprefill_port: 1100\nmax_running_requests: 2\nsend_window: 4\n", encoding="utf-8")
    prefill, decode = load_pair_config(file, {}, {})
    assert (prefill.kv_tokens, prefill.kv_memory_gib) == (decode.kv_tokens, decode.kv_memory_gib) == (4096, None)
    assert (prefill.port, prefill.send_window, decode.max_running_requests) == (1100, 4, 2)


def test_up_refuses_settings_that_it_sets_itself_and_unknown_ones(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    for setting in ("prefill: 10.0.0.1:8998", "nnodes: 2", "cluster_key: of-sixteen-letters"):
        name = setting.partition(":")[0]
        file.write_text(f"{setting}\n", encoding="utf-8")
        with pytest.raises(StartupError, match=rf"^{name} in .*up.yaml: 'pdserve up' sets it itself; remove it$"):
            load_pair_config(file, {}, {})
    file.write_text("sendwindow: 3\n", encoding="utf-8")
    with pytest.raises(StartupError, match=r"unknown setting 'sendwindow' in .*up.yaml"):
        load_pair_config(file, {}, {})


@pytest.mark.parametrize("setting", ["prefill: 10.0.0.1:8998", "local_prefill: never", "bootstrap_allow: all"])
def test_serve_refuses_settings_of_prefill_servers_in_a_file(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"{setting}\n", encoding="utf-8")
    name = setting.partition(":")[0]
    code, _, err = pdserve_forked("serve", "--config", str(file), "--model", str(tmp_path))
    assert (code, err) == (2, f"pdserve: error: {name} in {file}: 'pdserve serve' has no prefill servers; remove it\n")


def test_up_reports_settings_that_do_not_fit_the_model_before_starting() -> None:
    ports = [f"--{name}={free_port()}" for name in ("port", "prefill-port", "bootstrap-port")]
    result = pdserve("up", "--tp=2", *ports)
    assert result.returncode == 2
    assert result.stderr == "pdserve: error: tp = 2 does not divide num_attention_heads = 9: --tp may be 1 or 3\n"


def test_up_reports_a_port_in_use_before_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = pdserve("up", f"--bootstrap-port={port}")
        assert result.returncode == 2
        assert (
            result.stderr
            == f"pdserve: error: port {port} on 127.0.0.1 is in use; choose another with --bootstrap-port\n"
        )
        with pytest.raises(StartupError, match=f"port {port} on 0.0.0.0 is in use; choose another with --port"):
            check_ports(load_pair_config(None, {"port": str(port), "host": "0.0.0.0"}, {}))


def test_closed_pipe_ends_a_command_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["version"]) == 141
    assert capfd.readouterr().err == ""


def test_closed_pipe_is_noticed_when_the_buffer_is_empty(capfd: pytest.CaptureFixture[str]) -> None:
    def write_past_the_buffer() -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert exit_code_of(write_past_the_buffer) == 141
    assert capfd.readouterr().err == ""
