"""Processes of our own that run a small plan for real: forks, each of which writes what it found to a file.

A process that has run a backward pass on a machine with a GPU, or whose threads have shared work, must not fork any
more. So ``Nursery`` forks once, early, and all others are forks of that one, which does nothing else.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import call_model, loss_of, slice_batch
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.pieces import Held, held_gradients, held_parameters, part_of
from galvatron_lite.verify.numbers.shrink import Recipe, Small, make_small
from galvatron_lite.verify.source import ModelSource

LEARNING_RATE, MOMENTUM = 0.05, 0.9
RELATIVE = 1e-5
"""Largest error of a tensor, in its reference's largest entry: what another order of float32 sums makes."""
EPSILON = torch.finfo(torch.float32).eps

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ReferenceTraining:
    """What one process computes."""

    initial: dict[str, Tensor]  # the model's state before the first step
    losses: list[float]  # of every step, and of one more batch
    norm: float  # of the first gradient
    first: dict[str, Tensor]  # gradients of the first step and of the last batch
    last: dict[str, Tensor]
    parameters: dict[str, Tensor]  # after the steps
    draws: bool  # whether a forward pass gives another loss when it is run again: it draws random numbers


@dataclass(slots=True)
class RankFinding:
    """What one rank found."""

    wrong: list[str] = field(default_factory=list)  # what differs from one process, a line each
    # by what was compared and the tensor's name: boxes that this rank has and items in them
    held: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)


def train_alone(small: Small, plan: Plan) -> ReferenceTraining:
    """The small model, trained by plain PyTorch.

    The whole batch in one go; in the plan's micro-batches where statistics of the samples of a pass are taken.
    """
    model = small.model
    count = plan.microbatches if small.normed else 1
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    draws = _draws(small)
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    parameters: dict[str, Tensor] = {}
    norm = 0.0
    for number, batch in enumerate(small.batches):
        if number == len(small.batches) - 1:
            parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer.zero_grad()
        losses.append(_backward(small, batch, count))
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        norm = norm if number else float(torch.stack([one.norm().double() for one in gradients[0].values()]).norm())
        optimizer.step()
    return ReferenceTraining(initial, losses, norm, gradients[0], gradients[-1], parameters, draws)


def _draws(small: Small) -> bool:
    with torch.no_grad():
        first, again = (_loss(small, small.batches[0]) for _ in range(2))
    return bool(first != again)


def _loss(small: Small, batch: Any) -> Tensor:
    return loss_of(call_model(small.model, batch), batch, small.loss_fn)


def _backward(small: Small, batch: Any, count: int) -> float:
    from galvatron_lite.model.batch import batch_size

    each, total = batch_size(batch) // count, 0.0
    for number in range(count):
        loss = _loss(small, slice_batch(batch, number * each, (number + 1) * each)) / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def train_under_plan(small: Small, plan: Plan, reference: ReferenceTraining) -> RankFinding:
    """The same under the plan, on every rank of its world, held against the reference."""
    small.model.load_state_dict(reference.initial)
    parallel = ParallelModel(
        small.model, plan, small.layers, small.batches[0], loss_fn=small.loss_fn, device="cpu", precision="fp32"
    )
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    finding, relative = RankFinding(), RELATIVE * small.relative
    first, *others, final = small.batches
    losses = [_global(parallel.backward_step(first))]
    _compare(finding, "gradients of step 1", held_gradients(parallel), reference.first, relative)
    norm = float(parallel.clip_grad_norm(float("inf")))
    if not abs(norm - reference.norm) <= relative * reference.norm:
        finding.wrong.append(f"norm of the gradient is {norm:.8g}, not {reference.norm:.8g}")
    optimizer.step()
    optimizer.zero_grad()
    losses += [float(parallel.train_step(batch, optimizer)) for batch in others]
    _compare(
        finding, f"weights after step {len(others) + 1}", held_parameters(parallel), reference.parameters, relative
    )
    losses.append(_global(parallel.backward_step(final)))
    _compare(finding, f"gradients of step {len(others) + 2}", held_gradients(parallel), reference.last, relative)
    finding.wrong[:0] = _losses(losses, reference.losses, relative)
    return finding


def _global(part: Tensor) -> float:
    """The batch's loss from this rank's part of it."""
    total = part.detach().clone()
    dist.all_reduce(total)
    return float(total)


def _losses(losses: list[float], expected: list[float], relative: float) -> Iterator[str]:
    for number, (loss, wanted) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(loss - wanted) <= relative * abs(wanted):
            yield f"loss of step {number} is {loss:.8g}, not {wanted:.8g}"


def _compare(finding: RankFinding, what: str, held: list[Held], expected: Tensors, relative: float) -> None:
    """Hold this rank's parts of tensors against whole ones.

    The largest error is ``relative`` times the largest entry of the whole tensor. Some gradients are zero in exact
    arithmetic (a bias of attention keys shifts every score alike) and rounding noise in float32, so one float32 epsilon
    of the largest entry of all tensors is allowed as well.
    """
    noise = EPSILON * max((float(one.abs().max()) for one in expected.values() if one.numel()), default=0.0)
    boxes = finding.held.setdefault(what, {})
    for one in held:
        reference = expected.get(one.name)
        if reference is None:
            finding.wrong.append(f"{what}: {one.name} has some, but none in one process")
            continue
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        error = 0.0
        for chunk in one.chunks:
            boxes.setdefault(one.name, {})[str(chunk.whole.ranges)] = chunk.whole.items
            own, other = part_of(one.tensor, chunk.local), part_of(reference, chunk.whole)
            if own.numel():
                difference = float((own.detach().to(other) - other).abs().max())
                error = difference if difference != difference else max(error, difference)
        if not error <= relative * scale + noise:
            finding.wrong.append(f"{what}: {one.name} is off by {error:.3g} where the largest entry is {scale:.3g}")


