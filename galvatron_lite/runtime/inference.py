"""A model that is only run, on the launched world."""

from __future__ import annotations

from typing import Any

from torch import nn

from galvatron_lite.runtime.engine import ParallelModel


class InferenceModel(nn.Module):
    """Called like the model, or with a batch; every rank calls it alike and gets the model's own outputs; no gradients.

    Args:
        parallel: the split model, which is set to evaluation mode.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel = parallel
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; see ``ParallelModel.outputs``."""
        return self.parallel.outputs(*args, **kwargs)
