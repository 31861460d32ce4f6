"""Selects Triton's interpreter without a GPU. It must come before the first import of Triton, also by transformers."""

import tests.kernels.interpreter  # noqa: F401
