"""The one hook in models that are trained: what sees their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch import Tensor

TrainStep = Callable[..., Any]


class Observer(Protocol):
    """What sees the steps of a model."""

    def begin(self, batch: Any) -> None:
        """A step begins, on a global batch."""

    def end(self, loss: Tensor) -> None:
        """It is done."""

    def failed(self, error: BaseException) -> None:
        """It was not done."""


class Observable:
    """A part of the models that are trained."""

    observer: Observer | None = None  # sees their steps; None: nothing does


def observed(train_step: TrainStep) -> TrainStep:
    """A ``train_step(self, batch, optimizer, ...)`` whose steps the model's observer sees."""

    @wraps(train_step)
    def run(self: Observable, batch: Any, *arguments: Any, **options: Any) -> Any:
        observer = self.observer
        if observer is None:
            return train_step(self, batch, *arguments, **options)
        observer.begin(batch)
        try:
            loss = train_step(self, batch, *arguments, **options)
        except BaseException as error:
            observer.failed(error)
            raise
        observer.end(loss)
        return loss

    return run
