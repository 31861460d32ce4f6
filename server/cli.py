"""The `pdserve` command: parses flags, loads the configuration and runs a command.

The modules of a command are imported when it runs, so that `--help` and the light commands start fast.

Exit codes: 0 success, 2 a mistake in flags or settings (one line per mistake on stderr), anything else a failure.
`pdserve doctor`: 2 if it has found a failure, 1 if it has only warnings and --strict is given.
"""

import argparse
import difflib
import functools
import os
import platform
import select
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from ..common.errors import StartupError
from ..configs.flags import add_config_flag, add_flags, fields_of, given_flags, read_options
from ..configs.load import CONFIG_OF_ROLE, Role, find_config_file, load_config, read_config_file
from ..configs.other_names import flag_of_others
from ..configs.schema import ServerConfig
from .bench.options import add_bench_flags, read_bench_options
from .doctor.options import add_doctor_flags, read_doctor_options
from .launch.demo_options import DemoOptions
from .launch.pair import PAIR_FIELDS, load_pair_config
from .launch.store_options import add_store_flags, read_store_options, take_local_store
from .observability.versions import mooncake_wheels, version_of
from .plan.options import PLAN_SETTINGS, add_plan_flags, read_plan_options
from .plan.ratio.options import plans_load, read_ratio_options
from .terminal.options import add_chat_flags, add_top_flags, read_chat_options, read_top_options

DESCRIPTION = "Serve language models with prefill and decode in separate processes."
EPILOG = """examples:
  pdserve serve --model DIR                               one server that does both, for one GPU
  pdserve up                                              one prefill and one decode server on this machine
  pdserve prefill --model DIR --port 8100 --bootstrap-port 8998
  pdserve decode  --model DIR --port 8200 --prefill HOST:8998
  pdserve serve --model Qwen/Qwen3-8B                     a model of the Hugging Face Hub (see 'pdserve models')
  pdserve plan    --model deepseek-v3.2 --gpus 8xH200 --context 64k
'pdserve COMMAND --help' lists the settings; the same names work in a YAML file given with --config.
"""


_NOT_OF_SERVE = ("prefill", "bootstrap_allow", "local_prefill")
"""Settings of decode servers that `pdserve serve` does not have: it uses no prefill server."""

_SERVE_ROLE = (
    "this server was started with 'pdserve serve', which has both roles: restart it with 'pdserve decode' instead"
)


