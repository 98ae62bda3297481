"""A stage's states where processes keep none of their own: they come with messages and leave with messages.

On the forward track travel the parameters. What a forward pass used is emptied behind it; autograd's references stay,
and are filled again from what comes on the backward track: that is how PyTorch's fully sharded data parallelism frees
and gathers parameters, too (resizing a storage; Zhao et al. 2023, arXiv 2304.11277). On the backward track travel
parameters, the gradient sum and the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.cyclic.optimizer_states import Layout, give_states, layout_of, states_likes, take_states
from galvatron_lite.parallelism.cyclic.packing import pack, packed_bytes, unpack
from galvatron_lite.parallelism.cyclic.states import OptimizerFactory, SchedulerFactory, StageStates

Values = Mapping[str, Tensor]
"""Of a stage's parameters, by name."""


class TravellingStates(StageStates):
    """See the module. At rest a stage is at its home, as ``StageStates`` holds it; elsewhere nothing is.

    Args:
        parameters: by name.
        is_home: whether this process is the stage's home; else the parameters are emptied.

    Attributes:
        forward: versions that are here on the forward track.
        backward: versions that are here on the backward track.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], is_home: bool) -> None:
        super().__init__(parameters)
        self.forward: dict[int, Values] = {}
        self.backward: dict[int, Values] = {}
        self._layout: Layout = ()
        self._device = next((one.device for one in parameters.values()), torch.device("cpu"))
        self.is_home = is_home
        if not is_home:
            self._empty()

    def at(self, version: int) -> Mapping[str, nn.Parameter]:
        """The parameters of a version on the forward track, in a storage of their own."""
        if version not in self.forward:
            return super().at(version)
        values = list(self.forward[version].values())
        views = unpack(pack(values, self._device), values)
        return {
            name: nn.Parameter(view, self.masters[name].requires_grad)
            for name, view in zip(self.masters, views, strict=True)
        }

    def resting(self) -> Mapping[str, nn.Parameter]:
        """Empty ones."""
        return self.masters

    def make_optimizer(self, factory: OptimizerFactory, scheduler: SchedulerFactory | None, **options: Any) -> None:
        """See ``StageStates``; also tries which states it has."""
        super().make_optimizer(factory, scheduler, **options)
        if self.optimizer is not None and not self.is_home:
            self.optimizer.state.clear()
        likes = [torch.empty_like(one, device=self._device) for one in self.trained_likes]
        self._layout = layout_of(partial(factory, **options), likes)

    def refill(self, version: int, lent: Mapping[str, nn.Parameter]) -> None:
        """Fill what a forward pass used with the same values, which are here on the backward track."""
        for storage in _storages(lent):
            storage.resize_(packed_bytes(list(self.likes.values())))
        for name, parameter in lent.items():
            parameter.data.copy_(self.backward[version][name])

    def release(self, lent: Mapping[str, nn.Parameter]) -> None:
        """Empty what a forward pass used; whoever refers to it sees the values again once it is filled."""
        for storage in _storages(lent):
            storage.resize_(0)

    def apply(self, step: int, keep: bool) -> None:
        """Step the optimizer where the states are; the new version takes its place on the backward track."""
        values = self.backward[step] if keep else self.backward.pop(step)
        for name, master in self.masters.items():
            master.data = values[name].clone() if keep else values[name]
        self._step(self.updates.pop(step))
        self.newest = step + 1
        self.backward[self.newest] = {name: one.data for name, one in self.masters.items()}
        self._empty_masters()

    def forget_before(self, version: int) -> None:
        """Nothing is kept anyway."""

    def leave_forward(self) -> None:
        """The forward track goes on elsewhere."""
        self.forward = {}

    def leave_backward(self) -> None:
        """The backward track goes on elsewhere."""
        self.backward, self.sums = {}, {}
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def depart(self, versions: Sequence[int]) -> None:
        """From home to both tracks."""
        for version in versions:
            self.backward[version] = {name: one.data for name, one in super().at(version).items()}
        self.forward = dict(self.backward)
        self._empty()

    def settle_home(self) -> None:
        """From the backward track to rest."""
        newest = max(self.backward)
        for name, master in self.masters.items():
            master.data = self.backward[newest][name].clone()
        self.restart(newest, self.backward.get(newest - 1))
        self.forward, self.backward = {}, {}

    def restart(self, version: int, older: Mapping[str, Tensor] | None = None) -> None:
        """See ``StageStates``; elsewhere than at home nothing is held."""
        super().restart(version, older)
        if not self.is_home:
            self._versions = {}

    def weights_likes(self, versions: int) -> list[Tensor]:
        """Shapes of the parameters at so many versions."""
        return [*self.likes.values()] * versions

    def weights(self, track: Mapping[int, Values], versions: Sequence[int]) -> list[Tensor]:
        """The parameters at these versions."""
        return [value for version in versions for value in track[version].values()]

    def arrive(self, track: dict[int, Values], versions: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Put parameters at these versions on a track."""
        count = len(self.likes)
        for place, version in enumerate(versions):
            track[version] = dict(zip(self.likes, tensors[place * count : (place + 1) * count], strict=True))
        self.newest = max(self.newest, *versions)

    def states_likes(self, versions: int, has_sum: bool) -> list[Tensor]:
        """Shapes of all that travels on the backward track."""
        gradients = self.gradient_likes() if has_sum else []
        return [*self.weights_likes(versions), *gradients, *states_likes(self._layout)]

    def give_states(self, step: int, versions: Sequence[int], has_sum: bool) -> list[Tensor]:
        """All that travels on the backward track."""
        assert self.optimizer is not None
        gradients = self.sent(self.sums[step]) if has_sum else []
        states = give_states(self.optimizer, self._layout, self.trained)
        return [*self.weights(self.backward, versions), *gradients, *states]

    def take_states(self, step: int, versions: Sequence[int], has_sum: bool, tensors: Sequence[Tensor]) -> None:
        """Put all that travels on the backward track there."""
        assert self.optimizer is not None
        weights, gradients = len(versions) * len(self.likes), len(self.gradient_likes()) if has_sum else 0
        self.arrive(self.backward, versions, tensors[:weights])
        if has_sum:
            self.sums[step] = self.arrived(tensors[weights : weights + gradients])
        take_states(self.optimizer, self._layout, self.trained, tensors[weights + gradients :])

    def _empty(self) -> None:
        """Nothing is at rest here."""
        self._versions = {}
        self._empty_masters()

    def _empty_masters(self) -> None:
        for master in self.masters.values():
            master.data = master.data.new_empty(0)


def _storages(lent: Mapping[str, nn.Parameter]) -> Iterable[torch.UntypedStorage]:
    """The one storage of parameters that a pass was lent; none where there are no parameters."""
    return [one.untyped_storage() for one in list(lent.values())[:1]]
