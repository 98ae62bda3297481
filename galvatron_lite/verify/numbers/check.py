"""Check that a plan trains like one process.

A small model is trained under a small plan of the same kind on gloo processes, and by plain PyTorch in one process.
Losses, gradients and weights are compared.
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
from galvatron_lite.verify.source import ModelParts, ModelSource
from galvatron_lite.verify.trial.check import try_model

NAME = "numbers"
TIMEOUT = 300.0  # seconds until ranks that have not ended are killed
_MOST = 12  # differences, or lines of a trace, that are listed
LEARNING_RATE, MOMENTUM = 0.05, 0.9
RELATIVE = 1e-5
"""Tolerance as a share of a tensor's largest entry: covers another order of sums in float32."""
EPSILON = torch.finfo(torch.float32).eps
PATIENCE = 60.0  # seconds that a rank waits for another one
GRACE = 3.0  # seconds until the other ranks are killed after one has failed
HANGS = "hangs"  # ``error`` of a rank that did not end

Tensors = Mapping[str, Tensor]
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReferenceTraining:
    """Results of training in one process."""

    initial: dict[str, Tensor]  # the model's state before the first step
    losses: list[float]  # of every batch
    norm: float  # of the gradients of the first batch
    first: dict[str, Tensor]  # gradients of the first batch
    last: dict[str, Tensor]  # gradients of the last batch
    parameters: dict[str, Tensor]  # that the last batch's gradients are of
    draws: bool  # whether two forward passes give different losses: the model draws random numbers


def train_alone(small: SmallModel, plan: Plan) -> ReferenceTraining:
    """Train the small model by plain PyTorch.

    A batch is one forward pass; with batch norms, whose statistics depend on it, one for each micro-batch of the plan.
    """
    model, passes = small.model, plan.microbatches if small.normed else 1
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        draws = bool(_loss(small, small.batches[0]) != _loss(small, small.batches[0]))
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    parameters: dict[str, Tensor] = {}
    for batch in small.batches:
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.zero_grad()
        losses.append(_backward(small, batch, passes))
        trained = {name: parameter.grad for name, parameter in model.named_parameters()}
        gradients.append({name: gradient.clone() for name, gradient in trained.items() if gradient is not None})
        optimizer.step()
    norm = float(torch.stack([gradient.norm().double() for gradient in gradients[0].values()]).norm())
    return ReferenceTraining(initial, losses, norm, gradients[0], gradients[-1], parameters, draws)


def _loss(small: SmallModel, batch: Any) -> Tensor:
    return loss_of(call_model(small.model, batch), batch, small.loss_fn)


def _backward(small: SmallModel, batch: Any, passes: int) -> float:
    samples, total = batch_size(batch) // passes, 0.0
    for index in range(passes):
        loss = _loss(small, slice_batch(batch, index * samples, (index + 1) * samples)) / passes
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def train_under_plan(small: SmallModel, plan: Plan, reference: ReferenceTraining) -> dict[str, Any]:
    """Train under the plan and compare with the reference; every rank calls it.

    Returns:
        ``draws``: of the reference. ``wrong``: lines on this rank's differences. ``missing``: lines on tensors that all
        ranks together do not have complete. ``synchronised``: whether batch norms shared statistics between ranks,
        which the model does not.
    """
    parallel = _parallelize(small, plan, reference)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    relative, wrong, missing = RELATIVE * small.relative, list[str](), list[str]()

    def compare(label: str, shards: list[LocalShard], expected: Tensors) -> None:
        wrong.extend(f"{label}: {line}" for line in _differences(shards, expected, relative))
        missing.extend(f"{label}: {line}" for line in _incomplete(shards, expected))

    first, *others, final = small.batches
    losses = [_global_loss(parallel.backward_step(first))]
    compare("gradients of step 1", held_gradients(parallel), reference.first)
    norm = float(parallel.clip_grad_norm(float("inf")))
    if not abs(norm - reference.norm) <= relative * reference.norm:
        wrong.append(f"norm of the gradient is {norm:.8g}, not {reference.norm:.8g}")
    optimizer.step()
    optimizer.zero_grad()
    losses += [float(parallel.train_step(batch, optimizer)) for batch in others]
    compare(f"weights after step {len(others) + 1}", held_parameters(parallel), reference.parameters)
    losses.append(_global_loss(parallel.backward_step(final)))
    compare(f"gradients of step {len(others) + 2}", held_gradients(parallel), reference.last)
    wrong_losses = [
        f"loss of step {step} is {loss:.8g}, not {expected:.8g}"
        for step, (loss, expected) in enumerate(zip(losses, reference.losses, strict=True), 1)
        if not abs(loss - expected) <= relative * abs(expected)
    ]
    parts = [*(stage.runs for stage in plan.stages), *(branch.runs for branch in plan.branches)]
    shared = small.synchronised and any(run.strategy.batch_degree > 1 for runs in parts for run in runs)
    return {"draws": reference.draws, "wrong": [*wrong_losses, *wrong], "missing": missing, "synchronised": shared}


