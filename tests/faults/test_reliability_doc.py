"""docs/reliability.md has the rows and columns of the table of faults, and a passed result in every cell."""

import re

from tests.faults.catalog import CONFIGS
from tests.faults.table import BEGIN, DOCUMENT, END, columns, document, rows, structure


def test_tables_have_all_rows_columns_and_reasons() -> None:
    text = DOCUMENT.read_text()
    assert structure(text) == structure(document(text, {})), "run `make faults ARGS=write`"


def test_every_cell_has_passed_or_does_not_exist() -> None:
    """`table()` writes `not run` and `**red**` into other cells."""
    tables = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    found = [cell.strip() for line in lines for cell in line.strip("|").split("|")[1:]]
    passed = [cell for cell in found if re.fullmatch(r"\w+( \d+\.\d)?; \d+\.\d|n/a \d+", cell)]
    assert len(passed) == sum(len(columns(config)) * len(rows(config)) for config in CONFIGS)
