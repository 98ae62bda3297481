"""What is found out of a model without storages: once for all plans that a job tries on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from galvatron_lite import auto
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.runtime import preparation
from galvatron_lite.runtime.assignment import LayerAssignment


@contextmanager
def examined_once() -> Iterator[None]:
    """All models that are split meanwhile are alike, however they are split."""
    sample_arguments, known_flow = preparation.sample_arguments, preparation.known_flow
    tensor_plans = preparation.tensor_plans
    flows: list[Any] = []
    sampled: dict[str, dict[str, int]] = {}
    split: dict[frozenset[str], dict[str, TensorPlan]] = {}

    def arguments(model: Any, names: Sequence[str], batch: Any) -> dict[str, dict[str, int]]:
        unknown = [name for name in names if name not in sampled]
        sampled.update(sample_arguments(model, unknown, batch) if unknown else {})
        return {name: sampled[name] for name in names if name in sampled}

    def flow(*known: Any) -> Any:
        flows.extend([] if flows else [known_flow(*known)])
        return flows[0]

    def plans(model: Any, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
        several = list(placed)
        key = frozenset(one.layer.name for one in several if one.strategy.tensor > 1)
        if key not in split:
            split[key] = tensor_plans(model, several, batch)
        return split[key]

    with ExitStack() as stack:
        stack.enter_context(patch.object(preparation, "sample_arguments", arguments))
        stack.enter_context(patch.object(preparation, "known_flow", flow))
        stack.enter_context(patch.object(preparation, "tensor_plans", plans))
        yield


@contextmanager
def tried_once() -> Iterator[None]:
    """All models that ``auto_parallelize`` is given meanwhile are alike: one is discovered, and its loss tried out."""

    def first_of(call: Callable[..., Any]) -> Callable[..., Any]:
        found: list[Any] = []

        def answered(*args: Any) -> Any:
            found.extend([] if found else [call(*args)])
            return found[0]

        return answered

    discovers, tries = first_of(auto.discover_layers), first_of(auto._tried_out)
    with patch.object(auto, "discover_layers", discovers), patch.object(auto, "_tried_out", tries):
        yield
