"""What docs/ names exists: routes, fields, errors, metrics, messages, flags, files and links. All routes, fields and
errors of the code are documented.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from pdserve.common import errors
from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.allowed_hosts import AllowedHosts
from pdserve.configs.load import load_config
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.server.api.app import Routes
from pdserve.server.api.common.fields import FieldError
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.error_responses import HTTP_ERROR_CODES, response_for
from pdserve.server.api.generate.models import GenerateBody, NativeSampling
from pdserve.server.api.generate.requests import parse_generate
from pdserve.server.api.openai.models import ChatBody, CompletionBody, OpenAiBody
from pdserve.server.api.service.service import Service
from pdserve.server.cli import make_parser
from pdserve.server.engine.leader_client import LeaderClient
from pdserve.server.observability.metrics import Metrics
from pdserve.server.text.tokenizer import Tokenizer
from pdserve.transfer.protocol.messages import PROTOCOL_VERSION, AnyMessage
from tests.server.exported_metrics import metric_names
from tests.server.http_harness import FixedRole, load_byte_tokenizer

ROOT = Path(__file__).parents[1]
CODE_FOLDERS = ("server", "scheduler", "models", "memory", "transfer", "kernels", "configs", "common")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
OTHERS_FLAGS = {
    *("--build", "--format", "--isolation", "--no-deps", "--strict", "--torch-backend", "--tp-size"),
    *("--network", "--ulimit"),  # of docker
}
OTHERS_NAMES = {
    *("DecodePreallocQueue", "allocate_slots", "group_concurrent_contiguous", "k_pe", "kv_c", "kv_transfer_params"),
    *("new_token_ratio", "req_pool_idx", "req_to_token"),  # docs/glossary.md: of SGLang and vLLM
    *("__init__.py", "utils.py"),  # CONTRIBUTING.md: not in this repository
    *("HTTPS_PROXY", "OTEL_SERVICE_NAME", "proxy_pass", "IPC_LOCK"),  # of other programs
    "Person(name='Anna', age=31, mood='happy')",  # docs/tools.md: the output of an example
}
SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".js")
METRIC_NAME = re.compile(r"(pdserve|process|python)_\w+")
LIMITS = Limits(
    vocab_size=258,
    eos_token_ids=frozenset({256}),
    context_length=512,
    max_total_tokens=400,
    max_prompt_tokens=400,
    max_new_tokens=400,
    max_batch_items=4,
    bootstrap_hosts=AllowedHosts.of(["*"]),
)


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def section(document: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", read(document), re.MULTILINE | re.DOTALL)
    assert match is not None, f"{document} has no section {title!r}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    heads = {index - 1 for index, line in enumerate(lines) if set(line) <= set("|-")}
    return [row for index, row in enumerate(cells) if index not in heads and index - 1 not in heads]


def quoted(text: str) -> list[str]:
    """Texts in backticks within a line."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


_WITHOUT_STRINGS = (ast.Load, ast.Store, ast.Name)


@cache
def trees() -> list[ast.Module]:
    """The syntax trees of the product."""
    paths = (path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@cache
def strings_in_the_code() -> str:
    """Every string constant of the product, one after another; f-strings without their values."""
    found: list[str] = []
    for tree in trees():
        _add_strings(tree, found)
    return "\n".join(found)


def _add_strings(node: ast.AST, found: list[str]) -> None:
    """Add all strings of a syntax tree. `ast.walk` takes three times as long."""
    kind = type(node)
    if kind is ast.Constant:
        found.append(str(node.value))  # type: ignore[attr-defined]
    elif kind is ast.JoinedStr:
        found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))  # type: ignore[attr-defined]
    for field in vars(node).values():
        if type(field) is list:
            for child in field:
                if isinstance(child, ast.AST):
                    _add_strings(child, found)
        elif isinstance(field, ast.AST) and type(field) not in _WITHOUT_STRINGS:
            _add_strings(field, found)