class _Parser(argparse.ArgumentParser):
    """argparse that raises StartupError, so that all mistakes are reported alike."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see '{self.prog} --help')")


class _MainParser(_Parser):
    """Appends the supported model families to the help text. Imports them only when help is printed."""

    def format_help(self) -> str:
        from .plan.families import family_rows

        names = ", ".join(row.family for row in family_rows())
        return super().format_help() + textwrap.fill(f"model families: {names}", width=100) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Mistakes of the user become lines on stderr, not tracebacks."""
    return exit_code_of(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs `command` and returns its exit code. A StartupError becomes code 2 and one line per problem on stderr."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 141  # as if SIGPIPE had ended it
    except StartupError as error:
        for line in str(error).splitlines():
            print(f"pdserve: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _stdout_is_closed() -> bool:
    """Returns whether the reader of stdout has gone, as after `| head`. If so, redirects stdout to /dev/null: Python
    flushes it once more at exit, which would fail.
    """
    try:
        sys.stdout.flush()
        # a long text bypasses the buffer: flush() then has nothing to write, and does not notice the closed pipe
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        closed = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        closed = True
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the whole command line. With `only`, only that command gets its flags: there are hundreds
    in all, and adding them delays the start of a server.

    Parsed namespaces also have `parser`, the parser of the given command, and `commands`, the subparsers.
    """
    parser = _MainParser(
        prog="pdserve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="store_true", help="same as the command 'version'")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    parser.set_defaults(commands=commands)

    def command(name: str, summary: str, *flags: Callable[[argparse.ArgumentParser], None]) -> None:
        own_usage = name in ("version", "bench", "plan", "models", "doctor", "chat", "top", "store")
        usage = None if own_usage else f"pdserve {name} [--config FILE] [--SETTING VALUE ...]"
        added = commands.add_parser(name, usage=usage, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(parser=added)
        if only in (None, name):
            for add in flags:
                add(added)

    of_prefill = functools.partial(_add_server_flags, role="prefill")
    of_decode = functools.partial(_add_server_flags, role="decode")
    of_serve = functools.partial(_add_server_flags, role="decode", without=_NOT_OF_SERVE)
    command("prefill", "compute prompts and push their KV to decode servers", of_prefill)
    command("decode", "generate; clients send their requests to this server", of_decode)
    command("serve", "compute prompts and generate in one server, without prefill servers", of_serve)
    command("up", "one prefill and one decode server on this machine, until Ctrl-C", _add_pair_flags)
    command("demo", "run 'up', ask one question, show the time of each stage", _add_demo_flags, _add_pair_flags)
    command("chat", "talk to a running decode server", add_chat_flags)
    command("top", "watch running servers: requests, rates, pools, peers", add_top_flags)
    command("bench", "send load to a running decode server; show latencies and the time of each stage", add_bench_flags)
    command(
        "plan",
        "how many requests a decode server holds on given GPUs; or, for a load, the best ratio of servers",
        add_plan_flags,
    )
    command("store", "lend memory to a KV store that servers share, and run its master", add_store_flags)
    command("models", "list the supported models and their memory")
    command(
        "doctor", "check this machine: versions, GPUs, RDMA, limits, ports and a transfer; and a peer", add_doctor_flags
    )
    command("version", "print the versions of pdserve, Python and torch")
    return parser


def version_line() -> str:
    parts = [
        f"pdserve {version_of('pdserve') or '(not installed)'}",
        f"Python {platform.python_version()}",
        f"torch {version_of('torch') or '(not installed)'}",
    ]
    mooncake = [f"{wheel} {version}" for wheel, version in mooncake_wheels().items()]
    return ", ".join([*parts, *(mooncake or ["no Mooncake wheel"])])


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser(arguments[0] if arguments and not arguments[0].startswith("-") else None)
    if arguments and not arguments[0].startswith("-"):
        _check_command(arguments[0], parser.get_default("commands").choices)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [word for word in unknown if word.startswith("--")]
        commands = make_parser().get_default("commands").choices.values()
        lines = [_unknown_argument(options, commands, word) for word in flags or unknown[:1]]
        raise StartupError("\n".join(lines))
    match "version" if options.version else options.command:
        case "prefill" | "decode":
            return _serve(options.command, options)
        case "serve":
            return _serve("decode", options, {"local_prefill": "always"}, fixed_role=_SERVE_ROLE)
        case "up":
            from .launch.up import run_up

            settings = given_flags(options, PAIR_FIELDS)
            local_store = take_local_store(settings)
            return run_up(load_pair_config(find_config_file(options.config), settings, os.environ), local_store)
        case "demo":
            from .launch.demo import run_demo

            demo = read_options(DemoOptions, given_flags(options, fields_of(DemoOptions)))
            config = load_pair_config(find_config_file(options.config), given_flags(options, PAIR_FIELDS), os.environ)
            keep = sys.stdout.isatty() if demo.keep is None else demo.keep
            return run_demo(config, question=demo.prompt, max_new_tokens=demo.max_new_tokens, keep=keep)
        case "chat":
            from .terminal.chat import run_chat

            return run_chat(read_chat_options(options, os.environ))
        case "top":
            from .terminal.top import run_top

            return run_top(read_top_options(options, os.environ))
        case "bench":
            from .bench.command import run_bench

            return run_bench(read_bench_options(options, os.environ), arguments[1:])
        case "plan":
            if plans_load(options):
                ratio_options = read_ratio_options(options, os.environ, PLAN_SETTINGS)
                from .plan.ratio.command import run_ratio_plan  # takes seconds, so mistakes are reported first

                return run_ratio_plan(ratio_options)
            plan_options = read_plan_options(options)
            from .plan.command import run_plan

            return run_plan(plan_options)
        case "store":
            from .launch.store_node import run_store

            return run_store(read_store_options(options))
        case "models":
            from .plan.models import run_models

            return run_models()
        case "doctor":
            from .doctor.command import run_doctor

            return run_doctor(read_doctor_options(options, os.environ))
        case "version":
            print(version_line())
            return 0
    parser.print_help()
    return 0


def _serve(
    role: Role, options: argparse.Namespace, fixed: Mapping[str, str] = {}, fixed_role: str | None = None
) -> int:
    file, flags = find_config_file(options.config), given_flags(options, CONFIG_OF_ROLE[role].model_fields)
    for name in _NOT_OF_SERVE if fixed_role is not None else ():
        if name in read_config_file(file):
            raise StartupError(f"{name} in {file}: 'pdserve serve' has no prefill servers; remove it")
    config = load_config(role, file, {**flags, **fixed}, os.environ)
    if options.parent_pid is not None:
        from .launch.children import end_with_parent

        end_with_parent(options.parent_pid)
    if config.node_rank > 0:
        from .launch.node import run_node

        return run_node(config)
    from .launch.frontend import run_frontend

    return run_frontend(config, fixed_role=fixed_role)


def _add_server_flags(parser: argparse.ArgumentParser, role: Role, without: Collection[str] = ()) -> None:
    fields = CONFIG_OF_ROLE[role].model_fields
    shared = ServerConfig.model_fields
    add_config_flag(parser)
    parser.add_argument("--parent-pid", type=int, metavar="PID", help=argparse.SUPPRESS)
    own = [name for name in fields if name not in shared and name not in ("role", *without)]
    add_flags(parser.add_argument_group(f"{role} settings"), fields, own)
    add_flags(parser.add_argument_group("settings of every server"), fields, shared)


def _add_demo_flags(parser: argparse.ArgumentParser) -> None:
    fields = fields_of(DemoOptions)
    add_flags(parser, fields, fields)


def _add_pair_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser.add_argument_group("settings of the two servers"), PAIR_FIELDS, PAIR_FIELDS)


def _check_command(name: str, known: Collection[str]) -> None:
    if name in known:
        return
    if name == "router":
        raise StartupError("unknown command 'router': put sglang-router or smg before the servers (docs/running.md)")
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(known)}"
    raise StartupError(f"unknown command {name!r}: {hint} (see 'pdserve --help')")


def _unknown_argument(options: argparse.Namespace, commands: Iterable[argparse.ArgumentParser], word: str) -> str:
    parser: argparse.ArgumentParser = options.parser
    known = _flags_of(parser)
    if not word.startswith("-") and "--model" in known and "model" not in options:
        return f"unexpected argument {word!r}: a model is given as --model {word}"
    flag = word.partition("=")[0]
    if elsewhere := [f"'{other.prog}'" for other in commands if flag in _flags_of(other)]:
        return f"unknown argument {flag}: it is for {' and '.join(elsewhere)}"
    of_bench = parser.prog.endswith(" bench")
    if ("--model" in known or of_bench) and (instead := flag_of_others(flag, of_bench)) is not None:
        return f"unknown argument {flag}: {instead}"
    names = [name.removeprefix("--") for name in known]  # without the dashes, which would make all alike
    if near := difflib.get_close_matches(flag.removeprefix("--"), names, n=3, cutoff=0.65):
        return f"unknown argument {flag}: did you mean {' or '.join(f'--{name}' for name in near)}?"
    return f"unknown argument {flag} (see '{parser.prog} --help')"


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    return [name for action in shown for name in action.option_strings if name.startswith("--")]
