"""Checkpoints of a model that DeepSpeed trains, in the format of all plans.

DeepSpeed keeps flat shards. So a checkpoint is written of a mirror: a plain copy of the model in host memory with full
parameters and optimizer states, which every rank makes, and of which each writes a part. Any plan of ours, the plain
model, and any stage and number of devices of DeepSpeed load it; and DeepSpeed loads theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer
from galvatron_lite.runtime.checkpoint.saving import ExtraState, Resumed
from galvatron_lite.runtime.checkpoint.unsplit import unsplit
from galvatron_lite.runtime.deepspeed.library import EngineOptimizer
from galvatron_lite.runtime.deepspeed.states import full_states, put_states

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel
    from galvatron_lite.runtime.parallelize import StageRuntime
    from galvatron_lite.runtime.parameters.pieces import Entries
    from galvatron_lite.runtime.phases import Steering
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


class DeepSpeedSaver(Checkpointer):
    """Saves and loads a model that DeepSpeed trains; fp16's loss scale is not saved.

    Args:
        parallel: the model.
        pristine: the user's model on the meta device.
    """

    def __init__(self, parallel: DeepSpeedModel, pristine: nn.Module) -> None:
        self._model, self._pristine = parallel, pristine
        self._mirror = Mirror(parallel.plan, pristine, unsplit(pristine).entries)
        super().__init__(self._mirror)

    def save(self, place: Path, state: ExtraState, step: int, keep: int | None, asynchronous: bool) -> None:
        """Write a checkpoint; the optimizer is one from ``parallel.optimizer``, so that one like it can be made."""
        inner = self._mirrored(state.optimizer)
        if inner is not None:
            parameters = dict(self._mirror.module.named_parameters())
            for name, values in full_states(self._model.engine, self._model.module).items():
                inner.state[parameters[name]] = values
        super().save(place, replace(state, optimizer=inner), step, keep, asynchronous)

    def load(self, folder: Path, state: ExtraState) -> Resumed:
        """Load a checkpoint."""
        inner = self._mirrored(state.optimizer)
        resumed = super().load(folder, replace(state, optimizer=inner))
        self._take(inner, resumed)
        return resumed

    def load_latest(self, folder: Path, state: ExtraState, ignore_damaged: bool = False) -> Resumed | None:
        """Load the newest intact checkpoint of a folder."""
        inner = self._mirrored(state.optimizer)
        resumed = super().load_latest(folder, replace(state, optimizer=inner), ignore_damaged)
        if resumed is not None:
            self._take(inner, resumed)
        return resumed

    def _mirrored(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """Fill the mirror with present values; an optimizer over it like the given one, without states."""
        values, memo = self._model.full_state_dict(), dict[int, Any]()
        for name, parameter in self._pristine.named_parameters():
            memo[id(parameter)] = nn.Parameter(values[name], parameter.requires_grad)
        for name, buffer in self._pristine.named_buffers():
            memo[id(buffer)] = values.get(name, torch.empty_like(buffer, device="cpu"))
        module = copy.deepcopy(self._pristine, memo)
        plain = unsplit(module)
        self._mirror.module, self._mirror.entries = module, plain.entries
        self._mirror.runtimes, self._mirror.structures = plain.runtimes, plain.structures
        if optimizer is None:
            return None
        if not isinstance(optimizer, EngineOptimizer) or optimizer.factory is None:
            remedy = "Make it with parallel.optimizer(factory, **options): one like it is made to save its states."
            raise InputError("optimizer", type(optimizer).__name__, remedy)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        inner: torch.optim.Optimizer = optimizer.factory([{"params": trained}], **optimizer.options)
        for group, current in zip(inner.param_groups, optimizer.param_groups, strict=True):
            group |= {key: value for key, value in current.items() if key in group and key != "params"}
        return inner

    def _take(self, inner: torch.optim.Optimizer | None, resumed: Resumed) -> None:
        """Load the mirror into DeepSpeed."""
        model, module = self._model, self._mirror.module
        model.step = resumed.step
        model.load_full_state_dict(module.state_dict())
        if inner is None:
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        put_states(model.engine, model.module, {names[id(one)]: state for one, state in inner.state.items()})
        for group, target in zip(inner.param_groups, model.engine.basic_optimizer.param_groups, strict=True):
            target |= {key: value for key, value in group.items() if key != "params"}
