"""docs/reliability.md has the rows and columns of the table of faults."""

from tests.faults.catalog import CONFIGS, cells
from tests.faults.table import DOCUMENT, document, written


def test_tables_have_all_rows_columns_and_reasons() -> None:
    text = DOCUMENT.read_text()
    assert document(text, {}) == text, "run `make faults ARGS=write`"


def test_results_of_some_cells_leave_the_others_as_they_are() -> None:
    text, cell = DOCUMENT.read_text(), cells(CONFIGS[0])[0]
    place = (cell.config.name, cell.fault.label, cell.state.label)
    changed = document(text, {cell.id: {"outcome": "503", "answered_s": 88.8, "freed_s": 99.9}})
    assert written(changed) == {**written(text), place: "503 88.8; 99.9"}
    assert written(text)[place] != "503 88.8; 99.9"
    assert changed.replace("503 88.8; 99.9", written(text)[place]) == text
