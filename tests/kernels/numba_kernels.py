"""The mark of tests that need Numba."""

import importlib.util

import pytest

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs Numba: it is not installed")
