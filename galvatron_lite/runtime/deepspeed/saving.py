"""Checkpoints of a model that DeepSpeed trains, in the format of all plans.

DeepSpeed keeps flat shards of its own making. So a checkpoint is written of a mirror: a plain copy of the model in host
memory with whole parameters and optimizer states, which every rank makes, and of which each writes a part. Any plan of
ours, the plain model, and any stage and number of devices of DeepSpeed load it; and DeepSpeed loads theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.interfaces import ExtraState, Resumed
from galvatron_lite.runtime.checkpoint.keeper import Checkpointer
from galvatron_lite.runtime.checkpoint.whole import alone
from galvatron_lite.runtime.deepspeed.optimizer import EngineOptimizer
from galvatron_lite.runtime.deepspeed.states import put_states, whole_states

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.runtime.parallelize import StageRuntime
    from galvatron_lite.runtime.phases import Steering
    from galvatron_lite.runtime.pieces import Entries
    from galvatron_lite.runtime.scaling import LossScaler


@dataclass(slots=True)
class Mirror:
    """A plain model as ``Checkpointer`` sees one that is split; its parts are those of the last save or load."""

    plan: Plan
    module: nn.Module
    entries: Entries
    runtimes: Sequence[StageRuntime] = ()
    structures: Sequence[nn.Module] = ()
    step: int = 0
    scaler: LossScaler | None = None
    steering: Steering | None = None
    streams: Sequence[Any] = field(default=())


class Engined(Protocol):
    """A model that DeepSpeed's engine trains."""

    plan: Plan
    module: nn.Module
    step: int

    @property
    def engine(self) -> Any:
        """DeepSpeed's; None until there is an optimizer."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state."""
        ...

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the whole model's state."""
        ...


class DeepSpeedSaver:
    """Saves and loads; every rank makes one at the same time.

    Each holds all of the model and of the optimizer's states in host memory meanwhile. fp16's loss scale is not saved.

    Args:
        parallel: the model.
        pristine: a copy of the user's model without storages, made before anything was changed.
    """

    def __init__(self, parallel: Engined, pristine: nn.Module) -> None:
        self._parallel, self._pristine = parallel, pristine
        self._mirror = Mirror(parallel.plan, pristine, alone(pristine).entries)
        self._keeper = Checkpointer(self._mirror)

    def save(self, place: Path, extra_state: ExtraState, step: int, keep: int | None, asynchronous: bool) -> None:
        """Write a checkpoint; see ``Saving.save``.

        Raises:
            InputError: the optimizer is none that ``optimizer(factory, **options)`` made.
        """
        inner = self._mirrored(extra_state.optimizer)
        if inner is not None:
            states = whole_states(self._parallel.engine, self._parallel.module)
            named = dict(self._mirror.module.named_parameters())
            for name, state in states.items():
                inner.state[named[name]] = state
        self._keeper.save(place, _with(extra_state, inner), step, keep, asynchronous)

    def finish(self) -> None:
        """Wait until what is being written is on the disk."""
        self._keeper.finish()

    def load(self, folder: Path, extra_state: ExtraState) -> Resumed:
        """Take a checkpoint."""
        inner = self._mirrored(extra_state.optimizer)
        resumed = self._keeper.load(folder, _with(extra_state, inner))
        self._take(inner, resumed)
        return resumed

    def load_latest(self, folder: Path, extra_state: ExtraState, ignore_damaged: bool = False) -> Resumed | None:
        """Take the newest whole checkpoint of a folder; None: there is none."""
        inner = self._mirrored(extra_state.optimizer)
        resumed = self._keeper.load_latest(folder, _with(extra_state, inner), ignore_damaged)
        if resumed is not None:
            self._take(inner, resumed)
        return resumed

    def _mirrored(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """A mirror with the values of now, and an optimizer over it like the given one, without states."""
        values = self._parallel.full_state_dict()
        memo = dict(_replaced(self._pristine, values))
        module = copy.deepcopy(self._pristine, memo)
        seen = alone(module)
        self._mirror.module, self._mirror.entries = module, seen.entries
        self._mirror.runtimes, self._mirror.structures = seen.runtimes, seen.structures
        return None if optimizer is None else self._like(optimizer, module)

    def _like(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
        if not isinstance(optimizer, EngineOptimizer) or optimizer.factory is None:
            remedy = "Make it with parallel.optimizer(factory, **options): one like it is made to save its states."
            raise InputError("optimizer", type(optimizer).__name__, remedy)
        trained = [one for one in module.parameters() if one.requires_grad]
        made: torch.optim.Optimizer = optimizer.factory([{"params": trained}], **optimizer.options)
        for group, own in zip(made.param_groups, optimizer.param_groups, strict=True):
            group |= {key: value for key, value in own.items() if key in group and key != "params"}
        return made

    def _take(self, inner: torch.optim.Optimizer | None, resumed: Resumed) -> None:
        """Give DeepSpeed what the mirror has."""
        parallel, module = self._parallel, self._mirror.module
        parallel.step = resumed.step
        parallel.load_full_state_dict(module.state_dict())
        if inner is None:
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        put_states(parallel.engine, parallel.module, {names[id(one)]: state for one, state in inner.state.items()})
        for group, own in zip(inner.param_groups, parallel.engine.basic_optimizer.param_groups, strict=True):
            own |= {key: value for key, value in group.items() if key != "params"}


def _with(extra_state: ExtraState, inner: torch.optim.Optimizer | None) -> ExtraState:
    return ExtraState(inner, extra_state.scheduler, extra_state.data, extra_state.extra)


def _replaced(pristine: nn.Module, values: Mapping[str, Tensor]) -> Iterator[tuple[int, Any]]:
    """Tensors with values in the place of those without, by identity, for ``copy.deepcopy``."""
    for name, parameter in pristine.named_parameters():
        yield id(parameter), nn.Parameter(values[name], parameter.requires_grad)
    for name, buffer in pristine.named_buffers():
        yield id(buffer), values.get(name, torch.empty_like(buffer, device="cpu"))
