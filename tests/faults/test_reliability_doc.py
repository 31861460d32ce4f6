"""docs/reliability.md has the rows and columns of the table of faults, and no empty and no red cell."""

from tests.faults.table import BEGIN, DOCUMENT, END, document, structure


def test_tables_have_all_rows_columns_and_reasons() -> None:
    text = DOCUMENT.read_text()
    assert structure(text) == structure(document(text, {})), "run `make faults ARGS=write`"


def test_no_cell_is_empty_or_red() -> None:
    tables = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert "**red**" not in tables
    assert "|  |" not in tables
