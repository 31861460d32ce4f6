"""Python's garbage collector in a process whose pauses somebody would notice."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_for_good() -> None:
    """What exists now stays until the process ends, and no collection looks at it again. Call when all is loaded.

    A full collection stops every thread. Modules alone, most of them torch's, make it last for a dozen decode steps,
    and what the prefix cache remembers of a few dozen long prompts is enough to set one off.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def kept_for_now() -> Iterator[None]:
    """The same until the block ends, for a process that goes on with something else."""
    keep_for_good()
    try:
        yield
    finally:
        gc.unfreeze()