PATIENCE = 60.0  # seconds that a rank waits for another one
GRACE = 3.0  # seconds that the others are given once one rank has failed
REFERENCE = "reference.pt"
HANGS = "hangs"  # what a rank that did not finish is said to have done

Work = Callable[[], None]


class Nursery:
    """A fork of this process that starts others, made before anything that forbids forking has happened."""

    def __init__(self, source: ModelSource, patience: float = PATIENCE) -> None:
        self._ours, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _leave(lambda: _serve(theirs, source, patience, self._ours))
        theirs.close()

    def train(self, recipe: Recipe, folder: Path, timeout: float) -> dict[int, dict[str, Any]]:
        """Run the small plan of a recipe.

        Returns:
            By rank (-1: the one process that trains alone) what it wrote: ``wrong``, ``held``, or ``error``.
        """
        self._ours.send((recipe, str(folder), timeout))
        if not self._ours.poll(2 * timeout + 4 * GRACE):
            return {}
        self._ours.recv()
        found = {rank: _read(folder / _file(rank)) for rank in range(-1, recipe.plan.devices)}
        return {rank: result for rank, result in found.items() if result is not None}

    def close(self) -> None:
        """End the fork."""
        self._ours.close()
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave(work: Work) -> None:
    """Do something in a fork and end it; gloo's threads may abort a normal exit of the interpreter."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(connection: Connection, source: ModelSource, patience: float, other: Connection) -> None:
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    while True:
        try:
            recipe, folder, timeout = connection.recv()
        except (EOFError, OSError):
            return
        _run(recipe, Path(folder), source, patience, timeout, connection)
        connection.send(True)


def _run(
    recipe: Recipe, folder: Path, source: ModelSource, patience: float, timeout: float, connection: Connection
) -> None:
    """The reference first, then the ranks, which read it."""
    _all([lambda: _alone(recipe, folder, source)], folder, timeout, connection, first=-1)
    if not (folder / REFERENCE).exists():
        return
    work = [_rank_of(rank, recipe, folder, source, patience) for rank in range(recipe.plan.devices)]
    _all(work, folder, timeout, connection, first=0)


def _rank_of(rank: int, recipe: Recipe, folder: Path, source: ModelSource, patience: float) -> Work:
    return lambda: _under_plan(rank, recipe, folder, source, patience)


def _all(works: Sequence[Work], folder: Path, timeout: float, connection: Connection, first: int) -> None:
    """Run each in a process; those that do not end in time, or long after another has failed, are ended."""
    running = {_fork(work, folder, first + number): first + number for number, work in enumerate(works)}
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                result = _read(folder / _file(running.pop(pid)))
                if result is None or result.get("error"):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if connection.poll(0.02):  # nobody is left to tell
            break
    for pid in running:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3 if running else 0.0)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(work: Work, folder: Path, number: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _leave(lambda: _guarded(work, folder, number))
    return pid


def _guarded(work: Work, folder: Path, number: int) -> None:
    """Do the work; an error goes to the file of results, and on SIGUSR1 where the process is to another."""
    stacks = (folder / f"stack{number}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    errors = os.open(folder / f"said{number}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(errors, 2)
    try:
        work()
    except Exception as error:
        _write(folder, number, {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _file(number: int) -> str:
    return "alone.json" if number < 0 else f"rank{number}.json"


def _write(folder: Path, number: int, result: dict[str, Any]) -> None:
    path = folder / _file(number)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as stream:
        json.dump(result, stream)
    os.replace(stream.name, path)


def _read(path: Path) -> dict[str, Any] | None:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    number = path.stem.removeprefix("rank")
    stack = path.parent / f"stack{number}"
    text = stack.read_text(errors="replace") if stack.exists() else ""
    return {"error": HANGS, "trace": text} if text else None


def _alone(recipe: Recipe, folder: Path, source: ModelSource) -> None:
    torch.set_num_threads(1)
    begun = time.process_time()
    reference = train_alone(make_small(source, recipe), recipe.plan)
    items = {name: one.numel() for name, one in reference.parameters.items()}
    graded = {name: one.numel() for name, one in reference.first.items()}
    torch.save(asdict(reference), folder / f"{REFERENCE}.part")
    os.replace(folder / f"{REFERENCE}.part", folder / REFERENCE)
    seconds = time.process_time() - begun
    _write(folder, -1, {"draws": reference.draws, "items": items, "graded": graded, "seconds": seconds})


def _under_plan(rank: int, recipe: Recipe, folder: Path, source: ModelSource, patience: float) -> None:
    torch.set_num_threads(1)
    begun = time.process_time()
    world, waits = recipe.plan.devices, timedelta(seconds=patience)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=waits)
    reference = ReferenceTraining(**torch.load(folder / REFERENCE, weights_only=True))
    finding = train_under_plan(make_small(source, recipe), recipe.plan, reference)
    seconds = time.process_time() - begun
    _write(folder, rank, {"wrong": finding.wrong, "held": finding.held, "seconds": seconds})
    # no rank may close its connections while another still reads from them
    dist.barrier()
