"""The three entry points as functions."""

from __future__ import annotations

from typing import Any


def auto_parallelize(model: Any, **options: Any) -> Any:
    """Make a model run in parallel."""
    raise NotImplementedError


def plan(**options: Any) -> Any:
    """Find a plan."""
    raise NotImplementedError


def profile(**options: Any) -> Any:
    """Measure or estimate what a model's layers cost."""
    raise NotImplementedError
