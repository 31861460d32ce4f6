"""docs/reliability.md has the rows and columns of the table of faults."""

from tests.faults.table import DOCUMENT, document, structure


def test_tables_have_all_rows_columns_and_reasons() -> None:
    text = DOCUMENT.read_text()
    assert structure(text) == structure(document(text, {})), "run `make faults ARGS=write`"
