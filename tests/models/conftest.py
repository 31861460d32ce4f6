"""Triton interprets where there is no GPU. That is decided before anything imports it, as transformers' models do."""

import tests.kernels.interpreter  # noqa: F401