@pytest.mark.parametrize("config", [DecodeConfig(), PrefillConfig()], ids=lambda config: config.role)
async def test_documented_routes_are_the_served_ones(config: AnyServerConfig, tokenizer: Tokenizer) -> None:
    documented = {text for row in rows(section("docs/http.md", "Routes")) for text in quoted(row[0])}
    client = LeaderClient(Metrics(), DecodeConfig())
    try:
        roles = FixedRole(config.role)
        routes = Routes(Service(config, tokenizer, client, NEUTRAL_SAMPLING, roles.former), Metrics(), roles)
        served = {
            f"{method} {route.path.replace(':path', '')}"
            for route in routes.routes()
            for method in (route.methods or set()) - {"HEAD"}
        }
    finally:
        client.close()
    assert served == documented


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def names_in(title: str, column: int = 0) -> set[str]:
    return {text for row in rows(section("docs/http.md", title)) for text in quoted(row[column])}


def test_documented_fields_of_generate_are_the_parsed_ones() -> None:
    assert GenerateBody.model_fields.keys() == names_in("A request to `/generate`")
    assert NativeSampling.model_fields.keys() == names_in("Sampling")


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_documented_fields_of_openai_routes_are_the_parsed_ones(body: type[OpenAiBody]) -> None:
    known = body.model_fields.keys()
    prose = section("docs/http.md", "A request to OpenAI's routes")
    other_names = {name for row in rows(section("docs/http.md", "Sampling")) for name in quoted(row[2])}
    documented = (set(quoted(prose)) | names_in("Sampling") | other_names) & known
    routing = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}  # there as `bootstrap_*`
    assert "`bootstrap_*`" in prose
    assert known - documented - {"stream_options"} == routing


def test_refused_fields_are_not_documented_as_accepted() -> None:
    taken = names_in("A request to `/generate`") | names_in("Sampling")
    for body in (GenerateBody, NativeSampling, OpenAiBody):
        assert not taken & body.unsupported.keys()


