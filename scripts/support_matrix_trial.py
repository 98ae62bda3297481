"""A model trained for three steps by one process, and by several in each way: losses, gradients and parameters."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support_matrix_families import Family
from support_matrix_page import RANKS, SAMPLES, Asked, Way, ask
from support_matrix_ranks import Failure, on_ranks
from torch import Tensor, nn

from galvatron_lite import auto_parallelize, plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.batch import call_model, loss_of, map_tensors, slice_batch
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.trace.meta import normalise_alone
from galvatron_lite.plans.io import read_plan, write_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler import measure
from galvatron_lite.profiler.store import last_profile, read_profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients

RATE, STEPS, SECONDS = 1e-3, 3, 150.0
PLAN = "chosen.yaml"
RELATIVE, NOISE = 1e-4, 1e-6
"""Largest error of a gradient's entry: so much of the tensor's largest entry, and so much of the largest of all (some
gradients are zero in exact arithmetic)."""
COARSE, NOISY = 0.05, 2.0
"""Largest error in bf16: of the loss, and of the whole gradient's length; or this many times that of one process that
computes in bf16 too, where that is more."""


class State(StrEnum):
    """What came of a way."""

    WORKS = "works"
    PARTLY = "falls back"
    NO = "no"
    WRONG = "wrong"
    CRASHES = "crashes"
    LATE = "not known"
    NOTHING = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a way, why, and the largest error of a loss, gradient or parameter, of its largest entry."""

    state: State
    why: str = ""
    error: float | None = None


@dataclass(frozen=True)
class Reference:
    """Losses and gradients of the steps, and the parameters behind them."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def batches_of(family: Family) -> list[Any]:
    """The batches of the steps, always the same."""
    torch.manual_seed(1)
    return [family.batches(SAMPLES) for _ in range(STEPS)]


def train_alone(family: Family, microbatches: int = 1) -> Reference:
    """Plain PyTorch, which adds up gradients of so many micro-batches."""
    model = copy.deepcopy(family.model).apply(normalise_alone)
    optimizer = adamw(model.parameters())
    found = Reference([], [], {})
    for batch in batches_of(family):
        optimizer.zero_grad()
        loss = 0.0
        for part in parts_of(batch, microbatches):
            share = loss_of(call_model(model, part), part, family.loss_fn) / microbatches
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
        found.losses.append(loss)
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    found.parameters.update((name, parameter.detach()) for name, parameter in model.named_parameters())
    return found


def parts_of(batch: Any, count: int) -> list[Any]:
    """Equal shares of a batch."""
    rows = SAMPLES // count
    return [slice_batch(batch, start, start + rows) for start in range(0, SAMPLES, rows)]


def reference_for(family: Family, reference: Reference, plan: Plan) -> Reference:
    """What one process computes; where norms take statistics of samples, of those of a plan's micro-batches."""
    norms = any(isinstance(module, nn.SyncBatchNorm) for module in family.model.modules())
    return train_alone(family, plan.microbatches) if norms and plan.microbatches > 1 else reference


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every trial; under its eps gradients that are rounding alone are no whole updates."""
    return torch.optim.AdamW(parameters, lr=RATE, eps=1e-6)


def rounding(family: Family, reference: Reference) -> list[float]:
    """By how much one process that computes in bf16 is off, of the gradient's length, in each step."""
    with torch.autocast("cpu", torch.bfloat16):
        found = train_alone(family)
    return [_off(*pair) for pair in zip(found.gradients, reference.gradients, strict=True)]


def try_way(family: Family, graph: ModelGraph, way: Way, reference: Reference) -> Outcome:
    """What comes of one way; what differs is tried again in float64, as rounding at a corner of ReLU shows."""
    outcome = _try(family, graph, way, reference)
    if outcome.state is not State.WRONG or way.ranks or way.options.get("precision"):
        return outcome
    double = in_double(family)
    return _try(double, graph, way, train_alone(double))


