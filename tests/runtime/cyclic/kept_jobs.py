"""What ranks run to see whether training that was stopped goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import folders
from galvatron_lite.errors import InputError
from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.parallelism.cyclic.models import WIDTH, blocks_case, make_batches, make_plan
from tests.runtime.cyclic.saving import ADAM

STEPS, EVERY, LOST_AT = 6, 2, 5
Kept = tuple[list[float], dict[str, Tensor]]
"""Losses of training steps, and the whole state."""


def make(count: int, setting: str, seed: int = 7, timeout: float = 60.0) -> CyclicModel:
    """A stage of a block each, with something to drop and running statistics."""
    torch.manual_seed(seed)
    model, layers, stages = blocks_case(count)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = nn.Sequential(block, nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
    return CyclicModel(model.double(), make_plan(stages, "cdp-v2", setting, rows=4), layers, timeout=timeout)


def go_on(model: CyclicModel, end: int, before: Callable[[int], Any] = lambda _: None) -> list[float]:
    """Train up to a step on batches that the process's own generator chooses; losses. ``before``: a step."""
    known, losses = batches_of(len(model.plan.stages)), []
    optimizer = model._optimizer
    assert optimizer is not None
    for step in range(model.step, end):
        before(step)
        losses.append(float(model.train_step(known[int(torch.randint(len(known), ()))], optimizer)))
    return losses


def batches_of(count: int) -> list[dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = make_batches(8, count, rows=4)
    return [{key: value.double() for key, value in batch.items()} for batch in made]


def ended(model: CyclicModel, losses: list[float]) -> Kept:
    """With the mean of what became known when all passes had ended."""
    last = model.flush()
    return [*losses, *([] if last is None else [float(last)])], model.full_state_dict()


def whole(count: int, setting: str) -> Kept:
    """Without a break."""
    model = make(count, setting)
    model.optimizer(ADAM)
    return ended(model, go_on(model, STEPS))


def saved_and_resumed(count: int, setting: str, folder: str) -> dict[str, Kept]:
    """Without a break; writing checkpoints on the way; going back to one; from the last, on a model of another seed."""
    saving = make(count, setting)
    saving.optimizer(ADAM)

    def save(step: int) -> None:
        if step and step % EVERY == 0:
            saving.save(Path(folder, f"step-{step}"))

    written = ended(saving, go_on(saving, STEPS, save))
    saving.load(Path(folder, "step-2"))
    back = ended(saving, go_on(saving, STEPS))
    resumed = make(count, setting, seed=99)
    resumed.optimizer(ADAM)
    assert resumed.load_latest(folder) == Path(folder, "step-4")
    assert resumed.step == 4
    after = ended(resumed, go_on(resumed, STEPS))
    return {"written": written, "back": back, "resumed": after, "whole": whole(count, setting)}


def lost_in_a_pass(
    count: int, setting: str, folder: str, lost: int, how: int, patience: float, at: int = LOST_AT
) -> None:
    """Train and write checkpoints; in the middle of a training step's passes a rank gets a signal."""
    model = make(count, setting, timeout=patience)
    model.optimizer(ADAM)

    def watch(step: int) -> None:
        if step and step % EVERY == 0:
            model.save(Path(folder, f"step-{step}"))
        if step == at and dist.get_rank() == lost:
            for part in model.runtime.parts.values():
                part.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), how))

    ended(model, go_on(model, STEPS, watch))


def lost_while_saving(count: int, setting: str, folder: str, lost: int) -> None:
    """A rank is killed when it has written half of what it has to write."""
    model = make(count, setting)
    model.optimizer(ADAM)
    go_on(model, 1)
    model.save(Path(folder, "step-1"))
    go_on(model, 2)
    write = folders.FileSink.write

    def half(sink: folders.FileSink, data: Any) -> int:
        if dist.get_rank() == lost:
            write(sink, memoryview(data)[: memoryview(data).nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(sink, data)

    with patch.object(folders.FileSink, "write", half):
        model.save(Path(folder, "step-2"))


def full_on_one(count: int, setting: str, folder: str, full: int) -> dict[str, Any]:
    """One rank's disk is full when the second checkpoint is written; training goes on, and so does the first one."""
    model = make(count, setting)
    model.optimizer(ADAM)
    losses, told = go_on(model, 2), ""
    model.save(Path(folder, "last"))
    losses += go_on(model, 4)
    opener = Path.open

    def no_room(path: Path, *args: Any, **kwargs: Any) -> Any:
        """What is written goes to a device that is always full."""
        return opener(Path("/dev/full") if path.suffix == ".pt" else path, "wb", **kwargs)

    with patch.object(Path, "open", no_room if dist.get_rank() == full else opener):
        try:
            model.save(Path(folder, "last"))
        except InputError as error:
            told = str(error)
    return {"told": told, "kept": ended(model, losses + go_on(model, STEPS))}


def from_the_last(count: int, setting: str, folder: str) -> dict[str, Any]:
    """Go on from the last whole checkpoint, and beside it train without a break."""
    model = make(count, setting, seed=99)
    model.optimizer(ADAM)
    found = model.load_latest(folder)
    resumed = ended(model, go_on(model, STEPS))
    return {"found": found, "resumed": resumed, "whole": whole(count, setting)}
