"""What each process of the check of numbers does: train a small model, alone or under its plan, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import call_model, loss_of, slice_batch
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.pieces import Held, held_gradients, held_parameters, part_of
from galvatron_lite.verify.numbers.shrink import Small

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
