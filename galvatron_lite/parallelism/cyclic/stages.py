"""The stages of one user's model, for a process that runs several of them: each is a copy of its modules' structure.

Copies share parameters and buffers with the model. A stage's parameters are put into its copy before every pass, at the
version that the pass uses (``bind``), so that what another micro-batch still needs is left alone.
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
    cut: StageModel  # runs it
    holders: Mapping[str, tuple[Holder, ...]]  # by each of its parameters' name in the model: all modules that hold it

    @property
    def model(self) -> nn.Module:
        """The structure that the stage runs in."""
        return self.cut.model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that its modules hold now, by their names in the model."""
        return dict(self.model.named_parameters())

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the stage's modules hold these parameters, by their names in the model."""
        for name, parameter in parameters.items():
            for module, attribute in self.holders[name]:
                setattr(module, attribute, parameter)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stage's own layers, by their names in the model."""
        paths = [path for layer in self.cut.layers for path in layer.modules]
        for name, buffer in self.model.named_buffers():
            if any(name.startswith(f"{path}.") for path in paths):
                yield name, buffer


def cut_stages(
    model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]], flow: LayerFlow | None
) -> tuple[StagePart, ...]:
    """Every stage of a model, which stays as it is.

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
    """One stage, in place: the model gives up the others' parameters; arguments and errors as of ``cut_stages``."""
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
    """A copy of a model's modules that share its parameters and buffers."""
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


def check_untied(model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]]) -> None:
    """Raise InputError where layers of several stages share a parameter."""
    stage_of_layer = {layer: number for number, stage in enumerate(names) for layer in stage}
    for shared in find_shared(model, layers):
        if len({stage_of_layer[layer] for layer in shared.layers}) > 1:
            remedy = (
                f"{' and '.join(shared.layers)} share it, in different stages, whose parameters are of different "
                "versions under cyclic data parallelism. Untie it, or put these layers into one stage."
            )
            raise InputError("parameter", shared.names[0], remedy)


# What a process holds of one stage: its parameters by version, gradients being summed, updates to come, the optimizer.
#
# Version v has had v updates (see ``rules``). The newest version is the model's own parameters, which the optimizer
# steps in place. A pass is given others, which share their storage; so autograd keeps a storage for as long as a graph
# needs it, and an update works on a storage of its own while an older version is still in use.


Gradients = list[Tensor | None]
"""Of a stage's trainable parameters, in order; None where nobody used the parameter."""
OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class StageStates:
    """One stage's parameters, gradients and optimizer.

    Args:
        parameters: by name, at version 0; those that are trained change in place.

    Attributes:
        masters: the parameters of the newest version, by name.
        newest: that version.
        sums: gradients of a training step, added up over the micro-batches that were worked on so far.
        updates: mean gradients of training steps that the parameters have not had yet.
        optimizer: None until it is built.
        scheduler: of its learning rate.
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
        """The newest version of the parameters that are trained, in order."""
        return [master for master in self.masters.values() if master.requires_grad]

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are held, the oldest first."""
        return tuple(sorted(self._versions))

    def at(self, version: int) -> Mapping[str, nn.Parameter]:
        """The parameters that a pass uses; nobody changes them while it or its graph lives."""
        return self._versions[version]

    def make_optimizer(self, factory: OptimizerFactory, scheduler: SchedulerFactory | None, **options: Any) -> None:
        """Build the optimizer, and a scheduler of it, over the newest parameters."""
        self.optimizer = factory(self.trained or [{"params": []}], **options)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)

    @contextmanager
    def adding(self, step: int, version: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Backward passes inside add gradients of this version's parameters to the sum of a training step."""
        trained = [one for one in version.values() if one.requires_grad]
        total = self.sums.pop(step, [None] * len(trained))
        for parameter, gradient in zip(trained, total, strict=True):
            parameter.grad = gradient
        try:
            yield
            self.sums[step] = [one.grad for one in trained]
        finally:
            for parameter in trained:
                parameter.grad = None

    def gradient_likes(self) -> list[Tensor]:
        """Tensors shaped like the gradients in a message: those of all trained parameters, and which of them count."""
        return [*self.trained, torch.empty(len(self.trained), dtype=torch.uint8, device="meta")]

    def sent(self, gradients: Gradients) -> list[Tensor]:
        """Gradients as they are in a message; zeros where a parameter has none."""
        filled = [
            torch.zeros_like(like) if gradient is None else gradient
            for like, gradient in zip(self.trained, gradients, strict=True)
        ]
        return [*filled, torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)]

    @staticmethod
    def arrived(tensors: Sequence[Tensor]) -> Gradients:
        """Gradients of a message."""
        *gradients, counts = tensors
        return [gradient if count else None for gradient, count in zip(gradients, counts.tolist(), strict=True)]

    def apply(self, step: int, keep: bool) -> None:
        """Step the optimizer with the mean gradient of a training step: version ``step`` becomes ``step + 1``.

        Args:
            step: the next that the parameters have not had.
            keep: whether the old version is still used, by passes to come or by graphs that wait for their backward
                pass. The new version then has a storage of its own; else it takes the old one's place.
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
        """No pass to come uses versions before this one; graphs may. The newest one stays."""
        self._versions = {one: kept for one, kept in self._versions.items() if one >= min(version, self.newest)}

    def restart(self, version: int, older: Mapping[str, Tensor] | None = None) -> None:
        """Set the version of the newest parameters; nothing may be in flight.

        Args:
            version: theirs.
            older: values of the version before it, by name, where passes to come use it.
        """
        self.sums, self.updates, self.newest = {}, {}, version
        self._versions = {version: self._views()}
        if older is not None:
            self._versions[version - 1] = self._views(older)

    def _views(self, values: Mapping[str, Tensor] | None = None) -> dict[str, nn.Parameter]:
        """A version, as passes are given it: leaves of their own on the same storage."""
        return {
            name: nn.Parameter(master.data if values is None else values[name], True)
            if master.requires_grad
            else master
            for name, master in self.masters.items()
        }
