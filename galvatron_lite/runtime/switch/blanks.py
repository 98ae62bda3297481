"""A layer's tensors on this process's device, without values: those come from the ranks that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Layer
from galvatron_lite.runtime.materialize import Materializer


class Blanks:
    """Gives layers parameters and buffers that hold nothing yet.

    Args:
        layers: every layer of the model.
        device: where to put them.
        shapes: of buffers by name, where they are not those of the model's first hour.

    Attributes:
        buffers: those that were made, and their names in the model.
    """

    def __init__(self, layers: Sequence[Layer], device: torch.device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._layers, self._device, self._shapes = layers, device, shapes
        self._known: dict[nn.Module, _Blank] = {}
        self.buffers: list[tuple[str, Tensor]] = []

    def place(self, model: nn.Module, layer: Layer) -> None:
        """Make a layer's tensors.

        Args:
            model: the structure that holds the layer, with parameters on the meta device; a stage was cut out of it.
            layer: of the model.
        """
        if model not in self._known:
            self._known[model] = _Blank(model, self._layers, self._device, self._shapes, self.buffers)
        self._known[model].place(layer)


class _Blank(Materializer):
    """Of one structure."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]],
        buffers: list[tuple[str, Tensor]],
    ) -> None:
        super().__init__(model, layers, device)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._shapes, self._buffers = shapes, buffers

    def _place_tensors(self, module: nn.Module) -> list[str]:
        for _, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                made = nn.Parameter(empty, parameter.requires_grad)
                vars(made).update(vars(parameter))
                self._replace(parameter, made)
        for name, buffer in list(module.named_buffers(recurse=False)):
            path = f"{self._paths[id(module)]}.{name}".lstrip(".")
            shape = self._shapes.get(path, tuple(buffer.shape))
            # zeros: of running statistics a rank may fill its own channels alone
            blank = torch.zeros(shape, dtype=buffer.dtype, device=self._device)
            self._buffers.append((path, blank))
            setattr(module, name, blank)
        return []