def in_double(family: Family) -> Family:
    """The family in float64."""
    return replace(
        family, model=copy.deepcopy(family.model).double(),
        batches=lambda samples: map_tensors(
            family.batches(samples), lambda one: one.double() if one.is_floating_point() else one
        ),
    )  # fmt: skip


def _try(family: Family, graph: ModelGraph, way: Way, reference: Reference) -> Outcome:
    if way.ranks:
        return _measured(family, graph, way, reference)
    asked = ask(way, graph)
    if asked.plan is None:
        return Outcome(State.NO, asked.reason) if asked.reason else Outcome(State.NOTHING)
    coarse = way.options.get("precision") == "bf16"
    try:
        allowed = [max(COARSE, NOISY * own) for own in rounding(family, reference)] if coarse else []
    except RuntimeError as error:
        return Outcome(State.NO, f"one process does not train in bf16 either: {error}")
    results = on_ranks(RANKS, lambda: _train(family, graph, way, asked, reference, allowed), SECONDS)
    if isinstance(results, Failure):
        ended = State.NO if results.ours else State.LATE if results.late else State.CRASHES
        return Outcome(ended, (asked.reason if asked.reason and results.ours and asked.forced else results.text))
    wrong = next((said for said, _ in results if said), "")
    return Outcome(State.WRONG, wrong) if wrong else replace(_ran(asked), error=max(error for _, error in results))


def _measured(family: Family, graph: ModelGraph, way: Way, reference: Reference) -> Outcome:
    """What comes of ``auto_parallelize(model, batch, mem=...)``, which measures, under a tight budget; of its plan in
    float64 where that differs."""
    with tempfile.TemporaryDirectory(prefix="galvatron-support-") as folder:
        results = on_ranks(way.ranks, lambda: _train_measured(family, reference, Path(folder)), 2 * SECONDS)
        if not isinstance(results, Failure) and any(said for said, _ in results):
            double, asked = in_double(family), Asked(read_plan(Path(folder) / PLAN))
            exact = train_alone(double)
            results = on_ranks(way.ranks, lambda: _train(double, graph, way, asked, exact, ()), SECONDS)
    if isinstance(results, Failure):
        ended = State.NO if results.ours else State.LATE if results.late else State.CRASHES
        return Outcome(ended, results.text)
    wrong = next((said for said, _ in results if said), "")
    return Outcome(State.WRONG if wrong else State.WORKS, wrong, max(error for _, error in results))


