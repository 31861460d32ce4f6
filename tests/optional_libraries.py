"""Test files that import a library that is not installed are skipped, so that the others run on hosts with few of them.

Libraries that pdserve itself needs are not in the list: without those, collection fails. Tests that import a library
late, or run it as a program, are marked with `needs`.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

OPTIONAL_LIBRARIES = (
    *("anthropic", "cryptography", "hypothesis", "jsonschema", "kubernetes_validate", "matplotlib", "numba", "openai"),
    *("opentelemetry", "promql_parser", "transformers", "triton", "trustme"),
)
"""The dependency group `dev` in pyproject.toml, as far as test files import it."""


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}: it is not installed")


def missing_library(error: BaseException | None) -> str | None:
    """The module that an import did not find, if it is one of an optional library."""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in OPTIONAL_LIBRARIES:
        return error.name
    return None


class TestModule(pytest.Module):
    """A test file."""

    __test__ = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = missing_library(error.__cause__)
            if missing is None:
                raise
            pytest.skip(f"{self.name} needs {missing}: it is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)
