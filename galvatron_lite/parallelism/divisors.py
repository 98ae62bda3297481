"""Divisors: the candidates for a degree."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
