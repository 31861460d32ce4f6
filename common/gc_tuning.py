"""Settings of Python's garbage collector for processes in which long pauses matter."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_for_good() -> None:
    """Call gc.freeze(), so that full collections skip all objects that exist now. Call it when all is loaded.

    A full collection stops every thread. Modules alone, mostly torch's, make it last a dozen decode steps, and the
    prefix cache's entries for a few dozen long prompts are enough to trigger one.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def kept_for_now() -> Iterator[None]:
    """The same until the block ends, for processes (such as tests) that continue with other work."""
    keep_for_good()
    try:
        yield
    finally:
        gc.unfreeze()
