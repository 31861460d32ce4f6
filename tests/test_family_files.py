"""A family of models is a file: nothing else in the product names one."""

import ast
from pathlib import Path

from pdserve.models.registry import FAMILIES
from tests.import_graph import FOLDERS, ROOT

OWN = ("models/families/", "models/registry.py")
OTHERS = {
    "configs/setting_types.py",  # names of text parsers
    "server/text/parsers/families.py",
    "server/text/parsers/reasoning.py",
    "models/formats/gguf_tokenizer.py",  # names of GGUF's pre-tokenizers
}
"""Files where the same word is the name of something else."""


def families_named_in(source: str) -> set[str]:
    """By their name or their architecture, whole or as a part of another string; docstrings do not count."""
    tree = ast.parse(source)
    names = {name for family in FAMILIES for name in (family.name, family.architecture)}
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found |= names.intersection(node.value.replace(",", " ").replace(".", " ").split())
    return found


def test_only_families_and_the_registry_name_families() -> None:
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(OWN) and (named := families_named_in(path.read_text(encoding="utf-8"))):
            found[place] = named
    assert found.keys() == OTHERS, found


def test_the_check_itself_sees_names() -> None:
    source = (
        '"""llama"""\nif config.architecture == "qwen3_moe":\n    x = f"{y} needs gpt_oss, or:"\nz = "LlamaForCausalLM"'
    )
    assert families_named_in(source) == {"qwen3_moe", "gpt_oss", "LlamaForCausalLM"}


def test_a_family_is_one_value_of_one_file() -> None:
    files = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "models/families").glob("*.py")}
    for family in FAMILIES:
        declared = [
            stem
            for stem, tree in files.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value == family.architecture
        ]
        assert len(declared) == 1, f"{family.name}: {declared}"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_of_models_is_long() -> None:
    assert {path.name: lines(path) for path in (ROOT / "models").rglob("*.py") if lines(path) > 450} == {}