def _parallelize(small: SmallModel, plan: Plan, reference: ReferenceTraining) -> BranchedModel | ParallelModel:
    small.model.load_state_dict(reference.initial)
    # weigh each rank's loss as auto_parallelize does: by its count of labels, where the loss is a mean over labels
    findings = try_model(small.model, small.batches[0], small.layers, loss_fn=small.loss_fn)
    kind = BranchedModel if plan.branches else ParallelModel
    return kind(
        small.model, plan, small.layers, small.batches[0], loss_fn=small.loss_fn, device="cpu", precision="fp32",
        loss_weight=findings.weight,
    )  # fmt: skip


def _incomplete(shards: list[LocalShard], expected: Tensors) -> Iterator[str]:
    """Yield a line for each tensor whose shards on all ranks do not make it complete; a collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {(shard.name, str(shard.box.ranges)): shard.box.items for shard in shards})
    items = Counter[str]()
    for (name, _), size in {box: size for boxes in by_rank for box, size in boxes.items()}.items():
        items[name] += size
    for name, tensor in expected.items():
        if items[name] < tensor.numel():
            yield f"of {name} all ranks together have {items[name]} of {tensor.numel()} items"


def _global_loss(local_loss: Tensor) -> float:
    """Return the batch's loss, the sum over ranks."""
    total = local_loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def _differences(shards: list[LocalShard], expected: Tensors, relative: float) -> Iterator[str]:
    """Yield a line for each tensor whose shards differ from its expected value.

    The tolerance is ``relative`` times the tensor's largest entry. Some gradients are zero in exact arithmetic (a bias
    of attention keys shifts every score alike) and rounding noise in float32, so one float32 epsilon of the largest
    entry of all tensors is allowed as well.
    """
    noise = EPSILON * max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=0.0)
    errors: dict[str, list[Tensor]] = {}
    for shard in shards:
        if shard.name not in expected:
            yield f"{shard.name} has some, but none in one process"
        elif shard.box.items:
            wanted = cut_box(expected[shard.name], shard.box)
            errors.setdefault(shard.name, []).append((shard.items.detach().to(wanted) - wanted).abs().max())
    for name, shard_errors in errors.items():
        error, scale = float(torch.stack(shard_errors).max()), float(expected[name].abs().max())
        if not error <= relative * scale + noise:
            yield f"{name} is off by {error:.3g} where the largest entry is {scale:.3g}"


def training_fork(source: ModelSource, patience: float = PATIENCE) -> ForkedServer:
    """Fork a server that trains small models; a request is (recipe, timeout in seconds).

    The answer is what ``train_under_plan`` returned, by rank; ``error`` and ``trace`` for a rank that failed, ``alone``
    too if the reference did.

    Args:
        source: of the large model; need not be picklable, as ranks are forks of the server.
        patience: seconds that a rank waits for another one.
    """
    return ForkedServer(partial(_train, source, patience))


def _train(
    source: ModelSource, patience: float, request: tuple[Recipe, float], cancelled: Callable[[], bool]
) -> dict[int, Result]:
    """Run every rank in a process; kill those that do not end in time, or soon after another has failed."""
    recipe, timeout = request
    ranks, deadline = range(recipe.plan.devices), time.monotonic() + timeout
    torch.set_num_threads(1)  # also of the ranks: threads that have shared work do not survive a fork
    torch.manual_seed(0)  # a function that makes the model may draw its batch
    large = source.on_meta() if recipe.divisor else None
    with tempfile.TemporaryDirectory(prefix="galvatron-numbers-") as name:
        folder = Path(name)
        running = {fork(partial(_run_rank, rank, recipe, folder, source, large, patience)): rank for rank in ranks}
        while running and time.monotonic() < deadline and not cancelled():
            time.sleep(0.02)
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0] and "error" in _read_result(folder, running.pop(pid)):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for pid in running:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3 if running else 0.0)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {rank: _read_result(folder, rank) for rank in ranks}


