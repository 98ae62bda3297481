"""Making a process ready for its passes: values, stages, precision, what it holds of each stage."""

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
from galvatron_lite.runtime.parameters.full_state import gather_named
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.parameters.pieces import Entries, LocalShard, complete_shard, entries_of
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.runtime.preparation import flow_or_none


@dataclass(frozen=True, slots=True)
class CyclicOptions:
    """How a model is set up; see ``CyclicModel``."""

    device: torch.device
    compute: torch.dtype | None = None
    loss_fn: LossFn | None = None
    init_fn: Callable[[nn.Module], None] | None = None
    seed: int = 0
    early_release: bool = False
    draws: int = 0  # seed of the passes' random numbers

    def call(self, part: StagePart, microbatch: Any) -> Any:
        """Run a stage's model; the last stage gives the loss."""
        with compute_context(self.compute, self.device):
            output = call_model(part.model, microbatch)
            return loss_of(output, microbatch, self.loss_fn) if part.cut.last else output


@dataclass(frozen=True, slots=True)
class CyclicRuntime:
    """What a process is made of."""

    process: int  # its number
    parts: Mapping[int, StagePart]  # the stages that it runs, by number
    executor: Executor  # runs them
    device: torch.device
    model: nn.Module  # the user's
    entries: Entries  # of the full model's state


def programme_of(plan: Plan, early_release: bool = False) -> CyclicProgramme:
    """What the processes of a plan do."""
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
    """Cut the model and make what runs its stages. No communication."""
    entries, placed = entries_of(model, layers), place_layers(plan, layers)
    names = [[one.layer.name for one in stage] for stage in placed]
    programme = programme_of(plan, options.early_release)
    check_untied(model, layers, names)
    flow = flow_or_none(model, layers, batch, options.loss_fn) if len(names) > 1 else None
    materializer = Materializer(model, layers, options.device, options.seed, options.init_fn)
    cut: Sequence[StagePart] = ()
    needed = list(layers)
    if programme.setting is CyclicSetting.STAGES:
        (number,) = programme.stages_of(process)
        cut = [stage_of(model, layers, names, number, flow, options.device)]
        # the buffers of the layer before the blocks may be read in any stage
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

    for one in stage:
        for path in one.layer.modules if one.layer.role is Role.BLOCK else ():
            module = part.model.get_submodule(path)
            wrap_forward(module, one.strategy)
            if compute is not None:
                module.register_forward_pre_hook(cast, with_kwargs=True)


def full_state(runtime: CyclicRuntime) -> dict[str, Tensor]:
    """The model's ``state_dict()``, after ``flush``, on the CPU of every rank; all ranks call it."""
    return gather_named(local_shards(runtime), runtime.entries)


def even_out(runtime: CyclicRuntime) -> None:
    """Give every process the mean of the running statistics; the largest of counts. All ranks call it."""
    buffers = {name: buffer for part in runtime.parts.values() for name, buffer in part.buffers()}
    every = everyone({name: buffer.cpu() for name, buffer in buffers.items()})
    for name, buffer in buffers.items():
        buffer.copy_(between([one[name] for one in every if name in one]))


def loose_buffers(runtime: CyclicRuntime) -> dict[str, Tensor]:
    """Buffers of the model's state that no layer has, by name."""
    buffers = runtime.model.named_buffers()
    return {name: one for name, one in buffers if runtime.entries.homes.get(name) == "" and not one.is_meta}


def between(values: Sequence[Tensor]) -> Tensor:
    """One value for all: the mean of statistics, the largest of counts; theirs where they are equal."""
    first = values[0]
    if all(torch.equal(first, value) for value in values[1:]):
        return first
    stacked = torch.stack(list(values))
    return stacked.mean(0) if first.is_floating_point() or first.is_complex() else stacked.amax(0)


def local_shards(runtime: CyclicRuntime) -> list[LocalShard]:
    """What this process has of the state; after ``flush`` all processes of a stage have the same."""
    tensors: dict[str, Tensor] = loose_buffers(runtime)
    for stage, states in runtime.executor.states.items():
        tensors |= states.masters
        tensors |= runtime.parts[stage].buffers()
    return [complete_shard(name, one.detach()) for name, one in tensors.items() if name in runtime.entries.names]
