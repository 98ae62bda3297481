"""Whether a plan trains like one process: a small model under a small plan of the same kind, run for real.

It is trained on gloo processes, and by plain PyTorch in one; loss, gradients and weights are compared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import batch_size, call_model, loss_of, slice_batch
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.activations.layout import cut_box
from galvatron_lite.runtime.branches.engine import BranchedModel
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.pieces import LocalShard, held_gradients, held_parameters
from galvatron_lite.verify.launched import ForkedServer, fork
from galvatron_lite.verify.numbers.shrink import Recipe, SmallModel, TooLargeError, make_small, shrink
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource
from galvatron_lite.verify.trial.check import try_model

NAME = "numbers"
TIMEOUT = 300.0  # seconds for the reference, and for the ranks
_MOST = 12  # differences that are listed
LEARNING_RATE, MOMENTUM = 0.05, 0.9
RELATIVE = 1e-5
"""Largest error of a tensor, in its reference's largest entry: what another order of float32 sums makes."""
EPSILON = torch.finfo(torch.float32).eps
PATIENCE = 60.0  # seconds that a rank waits for another one
GRACE = 3.0  # seconds that the others are given once one rank has failed
HANGS = "hangs"  # error of a process that did not end

Tensors = Mapping[str, Tensor]
Result = Mapping[str, Any]


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


def train_alone(small: SmallModel, plan: Plan) -> ReferenceTraining:
    """The small model, trained by plain PyTorch.

    The whole batch in one go; in the plan's micro-batches where statistics of the samples of a pass are taken.
    """
    model, count = small.model, plan.microbatches if small.normed else 1
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        draws = bool(_loss(small, small.batches[0]) != _loss(small, small.batches[0]))
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    parameters: dict[str, Tensor] = {}
    for batch in small.batches:
        parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer.zero_grad()
        losses.append(_backward(small, batch, count))
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        optimizer.step()
    norm = float(torch.stack([gradient.norm().double() for gradient in gradients[0].values()]).norm())
    return ReferenceTraining(initial, losses, norm, gradients[0], gradients[-1], parameters, draws)


def _loss(small: SmallModel, batch: Any) -> Tensor:
    return loss_of(call_model(small.model, batch), batch, small.loss_fn)


def _backward(small: SmallModel, batch: Any, count: int) -> float:
    each, total = batch_size(batch) // count, 0.0
    for number in range(count):
        loss = _loss(small, slice_batch(batch, number * each, (number + 1) * each)) / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def train_under_plan(small: SmallModel, plan: Plan, reference: ReferenceTraining) -> dict[str, Any]:
    """Train under the plan, on every rank of its world.

    Returns:
        ``draws``: of the reference. ``wrong``: what differs from it, a line each. ``missing``: tensors that all ranks
        together do not have complete. ``synchronised``: whether statistics of batch norms were taken over more ranks
        than the model takes them over.
    """
    small.model.load_state_dict(reference.initial)
    # shares weigh as auto_parallelize lets them weigh: by their counts of labels, where the loss is a mean over these
    findings = try_model(small.model, small.batches[0], small.layers, loss_fn=small.loss_fn)
    kind = BranchedModel if plan.branches else ParallelModel
    parallel = kind(
        small.model, plan, small.layers, small.batches[0], loss_fn=small.loss_fn, device="cpu", precision="fp32",
        loss_weight=findings.weight,
    )  # fmt: skip
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    relative, wrong, missing = RELATIVE * small.relative, list[str](), list[str]()

    def compare(what: str, parts: list[LocalShard], expected: Tensors) -> None:
        wrong.extend(f"{what}: {line}" for line in _differences(parts, expected, relative))
        missing.extend(f"{what}: {line}" for line in _incomplete(parts, expected))

    first, *others, final = small.batches
    losses = [_global(parallel.backward_step(first))]
    compare("gradients of step 1", held_gradients(parallel), reference.first)
    norm = float(parallel.clip_grad_norm(float("inf")))
    if not abs(norm - reference.norm) <= relative * reference.norm:
        wrong.append(f"norm of the gradient is {norm:.8g}, not {reference.norm:.8g}")
    optimizer.step()
    optimizer.zero_grad()
    losses += [float(parallel.train_step(batch, optimizer)) for batch in others]
    compare(f"weights after step {len(others) + 1}", held_parameters(parallel), reference.parameters)
    losses.append(_global(parallel.backward_step(final)))
    compare(f"gradients of step {len(others) + 2}", held_gradients(parallel), reference.last)
    pairs = enumerate(zip(losses, reference.losses, strict=True), 1)
    off = [
        f"loss of step {number} is {loss:.8g}, not {wanted:.8g}"
        for number, (loss, wanted) in pairs
        if not abs(loss - wanted) <= relative * abs(wanted)
    ]
    parts = [*(stage.runs for stage in plan.stages), *(branch.runs for branch in plan.branches)]
    apart = small.synchronised and any(run.strategy.batch_degree > 1 for runs in parts for run in runs)
    return {"draws": reference.draws, "wrong": [*off, *wrong], "missing": missing, "synchronised": apart}


