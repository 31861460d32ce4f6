"""Fits step times to measurements: non-negative coefficients, relative errors."""

import itertools
from collections.abc import Sequence

import numpy as np


def fit_nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Returns the non-negative coefficients whose products with `rows` have the smallest relative errors to `seconds`.

    Tries every subset of the columns, because there are few.
    """
    given, wanted = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    weights = 1 / np.maximum(wanted, 1e-9)
    best, best_error = [0.0] * given.shape[1], float("inf")
    columns = range(given.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, size + 1) for size in columns):
        part = given[:, chosen] * weights[:, None]
        found, *_ = np.linalg.lstsq(part, wanted * weights, rcond=None)
        error = float(np.square(part @ found - wanted * weights).sum())
        if (found >= 0).all() and error < best_error - 1e-12:
            best, best_error = [0.0] * given.shape[1], error
            for column, value in zip(chosen, found, strict=True):
                best[column] = float(value)
    return best