def _run_rank(
    rank: int, recipe: Recipe, folder: Path, source: ModelSource, large: ModelParts | None, patience: float
) -> None:
    """Train one rank and write its result to ``folder``; on SIGUSR1 write its stack."""
    faulthandler.register(signal.SIGUSR1, file=(folder / f"{rank}.stack").open("w"))
    os.dup2(os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT, 0o644), 2)
    result: Result = {}
    try:
        small, world = make_small(source, recipe, large), recipe.plan.devices
        try:
            reference = train_alone(small, recipe.plan)
        except Exception as error:
            result = {"alone": f"{type(error).__name__}: {error}"}
            raise
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))
        result = train_under_plan(make_small(source, recipe, large), recipe.plan, reference)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(), **result}
    (folder / f"{rank}.part").write_text(json.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    if dist.is_initialized() and "error" not in result:
        dist.barrier()  # no rank may close its connections while another still reads from them


def _read_result(folder: Path, rank: int) -> Result:
    with suppress(FileNotFoundError):
        result: Result = json.loads((folder / f"{rank}.json").read_text())
        return result
    stack = folder / f"{rank}.stack"
    return {"error": HANGS, "trace": stack.read_text(errors="replace") if stack.exists() else ""}


def check_numbers(
    source: ModelSource, plan: Plan, training: ForkedServer, processes: int | None = None, timeout: float = TIMEOUT
) -> Check:
    """Compare training under a small plan on gloo processes with training in one process.

    ``training`` is a server from ``training_fork``, ``processes`` as for ``shrink``, ``timeout`` in seconds.
    """
    try:
        recipe = shrink(source, plan, processes)
    except TooLargeError as error:
        return Check(NAME, Verdict.SKIPPED, f"{error} Nothing was run.")
    try:
        return _judge(recipe, training.ask((recipe, timeout), timeout + 4 * GRACE))
    except TimeoutError:
        world = recipe.plan.devices
        return _failed_ranks({rank: {"error": HANGS} for rank in range(world)}, world, recipe.changes)


def _judge(recipe: Recipe, ranks: Mapping[int, Result]) -> Check:
    details, first = recipe.changes, ranks[0]
    if alone := first.get("alone"):
        text = f"The small model does not train in one process either: {alone} Nothing was compared."
        return Check(NAME, Verdict.SKIPPED, text, (*details, *_last_lines(first)))
    failed = {rank: result for rank, result in ranks.items() if "error" in result}
    if first.get("draws"):
        text = "The model draws random numbers that dropout does not explain: two runs of it differ."
        return Check(NAME, Verdict.SKIPPED, f"{text} Nothing was compared.", details)
    if failed:
        return _failed_ranks(failed, len(ranks), details)
    wrong = {rank: lines for rank, result in ranks.items() if (lines := result["wrong"])}
    if wrong or first["missing"]:
        return _wrong_numbers(wrong, first["missing"], details)
    lost = f" Not covered: {', '.join(recipe.lost)}." if recipe.lost else ""
    processes = f"{len(ranks)} gloo process{'es' * (len(ranks) > 1)}"
    text = f"Loss, gradients and updated weights of a shrunken plan on {processes} equal those of one process.{lost}"
    if first["synchronised"]:
        text += " Batch norms ran as SyncBatchNorm; in the plan each replica takes statistics of its samples."
    return Check(NAME, Verdict.PASSED, text, details)


def _failed_ranks(failed: Mapping[int, Result], world: int, details: Sequence[str]) -> Check:
    """Return the failed check of ranks that raised or hang."""
    raised = {rank: result for rank, result in failed.items() if result["error"] != HANGS}
    rank, first = next(iter((raised or failed).items()))
    if raised:
        text = f"Rank {rank} of {world} of the shrunken plan fails: {first['error']}"
    else:
        ranks = ", ".join(map(str, failed))
        text = f"The shrunken plan hangs: rank{'s' * (len(failed) > 1)} {ranks} of {world} did not come to an end."
    return Check(NAME, Verdict.FAILED, text, (*details, *_last_lines(first)))


def _last_lines(result: Result) -> list[str]:
    return str(result.get("trace", "")).splitlines()[-_MOST:]


def _wrong_numbers(wrong: Mapping[int, Sequence[str]], missing: Sequence[str], details: Sequence[str]) -> Check:
    """Return the failed check of numbers that differ from one process, each line with its ranks."""
    lines = [*dict.fromkeys(line for rank_lines in wrong.values() for line in rank_lines)]
    by_rank = [f"{line} (rank {', '.join(str(rank) for rank in wrong if line in wrong[rank])})" for line in lines]
    kinds = list(Counter(line.split(":")[0].split(" is ")[0] for line in lines))
    differing = ", ".join(kinds[:4]) or missing[0]
    where = f"on rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}" if wrong else "on any rank"
    text = f"The shrunken plan does not train like one process: {differing} differ {where}."
    more = [f"... and {len(lines) - _MOST} more"] * (len(lines) > _MOST)
    return Check(NAME, Verdict.FAILED, text, (*missing, *by_rank[:_MOST], *more, *details))