def _incomplete(parts: list[LocalShard], expected: Tensors) -> Iterator[str]:
    """Tensors of which all ranks together do not have every item; all ranks call it."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {(part.name, str(part.box.ranges)): part.box.items for part in parts})
    items = Counter[str]()
    for (name, _), size in {box: size for some in every for box, size in some.items()}.items():
        items[name] += size
    for name, tensor in expected.items():
        if items[name] < tensor.numel():
            yield f"of {name} all ranks together have {items[name]} of {tensor.numel()} items"


def _global(part: Tensor) -> float:
    """The batch's loss from this rank's part of it."""
    total = part.detach().clone()
    dist.all_reduce(total)
    return float(total)


def _differences(held: list[LocalShard], expected: Tensors, relative: float) -> Iterator[str]:
    """Parts of tensors against whole ones.

    The largest error is ``relative`` times the largest entry of the whole tensor. Some gradients are zero in exact
    arithmetic (a bias of attention keys shifts every score alike) and rounding noise in float32, so one float32 epsilon
    of the largest entry of all tensors is allowed as well.
    """
    noise = EPSILON * max((float(one.abs().max()) for one in expected.values() if one.numel()), default=0.0)
    errors: dict[str, list[Tensor]] = {}
    for one in held:
        if one.name not in expected:
            yield f"{one.name} has some, but none in one process"
        elif one.box.items:
            other = cut_box(expected[one.name], one.box)
            errors.setdefault(one.name, []).append((one.items.detach().to(other) - other).abs().max())
    for name, parts in errors.items():
        error, scale = float(torch.stack(parts).max()), float(expected[name].abs().max())
        if not error <= relative * scale + noise:
            yield f"{name} is off by {error:.3g} where the largest entry is {scale:.3g}"


def training_fork(source: ModelSource, patience: float = PATIENCE) -> ForkedServer:
    """A fork of this process that starts the ranks of small plans, each a fork of it; ask it for (recipe, timeout).

    It answers with what each rank returned, by rank: see ``train_under_plan``; or ``error`` and ``trace``.

    Args:
        source: of the model; it need not be something that can be pickled.
        patience: seconds that a rank waits for another one.
    """
    return ForkedServer(partial(_train, source, patience))


def _train(
    source: ModelSource, patience: float, request: tuple[Recipe, float], gone: Callable[[], bool]
) -> dict[int, Result]:
    """Run every rank in a process; those that do not end in time, or long after another has failed, are ended."""
    recipe, timeout = request
    ranks, deadline = range(recipe.plan.devices), time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="galvatron-numbers-") as name:
        folder = Path(name)
        running = {fork(partial(_guarded, rank, recipe, folder, source, patience)): rank for rank in ranks}
        while running and time.monotonic() < deadline and not gone():
            time.sleep(0.02)
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0] and "error" in _result(folder, running.pop(pid)):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for pid in running:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3 if running else 0.0)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {rank: _result(folder, rank) for rank in ranks}


def _guarded(rank: int, recipe: Recipe, folder: Path, source: ModelSource, patience: float) -> None:
    """Do a rank's work and write its result; on SIGUSR1 write where the process is."""
    faulthandler.register(signal.SIGUSR1, file=(folder / f"{rank}.stack").open("w"))
    os.dup2(os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT, 0o644), 2)
    torch.set_num_threads(1)
    result: Result = {}
    try:
        small, world = make_small(source, recipe), recipe.plan.devices
        try:
            reference = train_alone(small, recipe.plan)
        except Exception as error:
            result = {"alone": f"{type(error).__name__}: {error}"}
            raise
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))
        result = train_under_plan(make_small(source, recipe), recipe.plan, reference)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(), **result}
    (folder / f"{rank}.part").write_text(json.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    if dist.is_initialized() and "error" not in result:
        dist.barrier()  # no rank may close its connections while another still reads from them


def _result(folder: Path, rank: int) -> Result:
    with suppress(FileNotFoundError):
        result: Result = json.loads((folder / f"{rank}.json").read_text())
        return result
    stack = folder / f"{rank}.stack"
    return {"error": HANGS, "trace": stack.read_text(errors="replace") if stack.exists() else ""}


def check_numbers(
    source: ModelSource, plan: Plan, training: ForkedServer, processes: int | None = None, timeout: float = TIMEOUT
) -> Check:
    """Train a small model under a small plan on gloo processes, and hold loss, gradients and weights against one."""
    try:
        recipe = shrink(source, plan, processes)
    except TooLargeError as error:
        return Check(NAME, Verdict.SKIPPED, f"{error} Nothing was run.")
    try:
        return _judged(recipe, training.ask((recipe, timeout), timeout + 4 * GRACE))
    except TimeoutError:
        world = recipe.plan.devices
        return _broken({rank: {"error": HANGS} for rank in range(world)}, world, recipe.changes)


def _judged(recipe: Recipe, ranks: Mapping[int, Result]) -> Check:
    details, first = recipe.changes, ranks[0]
    if alone := first.get("alone"):
        text = f"The small model does not train in one process either: {alone} Nothing was compared."
        return Check(NAME, Verdict.SKIPPED, text, (*details, *_trace(first)))
    failed = {rank: result for rank, result in ranks.items() if "error" in result}
    if first.get("draws"):
        text = "The model draws random numbers that dropout does not explain: two runs of it differ."
        return Check(NAME, Verdict.SKIPPED, f"{text} Nothing was compared.", details)
    if failed:
        return _broken(failed, len(ranks), details)
    wrong = {rank: lines for rank, result in ranks.items() if (lines := result["wrong"])}
    if wrong or first["missing"]:
        return _different(wrong, first["missing"], details)
    lost = f" Not kept small: {', '.join(recipe.lost)}." if recipe.lost else ""
    processes = f"{len(ranks)} gloo process{'es' * (len(ranks) > 1)}"
    text = f"Loss, gradients and updated weights of a shrunken plan on {processes} equal those of one process.{lost}"
    if first["synchronised"]:
        text += " Batch norms ran as SyncBatchNorm; in the plan each replica takes statistics of its samples."
    return Check(NAME, Verdict.PASSED, text, details)


def _broken(failed: Mapping[int, Result], world: int, details: Sequence[str]) -> Check:
    """Ranks that raised, or never came to an end."""
    raised = {rank: result for rank, result in failed.items() if result["error"] != HANGS}
    rank, first = next(iter((raised or failed).items()))
    if raised:
        text = f"Rank {rank} of {world} of the shrunken plan fails: {first['error']}"
    else:
        ranks = ", ".join(map(str, failed))
        text = f"The shrunken plan hangs: rank{'s' * (len(failed) > 1)} {ranks} of {world} did not come to an end."
    return Check(NAME, Verdict.FAILED, text, (*details, *_trace(first)))


def _trace(result: Result) -> list[str]:
    return str(result.get("trace", "")).splitlines()[-_MOST:]


def _different(wrong: Mapping[int, Sequence[str]], missing: Sequence[str], details: Sequence[str]) -> Check:
    """What differs from one process, each line with the ranks that found it."""
    lines = [*dict.fromkeys(line for some in wrong.values() for line in some)]
    by_rank = [f"{line} (rank {', '.join(str(rank) for rank in wrong if line in wrong[rank])})" for line in lines]
    kinds = list(Counter(line.split(":")[0].split(" is ")[0] for line in lines))
    what = ", ".join(kinds[:4]) or missing[0]
    where = f"on rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}" if wrong else "on any rank"
    text = f"The shrunken plan does not train like one process: {what} differ {where}."
    more = [f"... and {len(lines) - _MOST} more"] * (len(lines) > _MOST)
    return Check(NAME, Verdict.FAILED, text, (*missing, *by_rank[:_MOST], *more, *details))
