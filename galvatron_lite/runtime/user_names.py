"""Names of parameters and buffers of a model that trains in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class UserNames(nn.Module):
    """A model that contains the user's as ``module``, and further stages of it in ``copies``.

    Its parameters and buffers have the names that they have in the user's model, so that a training loop which selects
    some by name (groups with rates of their own, parts that are frozen) selects the same ones under every plan.
    """

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names as in the user's model, and parameters; arguments as of ``torch.nn.Module``."""
        for name, parameter in super().named_parameters("", *args, **kwargs):
            yield _joined(prefix, name), parameter

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names as in the user's model, and buffers; arguments as of ``torch.nn.Module``."""
        for name, buffer in super().named_buffers("", *args, **kwargs):
            yield _joined(prefix, name), buffer


def _joined(prefix: str, name: str) -> str:
    """``module.head.bias`` and ``copies.0.head.bias`` are both ``head.bias``."""
    attribute, _, rest = name.partition(".")
    if attribute == "copies":
        rest = rest.partition(".")[2]
    return f"{prefix}.{rest}" if prefix else rest
