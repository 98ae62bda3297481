"""What a checkpoint holds of a process, taken from it and given to it again.

Parameters and optimizer states after t updates are the same on all processes of a stage once what is in flight has
ended; so one of them writes them. Running statistics and random generators are each process's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.states import StageStates
from galvatron_lite.runtime.checkpoint.plain import alone, check_plain, generators
from galvatron_lite.runtime.cyclic.manifest import StageRecord
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime
from galvatron_lite.runtime.cyclic.state import between


def writer_of(programme: CyclicProgramme, stage: int, step: int) -> int:
    """The process that writes a stage before training step ``step``: one that still uses the older parameters, if any.

    It is that of the last worker who does, so that under ``data`` every process writes one stage.
    """
    if programme.setting is CyclicSetting.ZERO:
        return programme.home(stage)
    last = programme.workers - 1
    return programme.process_of(stage, step * programme.workers + (last if stage == last else last - 1 - stage))


def uses_older(programme: CyclicProgramme, process: int, stage: int, step: int) -> bool:
    """Whether a process keeps a stage's parameters before their last update, for its passes from step ``step`` on."""
    if programme.setting is CyclicSetting.ZERO:
        own = [step * programme.workers] if programme.home(stage) == process else []
    else:
        numbers = range(step * programme.workers, (step + 1) * programme.workers)
        own = [number for number in numbers if programme.process_of(stage, number) == process]
    return bool(own) and programme.version(stage, own[0]) < step


def stage_content(states: StageStates) -> dict[str, Any]:
    """What a checkpoint holds of a stage.

    Raises:
        InputError: the optimizer's or scheduler's state holds what cannot be read again safely.
    """
    older = states.newest - 1
    content = {
        "newest": {name: alone(one) for name, one in states.masters.items()},
        "older": _trained(states.at(older)) if older in states.versions else None,
        "optimizer": None if states.optimizer is None else states.optimizer.state_dict(),
        "scheduler": None if states.scheduler is None else states.scheduler.state_dict(),
    }
    for what in ("optimizer", "scheduler"):
        check_plain(content[what], what)
    return content | {"optimizer": map_tensors(content["optimizer"], alone)}


def stage_record(states: StageStates) -> StageRecord:
    """What the manifest says of a stage."""
    parameters = {name: described(one) for name, one in states.likes.items()}
    return StageRecord(parameters, _kind(states.optimizer), _kind(states.scheduler))


def described(tensor: Tensor) -> str:
    """Dtype and shape: ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def put_stage(states: StageStates, content: Mapping[str, Any]) -> None:
    """Give a stage its newest parameters, and its optimizer and scheduler their states; versions are said elsewhere.

    Where the stage is not at home (``zero``) there are options alone.

    Raises:
        InputError: the optimizer has other parameter groups.
    """
    if states.optimizer is not None and content["optimizer"] is not None:
        _put_optimizer(states, states.optimizer, content)
    if states.is_home:
        for name, master in states.masters.items():
            master.data.copy_(content["newest"][name])


def _put_optimizer(states: StageStates, optimizer: torch.optim.Optimizer, content: Mapping[str, Any]) -> None:
    kept, place = content["optimizer"], content["scheduler"]
    if [len(group["params"]) for group in kept["param_groups"]] != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        remedy = "Its parameter groups are others than the checkpoint's. Make it as it was made then."
        raise InputError("optimizer", type(optimizer).__name__, remedy)
    if not states.is_home:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in kept["param_groups"]]
        states.options = groups, place or states.options[1]
        return
    optimizer.load_state_dict(kept)
    if states.scheduler is not None and place is not None:
        states.scheduler.load_state_dict(place)


def older_values(states: StageStates, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values of a stage's parameters before their last update, where they live."""
    return {name: one.to(states.masters[name].device) for name, one in content["older"].items()}


def process_content(runtime: CyclicRuntime, rest: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a checkpoint holds of a process.

    Args:
        runtime: of this process.
        rest: entries of the model's state that no stage has, by name.
    """
    buffers = {stage: {name: alone(one) for name, one in part.buffers()} for stage, part in runtime.parts.items()}
    return {"buffers": buffers, "rest": {name: alone(one) for name, one in rest.items()}, "random": generators()}


def put_buffers(runtime: CyclicRuntime, contents: Sequence[Mapping[str, Any]]) -> None:
    """Give this process's stages their buffers: means of running statistics where several processes had them."""
    for stage, part in runtime.parts.items():
        known = [one["buffers"][stage] for one in contents if stage in one["buffers"]]
        for name, buffer in part.buffers():
            found = [one[name] for one in known if name in one]
            if found:
                buffer.copy_(between(found))


def put_rest(rest: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Give entries of the model's state that no stage has their values."""
    for name, value in rest.items():
        if name in content["rest"]:
            value.copy_(content["rest"][name])


def _trained(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that training changes; the others are the same in every version."""
    return {name: alone(one) for name, one in parameters.items() if one.requires_grad}


def _kind(one: object) -> str | None:
    return None if one is None else type(one).__name__
