"""What is found out of a model without storages: once for all plans that a job tries on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from galvatron_lite import auto
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.runtime import preparation
from galvatron_lite.runtime.assignment import LayerAssignment


class Examined:
    """What is found out of models that are alike, however they are split."""

    def __init__(self) -> None:
        self._flows: list[Any] = []
        self._sampled: dict[str, dict[str, int]] = {}
        self._split: dict[frozenset[str], dict[str, TensorPlan]] = {}
        self._shared: dict[object, dict[str, ChannelPlan]] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """All models that are split meanwhile are alike."""
        sample_arguments, flow_or_none = preparation.sample_arguments, preparation.flow_or_none
        tensor_plans, channel_plans = preparation.tensor_plans, preparation.channel_plans

        def arguments(model: Any, names: Sequence[str], batch: Any) -> dict[str, dict[str, int]]:
            unknown = [name for name in names if name not in self._sampled]
            self._sampled.update(sample_arguments(model, unknown, batch) if unknown else {})
            return {name: self._sampled[name] for name in names if name in self._sampled}

        def flow(*known: Any) -> Any:
            self._flows.extend([] if self._flows else [flow_or_none(*known)])
            return self._flows[0]

        def plans(model: Any, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, TensorPlan]:
            several = list(placed)
            key = frozenset(one.layer.name for one in several if one.strategy.tensor > 1)
            if key not in self._split:
                self._split[key] = tensor_plans(model, several, batch)
            return self._split[key]

        def channels(model: Any, placed: Iterable[LayerAssignment], batch: Any) -> dict[str, ChannelPlan]:
            several = list(placed)
            key = tuple((one.layer.name, one.strategy) for one in several if one.strategy.slices > 1)
            if key not in self._shared:
                self._shared[key] = channel_plans(model, several, batch)
            return self._shared[key]

        finders = {
            "sample_arguments": arguments, "flow_or_none": flow, "tensor_plans": plans, "channel_plans": channels,
        }  # fmt: skip
        with patch.multiple(preparation, **finders):
            yield


@contextmanager
def examined_once() -> Iterator[None]:
    """All models that a job splits are alike."""
    with Examined().taken():
        yield


@contextmanager
def tried_once() -> Iterator[None]:
    """All models that ``auto_parallelize`` is given meanwhile are alike: one is watched, and its loss tried out."""

    def first_of(call: Callable[..., Any]) -> Callable[..., Any]:
        found: list[Any] = []

        def answered(*args: Any) -> Any:
            found.extend([] if found else [call(*args)])
            return found[0]

        return answered

    finders = {name: first_of(getattr(auto, name)) for name in ("watch_model", "_try_model")}
    with patch.multiple(auto, **finders), examined_once():
        yield
