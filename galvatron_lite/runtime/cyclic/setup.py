"""Setting up a process of cyclic data parallelism: its stages with values and precision, and the model's full state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import LossFn, call_model, loss_of, map_tensors
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.executor import Executor, SeededDraws
from galvatron_lite.parallelism.cyclic.mailbox import ProcessMailbox
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.stages import StagePart, StageStates, check_untied, cut_stages, stage_of
from galvatron_lite.parallelism.precision import compute_context
from galvatron_lite.parallelism.wrapping import wrap_forward
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import LayerAssignment, place_layers
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.parameters.pieces import Entries, LocalShard, complete_shard, entries_of
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.runtime.preparation import flow_or_none


@dataclass(frozen=True, slots=True)
class CyclicOptions:
    """Options for setting up a model; see ``CyclicModel``."""

    device: torch.device
    compute: torch.dtype | None = None
    loss_fn: LossFn | None = None
    init_fn: Callable[[nn.Module], None] | None = None
    seed: int = 0  # of initial values
    early_release: bool = False
    draws: int = 0  # seed of the random numbers in passes

    def call(self, part: StagePart, microbatch: Any) -> Any:
        """Run the forward pass of a stage; the last stage returns the loss."""
        with compute_context(self.compute, self.device):
            output = call_model(part.model, microbatch)
            return loss_of(output, microbatch, self.loss_fn) if part.cut.last else output


@dataclass(frozen=True, slots=True)
class CyclicRuntime:
    """A process of cyclic data parallelism."""

    process: int  # number
    parts: Mapping[int, StagePart]  # the stages that it runs, by number
    executor: Executor  # runs the passes
    device: torch.device
    model: nn.Module  # the user's
    entries: Entries  # of the full model's state


def programme_of(plan: Plan, early_release: bool = False) -> CyclicProgramme:
    """Return the programme of the processes of a plan."""
    assert plan.cyclic is not None, "the plan is of cyclic data parallelism"
    return CyclicProgramme(plan.cyclic.rule, plan.cyclic.setting, len(plan.stages), early_release=early_release)


def set_up(
    model: nn.Module,
    plan: Plan,
    layers: Sequence[Layer],
    batch: Any,
    process: int,
    mailbox: ProcessMailbox,
    options: CyclicOptions,
) -> CyclicRuntime:
    """Split the model into stages, and create the executor of this process. There is no communication."""
    entries, placed = entries_of(model, layers), place_layers(plan, layers)
    names = [[assignment.layer.name for assignment in stage] for stage in placed]
    programme = programme_of(plan, options.early_release)
    check_untied(model, layers, names)
    flow = flow_or_none(model, layers, batch, options.loss_fn) if len(names) > 1 else None
    materializer = Materializer(model, layers, options.device, options.seed, options.init_fn)
    cut: Sequence[StagePart] = ()
    needed = list(layers)
    if programme.setting is CyclicSetting.STAGES:
        (number,) = programme.stages_of(process)
        cut = [stage_of(model, layers, names, number, flow, options.device)]
        # any stage may read the buffers of the layer before the blocks
        needed = [layer for layer in layers if layer.role is Role.BEFORE or layer.name in names[number]]
    for layer in needed:
        materializer.place(layer)
    parts = {part.number: part for part in cut or cut_stages(model, layers, names, flow)}
    for number, part in parts.items():
        _prepare(part, placed[number], options.compute)
    states = {number: StageStates(part.parameters()) for number, part in parts.items()}
    draws = SeededDraws(options.draws, options.device)
    executor = Executor(programme, process, parts, states, mailbox, options.call, options.device, draws)
    return CyclicRuntime(process, parts, executor, options.device, model, entries)


def _prepare(part: StagePart, stage: Sequence[LayerAssignment], compute: torch.dtype | None) -> None:
    def narrowed(tensor: Tensor) -> Tensor:
        return tensor.to(compute) if tensor.is_floating_point() else tensor

    def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors((args, kwargs), narrowed)

    for assignment in stage:
        for path in assignment.layer.modules if assignment.layer.role is Role.BLOCK else ():
            module = part.model.get_submodule(path)
            wrap_forward(module, assignment.strategy)
            if compute is not None:
                module.register_forward_pre_hook(cast, with_kwargs=True)


def average_buffers(runtime: CyclicRuntime) -> None:
    """Set the buffers of stages to their ``average`` over the processes. All ranks call it."""
    buffers = {name: buffer for part in runtime.parts.values() for name, buffer in part.buffers()}
    rank_buffers = everyone({name: buffer.cpu() for name, buffer in buffers.items()})
    for name, buffer in buffers.items():
        buffer.copy_(average([values[name] for values in rank_buffers if name in values]))


def average(values: Sequence[Tensor]) -> Tensor:
    """Combine the values of a buffer on several processes: the mean of floating-point values, the maximum of counts."""
    first = values[0]
    if all(torch.equal(first, value) for value in values[1:]):
        return first
    stacked = torch.stack(list(values))
    return stacked.mean(0) if first.is_floating_point() or first.is_complex() else stacked.amax(0)


def shared_buffers(runtime: CyclicRuntime) -> dict[str, Tensor]:
    """Return the buffers in the model's state that belong to no layer, by name."""
    homes, buffers = runtime.entries.homes, runtime.model.named_buffers()
    return {name: buffer for name, buffer in buffers if homes.get(name) == "" and not buffer.is_meta}


def local_shards(runtime: CyclicRuntime) -> list[LocalShard]:
    """Return the state that this process holds; after ``flush`` it is equal on all processes of a stage."""
    tensors: dict[str, Tensor] = shared_buffers(runtime)
    for stage, states in runtime.executor.states.items():
        tensors |= states.masters
        tensors |= runtime.parts[stage].buffers()
    names = runtime.entries.names
    return [complete_shard(name, tensor.detach()) for name, tensor in tensors.items() if name in names]