def _train_measured(family: Family, reference: Reference, folder: Path) -> tuple[str, float]:
    """Measure, choose a budget that the plan of least memory keeps and plain data parallelism does not, and train."""
    warnings.simplefilter("ignore")
    quick = partial(measure.measure_profile, rule=TimingRule(warmup=1, least=2, most=2, seconds=0.02))
    batches = batches_of(family)
    asked: dict[str, Any] = {"loss_fn": family.loss_fn, "device": "cpu", "folder": folder}
    with patch.object(measure, "measure_profile", quick):
        auto_parallelize(copy.deepcopy(family.model), batches[0], **asked)
        box: list[Any] = [_tight(folder, SAMPLES) if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(box)
        parallel: Any = auto_parallelize(copy.deepcopy(family.model), batches[0], mem=box[0], **asked)
    if torch.distributed.get_rank() == 0:
        write_plan(parallel.plan, folder / PLAN)
    return _steps(parallel, batches, reference_for(family, reference, parallel.plan), ())


def _tight(folder: Path, batch: int) -> int:
    """The middle between what the plan of least memory and what plain data parallelism need, in bytes a device."""
    profile = read_profile(last_profile(folder))
    dp = {"data": profile.cluster.devices, "zero": 0, "pp": 1, "recompute": "none"}
    plain = plan(profile, batch=batch, fix=dp, forbid=("offload",), runners_up=0)
    most = max(stage.memory.total for stage in plain.stages if stage.memory is not None)
    try:
        plan(profile, batch=batch, mem=1)
    except InfeasibleError as error:
        return (min(error.smallest_budget or 0, most) + most) // 2
    return most


def _ran(asked: Asked) -> Outcome:
    if asked.forced:
        return Outcome(
            State.WORKS, f"not offered by the planner: {asked.reason}" if asked.reason else "not offered by the planner"
        )
    return (
        Outcome(State.PARTLY, asked.reason or f"{len(asked.kept)} blocks share samples instead")
        if asked.kept
        else Outcome(State.WORKS)
    )


def _train(
    family: Family, graph: ModelGraph, way: Way, asked: Asked, reference: Reference, allowed: Sequence[float]
) -> tuple[str, float]:
    """What differs, on every rank alike; nothing where all is well. ``allowed``: of each step in bf16 (``COARSE``)."""
    warnings.simplefilter("ignore")
    batches = batches_of(family)
    assert asked.plan is not None
    reference = reference_for(family, reference, asked.plan)
    parallel = ParallelModel(
        family.model, asked.plan, graph.layers, batches[0], loss_fn=family.loss_fn, device="cpu", **way.options
    )
    return _steps(parallel, batches, reference, allowed)


def _steps(parallel: Any, batches: Sequence[Any], reference: Reference, allowed: Sequence[float]) -> tuple[str, float]:
    """What differs in the steps, and the largest error."""
    optimizer, worst = parallel.optimizer(adamw), 0.0
    for number, batch in enumerate(batches):
        loss = _summed(parallel.backward_step(batch))
        gradients = full_gradients(parallel)
        coarse = allowed[number] if allowed else 0.0
        wrong = next(_differences(loss, gradients, reference, number, coarse), "")
        if wrong:
            return f"step {number + 1}: {wrong}", 0.0
        worst = max(worst, abs(loss - reference.losses[number]) / abs(reference.losses[number]))
        optimizer.step()
        parallel.publish()
        optimizer.zero_grad()
    state = parallel.full_state_dict()
    errors = {
        name: float((state[name].to(wanted) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
        for name, wanted in reference.parameters.items()
    }
    largest = max(errors, key=lambda name: errors[name])
    if not allowed and not errors[largest] <= RELATIVE:
        return f"parameter {largest} is off by {errors[largest]:.2g} of its largest entry after {STEPS} steps", 0.0
    return "", max(worst, errors[largest])


def _summed(part: Tensor) -> float:
    total = part.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total)


def _differences(
    loss: float, gradients: Mapping[str, Tensor], reference: Reference, number: int, coarse: float
) -> Iterator[str]:
    expected, wanted = reference.losses[number], reference.gradients[number]
    if not abs(loss - expected) <= (COARSE if coarse else RELATIVE) * abs(expected):
        yield f"the loss is {loss:.6g} instead of {expected:.6g}"
    missing = [name for name in wanted if name not in gradients and float(wanted[name].abs().max()) > 0]
    if missing:
        yield f"no gradient of {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    there = {name: gradients[name] for name in wanted if name in gradients}
    said = _coarsely(there, wanted, coarse) if coarse else _exactly(there, wanted)
    if said:
        yield said


def _exactly(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    largest = max((float(one.abs().max()) for one in wanted.values()), default=0.0)
    for name, tensor in found.items():
        error, scale = float((tensor.to(wanted[name]) - wanted[name]).abs().max()), float(wanted[name].abs().max())
        if not error <= RELATIVE * scale + NOISE * largest:
            return f"the gradient of {name} is off by {error:.2g} where its largest entry is {scale:.2g}"
    return ""


def _coarsely(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], allowed: float) -> str:
    off = _off(found, wanted)
    return "" if off <= allowed else f"the gradient is off by {off:.1%} of its length"


def _off(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Length of the difference, of that of the gradient."""
    error = sum(float((tensor.to(wanted[name]) - wanted[name]).square().sum()) for name, tensor in found.items()) ** 0.5
    length = sum(float(tensor.square().sum()) for tensor in wanted.values()) ** 0.5
    return error / length if length else error