def test_documented_errors_are_those_of_the_code() -> None:
    """All errors of the code: the classes, and the statuses of the web framework and of the HTTP protocol."""
    documented = {
        (int(status), code)
        for row in rows(section("docs/http.md", "Errors"))
        for status in row[0].split(", ")
        for code in quoted(row[1])
    }

    def below(kind: type[errors.RequestError]) -> Iterable[type[errors.RequestError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    raised = {(kind.status, kind.code) for kind in below(errors.RequestError) if kind.__name__ != "EngineError"}
    framework = {*HTTP_ERROR_CODES.items(), (431, "too_large")}
    assert documented == raised | framework


def test_documented_error_example_is_the_actual_response(tokenizer: Tokenizer) -> None:
    (example,) = re.findall(r"^    (\{.*?\}\})$", section("docs/http.md", "Errors"), re.MULTILINE | re.DOTALL)
    with pytest.raises(FieldError) as refused:
        parse_generate(b'{"text": "a", "sampling_params": {"top_p": 2}}', LIMITS, tokenizer)
    assert json.loads(bytes(response_for("/generate", refused.value).body)) == json.loads(example)


@pytest.mark.parametrize("document", ["docs/operations.md", "docs/hisparse.md", "docs/metrics.md"])
def test_documented_metrics_exist(document: str) -> None:
    names = set(re.findall(r"pdserve_[a-z0-9_]+", read(document)))
    assert len(names) > 5
    assert {name for name in names if not name.endswith("_")} - metric_names() == set()


def test_documented_messages_exist_in_the_code() -> None:
    table = rows(section("docs/troubleshooting.md", "Messages"))
    messages = {text for row in table for text in quoted(row[0])}
    assert len(messages) > 15
    assert {message for message in messages if message not in strings_in_the_code()} == set()


def test_protocol_page_lists_every_message() -> None:
    table = rows(section("docs/protocol.md", "Messages"))
    documented = {name for row in table for name in quoted(row[0])}
    assert documented == {message.__name__ for message in get_args(AnyMessage)}
    assert f"`PROTOCOL_VERSION` ({PROTOCOL_VERSION})" in read("docs/protocol.md")


def option_strings() -> set[str]:
    parser = make_parser()
    commands = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    return {option for command in commands.values() for option in command._option_string_actions}


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "benchmarks/README.md"])
def test_documented_flags_exist(document: str) -> None:
    texts = (text for text in quoted(read(document)) if not text.startswith("python -m benchmarks."))
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert named - option_strings() - OTHERS_FLAGS == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_files_and_tests_exist(document: str) -> None:
    text = read(document)
    folders = "|".join((*CODE_FOLDERS, "tests", "benchmarks", "docs", "deploy", "examples"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{document} names {name}"
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"{document} names {name}"


class Definitions(NamedTuple):
    functions: frozenset[str]
    members: Mapping[str, set[str]]
    """Of each class, with those of its base classes."""
    files: frozenset[str]
    words: frozenset[str]
    """All words of the source files, also those of tests and benchmarks."""


@cache
def definitions() -> Definitions:
    functions: set[str] = set()
    classes: dict[str, ast.ClassDef] = {}
    for tree in trees():
        for node in (node for top in tree.body for node in (top, *getattr(top, "body", ()))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.add(node.name)
    folders = (*CODE_FOLDERS, "tests", "benchmarks", "docs", "deploy", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in SOURCE_SUFFIXES]
    texts = (path.read_text(encoding="utf-8") for path in paths if path != Path(__file__))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    members: dict[str, set[str]] = {}

    def members_of(name: str) -> set[str]:
        if name not in classes:
            return set()
        if name not in members:
            text = ast.unparse(classes[name])
            members[name] = set(re.findall(r"(?:^    (?:async )?(?:def )?|self\.)(\w+)", text, re.MULTILINE)).union(
                *(members_of(base) for base in re.findall(r"\w+", " ".join(map(ast.unparse, classes[name].bases))))
            )
        return members[name]

    for name in classes:
        members_of(name)
    return Definitions(frozenset(functions), members, frozenset(path.name for path in paths), frozenset(words))


def exists(name: str) -> bool:
    """Whether a name in backticks is one of this repository, or does not look like a name in code. A private function
    needs its class: several have one of that name.
    """
    known = definitions()
    if found := re.fullmatch(r"([A-Z]\w+)\.(\w+)(\(.*\))?", name):  # Class.member
        return found[2] in known.members.get(found[1], ())
    if found := re.fullmatch(r"(?:\w+\.)*(\w+)\([^()]*\)", name):  # function(), or Class()
        return not found[1].startswith("_") and (found[1] in known.functions or found[1] in known.members)
    if found := re.fullmatch(rf"(?:[\w.-]+/)*([\w-]+(?:{'|'.join(map(re.escape, SOURCE_SUFFIXES))}))", name):  # file.py
        return found[1] in known.files
    if re.fullmatch(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+|_?[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+", name):
        return name in known.words
    return True


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_code_names_exist(document: str) -> None:
    """Classes, members, functions, files and identifiers. Metrics have a test of their own."""
    names = {name for name in quoted(read(document)) if not METRIC_NAME.fullmatch(name)}
    assert {name for name in names - OTHERS_NAMES if not exists(name)} == set()


@pytest.mark.parametrize(
    ("name", "real"),
    [
        *[("DecodeScheduler.step", False), ("DecodeConfig.public_host", True), ("DecodeConfig.kv_memory_gib", True)],
        *[("load_config()", True), ("load_configuration()", False), ("_check_command()", False)],
        *[("configs/load.py", True), ("loads.py", False)],
        *[("DecodeConfig", True), ("DecodeConfiguration", False), ("kv_memory_gib", True), ("kv_memory_gb", False)],
        *[("a sentence", True), ("--flag", True), ("1.5", True)],
    ],
)
def test_names_that_do_not_exist_are_found(name: str, real: bool) -> None:
    assert exists(name) is real


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_have_targets(document: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", read(document)):
        path = (ROOT / document).parent / target if target else ROOT / document
        assert path.exists(), f"{document} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{document} links to {target}#{anchor}"


def test_documented_settings_file_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```\n(# decode\.yaml.*?)^```", read("docs/settings.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "decode.yaml").write_text(example)
    config = load_config("decode", tmp_path / "decode.yaml", {"port": "8201"}, {})
    assert isinstance(config, DecodeConfig)
    assert (config.tp, config.port, len(config.prefill)) == (2, 8201, 2)
