"""A model trained for two steps by one process, and by two in each way: loss and gradients of both steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from support_matrix_families import Family
from support_matrix_ranks import Failure, on_ranks
from support_matrix_ways import RANKS, SAMPLES, Asked, Way, ask
from torch import Tensor

from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.state import full_gradients

RATE, SECONDS = 0.05, 150.0
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
    """What came of a way, and why."""

    state: State
    why: str = ""


@dataclass(frozen=True)
class Reference:
    """Losses and gradients of two steps."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def batches_of(family: Family) -> list[Any]:
    """The batches of the steps, always the same."""
    torch.manual_seed(1)
    return [family.batches(SAMPLES) for _ in range(2)]


def train_alone(family: Family) -> Reference:
    """Plain PyTorch."""
    model = copy.deepcopy(family.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    found = Reference([], [])
    for batch in batches_of(family):
        optimizer.zero_grad()
        loss = loss_of(call_model(model, batch), batch, family.loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        found.losses.append(float(loss.detach()))
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def rounding(family: Family, reference: Reference) -> list[float]:
    """By how much one process that computes in bf16 is off, of the gradient's length, in each step."""
    with torch.autocast("cpu", torch.bfloat16):
        found = train_alone(family)
    return [_off(*pair) for pair in zip(found.gradients, reference.gradients, strict=True)]


def try_way(family: Family, graph: ModelGraph, way: Way, reference: Reference) -> Outcome:
    """What comes of one way."""
    asked = ask(way, graph)
    if asked.plan is None:
        return Outcome(State.NO, asked.reason) if asked.reason else Outcome(State.NOTHING)
    coarse = way.options.get("precision") == "bf16"
    allowed = [max(COARSE, NOISY * own) for own in rounding(family, reference)] if coarse else []
    results = on_ranks(RANKS, lambda: _train(family, graph, way, asked, reference, allowed), SECONDS)
    if isinstance(results, Failure):
        ended = State.NO if results.ours else State.LATE if results.late else State.CRASHES
        return Outcome(ended, _refused(asked, results))
    wrong = next((one for one in results if one), "")
    return Outcome(State.WRONG, wrong) if wrong else _ran(asked)


def _refused(asked: Asked, failure: Failure) -> str:
    """Why a way is not run: what the planner says, where it does not offer it and the runtime refuses it."""
    return asked.reason if asked.reason and failure.ours and asked.forced else failure.text


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
) -> str:
    """What differs, on every rank alike; nothing where all is well. ``allowed``: of each step in bf16 (``COARSE``)."""
    warnings.simplefilter("ignore")
    batches = batches_of(family)
    assert asked.plan is not None
    parallel = ParallelModel(
        family.model, asked.plan, graph.layers, batches[0], loss_fn=family.loss_fn, device="cpu", **way.options
    )
    optimizer = parallel.optimizer(torch.optim.SGD, lr=RATE, momentum=0.9)
    for number, batch in enumerate(batches):
        loss = _summed(parallel.backward_step(batch))
        gradients = full_gradients(parallel)
        coarse = allowed[number] if allowed else 0.0
        wrong = next(_differences(loss, gradients, reference, number, coarse), "")
        if wrong:
            return f"step {number + 1}: {wrong}"
        optimizer.step()
        parallel.publish()
        optimizer.zero_grad()
    return ""


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
        error, scale = float((tensor.float() - wanted[name]).abs().max()), float(wanted[name].abs().max())
        if not error <= RELATIVE * scale + NOISE * largest:
            return f"the gradient of {name} is off by {error:.2g} where its largest entry is {scale:.2g}"
    return ""


def _coarsely(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], allowed: float) -> str:
    off = _off(found, wanted)
    return "" if off <= allowed else f"the gradient is off by {off:.1%} of its length"


def _off(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Length of the difference, of that of the gradient."""
    error = sum(float((tensor.float() - wanted[name]).square().sum()) for name, tensor in found.items()) ** 0.5
    length = sum(float(tensor.square().sum()) for tensor in wanted.values()) ** 0.5
    return error / length if length else error
