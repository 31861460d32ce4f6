"""The mutations of table.toml, and how each is applied to a copy of the sources."""

import ast
import tomllib
from pathlib import Path

import msgspec

from tests.import_graph import ROOT

TABLE = Path(__file__).with_name("table.toml")


class MutationError(Exception):
    """A mutation that does not fit the code any more."""


class Mutation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of product code."""

    name: str
    breaks: str
    """What a user or a peer gets wrong, or not at all."""
    file: str
    function: str
    old: str
    new: str

    def mutated(self, source: str) -> str:
        """The source with the change. Raises MutationError unless `old` stands once, inside `function`."""
        count = source.count(self.old)
        if count != 1:
            raise MutationError(f"{self.name}: {self.file} has {self.old.strip()!r} {count} times, and not once")
        line = source[: source.index(self.old)].count("\n") + 1
        first, last = self._lines(source)
        if not first <= line <= last:
            raise MutationError(f"{self.name}: {self.file}:{line} is not in {self.function}, lines {first} to {last}")
        result = source.replace(self.old, self.new)
        try:
            changed = ast.dump(ast.parse(result)) != ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise MutationError(f"{self.name}: {self.file} is not Python after it: {error}") from None
        if not changed:
            raise MutationError(f"{self.name}: {self.file} means the same after it")
        return result

    def _lines(self, source: str) -> tuple[int, int]:
        body: list[ast.stmt] = ast.parse(source).body
        found: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None = None
        for name in self.function.split("."):
            found = next((node for node in body if getattr(node, "name", None) == name), None)  # type: ignore[assignment]
            if found is None:
                raise MutationError(f"{self.name}: {self.file} has no {self.function}")
            body = found.body
        assert found is not None
        return found.lineno, found.end_lineno or found.lineno


def read_table(path: Path = TABLE) -> list[Mutation]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [msgspec.convert({"name": name, **entry}, Mutation) for name, entry in entries.items()]


def sources_of(mutation: Mutation, root: Path = ROOT) -> tuple[str, str]:
    """The file's text before and after. Raises MutationError."""
    path = root / mutation.file
    if not path.is_file():
        raise MutationError(f"{mutation.name}: there is no {mutation.file}")
    before = path.read_text(encoding="utf-8")
    return before, mutation.mutated(before)
