"""Least squares that never says a step takes less for doing more, and that a few slow steps do not bend."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_NUM_ROUNDS = 30
_CUT = 3.0  # standard deviations from which on a residual counts less than its square (Huber)
_DEVIATION = 1.4826  # of a normal distribution, in medians of its absolute value


def non_negative(features: FloatArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    """The x >= 0 that minimises sum(weights * (features @ x - values)^2).

    Exact: the best over all sets of columns that may be above 0. For few columns: 2^columns small solves.
    """
    root = np.sqrt(weights)
    scaled = features * root[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    q, r = np.linalg.qr(scaled / norms)
    target = q.T @ (values * root)
    num_columns = features.shape[1]
    best, best_loss = np.zeros(num_columns), float(target @ target)
    for num in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), num):
            columns = r[:, chosen]
            x = np.linalg.lstsq(columns, target, rcond=None)[0]
            loss = float(np.sum((columns @ x - target) ** 2))
            if (x >= 0).all() and loss < best_loss * (1 - 1e-12):
                best, best_loss = np.zeros(num_columns), loss
                best[list(chosen)] = x
    return best / norms


def robust(features: FloatArray, values: FloatArray) -> FloatArray:
    """`non_negative` for values above 0 whose spread grows with the root of their size, with Huber's loss.

    Reweighted until nothing changes: residuals of more than `_CUT` standard deviations, judged by
    the median, weigh as their absolute value and not as their square.
    """
    floor = float(np.median(values)) * 1e-3
    spread = 1 / np.maximum(values, floor)
    found = non_negative(features, values, spread)
    for _ in range(_NUM_ROUNDS):
        predicted = features @ found
        spread = 1 / np.maximum(predicted, floor)
        residuals = np.abs(predicted - values) * np.sqrt(spread)
        limit = _CUT * _DEVIATION * float(np.median(residuals))
        weights = spread * np.minimum(1.0, limit / np.maximum(residuals, max(limit, 1e-300)))
        before, found = found, non_negative(features, values, weights)
        if np.allclose(before, found, rtol=1e-6, atol=0.0):
            break
    return found
