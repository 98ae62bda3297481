"""The stages of a model for processes that run several of them: structural copies of its modules.

Copies share parameters and buffers with the model. Before every pass the parameters of the version that it uses are
bound to the copy (``bind``), so that versions which other micro-batches still use do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.pipeline.flow import LayerFlow
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.tied import find_shared

Holder = tuple[nn.Module, str]
"""A module, and the name of its attribute."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """One stage."""

    number: int  # from 0
    cut: StageModel
    holders: Mapping[str, tuple[Holder, ...]]  # all modules with a parameter, by its name in the model

    @property
    def model(self) -> nn.Module:
        """The structural copy that the stage runs."""
        return self.cut.model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of its modules, by their names in the model."""
        return dict(self.model.named_parameters())

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the parameters of its modules, by their names in the model."""
        for name, parameter in parameters.items():
            for module, attribute in self.holders[name]:
                setattr(module, attribute, parameter)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the stage's layers, by their names in the model."""
        paths = [path for layer in self.cut.layers for path in layer.modules]
        for name, buffer in self.model.named_buffers():
            if any(name.startswith(f"{path}.") for path in paths):
                yield name, buffer


def cut_stages(
    model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]], flow: LayerFlow | None
) -> tuple[StagePart, ...]:
    """Cut a model into stages; the model does not change.

    Raises:
        InputError: two stages share a parameter, or the model cannot be cut there.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    return tuple(stage_of(structure_of(model), layers, names, number, flow, device) for number in range(len(names)))


def stage_of(
    model: nn.Module,
    layers: Sequence[Layer],
    names: Sequence[Sequence[str]],
    number: int,
    flow: LayerFlow | None,
    device: torch.device | None = None,
) -> StagePart:
    """Make a model one of its stages, in place, without the parameters of the others; raises as ``cut_stages``."""
    check_untied(model, layers, names)
    cut = StageModel(model, layers, names[number], device, flow, names)
    cut.attach()
    by_parameter: dict[int, list[Holder]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            by_parameter.setdefault(id(parameter), []).append((module, attribute))
    holders = {name: tuple(by_parameter[id(parameter)]) for name, parameter in model.named_parameters()}
    return StagePart(number, cut, holders)


def structure_of(model: nn.Module) -> nn.Module:
    """Copy the modules of a model; the copies share its parameters and buffers."""
    kept = tensors_of([list(vars(module).values()) for module in model.modules()])  # of an earlier forward pass
    shared = (*model.parameters(), *model.buffers(), *(tensor for tensor in kept if not tensor.is_leaf))
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def check_untied(model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]]) -> None:
    """Raise InputError if layers of several stages share a parameter."""
    stage_of_layer = {layer: number for number, stage in enumerate(names) for layer in stage}
    for shared in find_shared(model, layers):
        if len({stage_of_layer[layer] for layer in shared.layers}) > 1:
            remedy = (
                f"{' and '.join(shared.layers)} share it, in different stages, whose parameters are of different "
                "versions under cyclic data parallelism. Untie it, or put these layers into one stage."
            )
            raise InputError("parameter", shared.names[0], remedy)


# The state of a stage: its parameters by version, sums of gradients, pending updates, and the optimizer.
#
# Version v has had v updates (see ``rules``). The newest version is the model's parameters, which the optimizer steps
# in place. Passes use other parameters on the same storage. Autograd keeps a storage as long as a graph needs it, and
# an update makes a new storage while an older version is still used.


Gradients = list[Tensor | None]
"""Gradients of a stage's trainable parameters, in order; None for unused parameters."""
OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class StageStates:
    """One stage's parameters, gradients and optimizer.

    Args:
        parameters: by name, at version 0; trainable ones change in place.

    Attributes:
        masters: parameters of the newest version, by name.
        newest: the newest version.
        sums: sums of gradients over the micro-batches that have been processed, by training step.
        updates: mean gradients that have not been applied, by training step.
        optimizer: None before ``make_optimizer``.
        scheduler: of the learning rate.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.masters = dict(parameters)
        self.newest = 0
        self.sums: dict[int, Gradients] = {}
        self.updates: dict[int, Gradients] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._versions = {0: self._views()}

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trainable parameters of the newest version, in order."""
        return [master for master in self.masters.values() if master.requires_grad]

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions in memory, the oldest first."""
        return tuple(sorted(self._versions))

    def at(self, version: int) -> Mapping[str, nn.Parameter]:
        """Return the parameters of a version for a pass; they do not change while the pass or its graph exists."""
        return self._versions[version]

    def make_optimizer(self, factory: OptimizerFactory, scheduler: SchedulerFactory | None, **options: Any) -> None:
        """Make the optimizer of the newest parameters, and its scheduler."""
        self.optimizer = factory(self.trained or [{"params": []}], **options)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)

    @contextmanager
    def adding(self, step: int, version: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Add the gradients of backward passes within the context to the sum of a training step."""
        trained = [parameter for parameter in version.values() if parameter.requires_grad]
        total = self.sums.pop(step, [None] * len(trained))
        for parameter, gradient in zip(trained, total, strict=True):
            parameter.grad = gradient
        try:
            yield
            self.sums[step] = [parameter.grad for parameter in trained]
        finally:
            for parameter in trained:
                parameter.grad = None

    def gradient_likes(self) -> list[Tensor]:
        """Return tensors shaped like a message with gradients: of all trainable parameters, and which of them count."""
        return [*self.trained, torch.empty(len(self.trained), dtype=torch.uint8, device="meta")]

    def sent(self, gradients: Gradients) -> list[Tensor]:
        """Return the tensors of a message with gradients; zeros for parameters without one."""
        filled = [
            torch.zeros_like(like) if gradient is None else gradient
            for like, gradient in zip(self.trained, gradients, strict=True)
        ]
        return [*filled, torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)]

    @staticmethod
    def arrived(tensors: Sequence[Tensor]) -> Gradients:
        """Return the gradients of a message."""
        *gradients, counts = tensors
        return [gradient if count else None for gradient, count in zip(gradients, counts.tolist(), strict=True)]

    def apply(self, step: int, keep: bool) -> None:
        """Step the optimizer with the mean gradient of a training step: version ``step`` becomes ``step + 1``.

        Args:
            step: the next one that has not been applied.
            keep: whether later passes or graphs still use the old version. The new version then has a separate storage;
                else it replaces the old one.
        """
        assert step == self.newest, f"version {self.newest} cannot take the update of step {step}"
        if self.optimizer is None:
            raise RuntimeError("the optimizer is made before the first update")
        for parameter, gradient in zip(self.trained, self.updates.pop(step), strict=True):
            if keep:
                parameter.data = parameter.data.clone()
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self.newest = step + 1
        self._versions[self.newest] = self._views() if keep else self._versions.pop(step)

    def forget_before(self, version: int) -> None:
        """Drop versions before ``version``, which no later pass uses, but not the newest; graphs may still use them."""
        first = min(version, self.newest)
        self._versions = {number: views for number, views in self._versions.items() if number >= first}

    def restart(self, version: int, older: Mapping[str, Tensor] | None = None) -> None:
        """Set the version of the newest parameters; no micro-batch may be in flight.

        Args:
            version: of the newest parameters.
            older: values of the version before, by name, if later passes use it.
        """
        self.sums, self.updates, self.newest = {}, {}, version
        self._versions = {version: self._views()}
        if older is not None:
            self._versions[version - 1] = self._views(older)

    def _views(self, values: Mapping[str, Tensor] | None = None) -> dict[str, nn.Parameter]:
        """A version for passes: new leaves on the same storage."""
        return {
            name: nn.Parameter(master.data if values is None else values[name], True)
            if master.requires_grad
            else master
            for name, master in self.masters.items()
        }
