"""What a hostile model may cost before it is refused."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.common.errors import StartupError
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.fingerprint import fingerprints
from pdserve.models.loading.weights import open_checkpoint
from pdserve.server.text.tokenizer import load_tokenizer

MOST_S, MOST_BYTES = 5.0, 300 << 20
LONGEST_LINE = 1000


def read_model(model: Path) -> None:
    """Read what the processes of a server read at their start, before they load weights."""
    source = locate_model(str(model))
    load_tokenizer(source)
    fingerprints(source)
    open_checkpoint(source)


@contextmanager
def refused(named: str) -> Iterator[None]:
    """The block ends with one line that matches `named`, soon, and takes little memory. Time is that of this process,
    so that a busy machine does not count.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = _status("VmRSS"), time.process_time()
    with pytest.raises(StartupError) as caught:
        yield
    seconds, grown = time.process_time() - began, _status("VmHWM") - before
    message = str(caught.value)
    assert re.search(named, message), message
    assert message.isprintable()
    assert len(message) <= LONGEST_LINE, message
    assert seconds < MOST_S
    assert grown < MOST_BYTES


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def files_below(directory: Path, *, without: Path) -> dict[Path, int]:
    """All files and their sizes, except those in one folder."""
    paths = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    return {path: path.lstat().st_size for path in paths if not path.is_relative_to(without)}
