"""For all tests: one thread for torch and for numpy, child processes that react to Ctrl-C, GPU tests skipped without a
GPU, no time limit for examples of Hypothesis, log levels restored, no garbage collection of imported modules.
"""

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pdserve.common.logs import CHATTY, CLIENT_LOGGERS
from tests.optional_libraries import pytest_pycollect_makemodule as pytest_pycollect_makemodule

# Set before numpy is imported: threads of its OpenBLAS spin while they wait, and Triton's interpreter uses them often.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_unfrozen = threading.Event()

with suppress(ModuleNotFoundError):  # files that need it are skipped
    import hypothesis

    hypothesis.settings.register_profile("tests", deadline=None)  # its 200 ms can be exceeded on a busy machine
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting imports all tests and libraries. Their objects stay until the end, so collections skip them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _keep_frozen() -> Iterator[None]:
    """Freeze again after a test that calls gc.unfreeze(), as `pdserve bench` does: otherwise every full collection
    traverses all modules, which takes a third of a second of CPU time.
    """
    unfreeze = gc.unfreeze

    def noted() -> None:
        unfreeze()
        _unfrozen.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", noted)
        yield


def pytest_runtest_logfinish() -> None:
    if _unfrozen.is_set():
        _unfrozen.clear()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Models are tiny, and other processes need the cores: on a busy machine several threads take longer than one."""
    import torch

    from tests.small_products import multiply_without_onednn

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    multiply_without_onednn()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """Shells start background jobs with SIGINT ignored, and child processes inherit that: restore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """Commands that run in the test process configure logging: later tests would not see their warnings."""
    loggers = [logging.getLogger(name) for name in (None, *CHATTY, *CLIENT_LOGGERS)]
    before = [(logger, logger.level, logger.filters[:]) for logger in loggers]
    yield
    for logger, level, filters in before:
        logger.setLevel(level)
        logger.filters[:] = filters


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: there is none here"))
