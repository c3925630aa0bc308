"""Vectors of numbers that are either float64 or exact.

The specification runs on both. A vector is *exact* when it is given as ``fractions.Fraction``, integers among them or
not; it is then a NumPy object array of Fractions, and every sum, product and comparison below is exact. Anything else,
a vector of integers only included, becomes float64. Nothing here rounds an exact vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = float | Fraction
Vector = NDArray[Any]  # [n] float64, or object holding Fractions

SUM_TOLERANCE = 1e-6  # a float law may miss one by this much: what a float32 softmax over 256k tokens leaves


def as_vector(values: Sequence[Number] | Vector, name: str) -> Vector:
    """Return ``values`` as a 1-D float64 array, or as an object array of Fractions when it holds Fractions.

    Args:
        values: [n] numbers.
        name: how error messages call the vector.

    Raises:
        ValueError: not one-dimensional, empty, or not numbers.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a non-empty vector, got shape {array.shape}")
    if array.dtype == object:
        if all(isinstance(value, int | Fraction) and not isinstance(value, bool) for value in array):
            return np.array([Fraction(value) for value in array], dtype=object)
        if not all(isinstance(value, int | float | Fraction | np.number) for value in array):
            raise ValueError(f"{name} must hold numbers, got {array[:4].tolist()} ...")
        return np.array([float(value) for value in array])
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    return array.astype(np.float64)


def is_exact(vector: Vector) -> bool:
    """Whether ``vector`` holds Fractions."""
    return vector.dtype == object


def check_law(values: Sequence[Number] | Vector, name: str) -> Vector:
    """Return ``values`` as a vector after checking that it is a probability law.

    Raises:
        ValueError: NaN or infinity, a negative entry (the first one is named), or a total that is not one.
    """
    law = as_vector(values, name)
    if not is_exact(law) and not np.isfinite(law).all():
        index = int(np.flatnonzero(~np.isfinite(law))[0])
        raise ValueError(f"{name}[{index}] is {law[index]}; a law holds finite probabilities")
    negative = np.flatnonzero(law < 0)
    if negative.size:
        raise ValueError(f"{name}[{int(negative[0])}] is {law[negative[0]]}; probabilities are not negative")
    total = law.sum()
    if (total != 1) if is_exact(law) else (abs(total - 1.0) > SUM_TOLERANCE):
        raise ValueError(f"{name} sums to {total}, not to 1")
    return law


def as_number(uniform: float, like: Vector) -> Number:
    """``uniform`` in the arithmetic of ``like``: the Fraction that the float is, or the float."""
    return Fraction(float(uniform)) if is_exact(like) else float(uniform)


def log(value: Number) -> float:
    """Natural logarithm, -inf at zero; used for margins only."""
    return math.log(value) if value > 0 else -math.inf


def inverse_cdf(weights: Vector, uniform: float) -> tuple[int, float]:
    """Draw an index by inverse CDF: the first j with ``weights[0] + ... + weights[j] > uniform * total``.

    Args:
        weights: [n], not negative, not all zero; need not sum to one.
        uniform: in [0, 1).

    Returns:
        The index (if rounding leaves none: the last one with positive weight) and the decision's margin: the distance
        from ``uniform * total`` to the nearest end of the chosen index's interval.
    """
    cumulative = np.cumsum(weights)
    point = as_number(uniform, weights) * cumulative[-1]
    above = np.flatnonzero(cumulative > point)
    index = int(above[0]) if above.size else int(np.flatnonzero(weights > 0)[-1])
    below = cumulative[index] - weights[index] if index == 0 else cumulative[index - 1]
    ends = [abs(cumulative[index] - point)]
    if below > 0:
        ends.append(abs(point - below))
    return index, float(min(ends))
