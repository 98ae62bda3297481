"""Training a family under a plan and as one process, and everything that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.run import sample_arguments
from galvatron_lite.parallelism.pipeline.flow import LayerFlow
from galvatron_lite.parallelism.pipeline.tied import find_shared
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime import preparation
from galvatron_lite.runtime.assignment import LayerAssignment
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients, full_state_dict
from galvatron_lite.runtime.parameters.guard import set_guard
from galvatron_lite.runtime.parameters.managed import ManagedParameter
from galvatron_lite.runtime.preparation import tensor_plans
from tests.equivalence.compare import RELATIVE, assert_equal_tensors
from tests.equivalence.families import PICTURES, build_family, build_model, make_batches
from tests.equivalence.plans import describe
from tests.parallelism.sharded_compare import gather_full

SAMPLES = 16
STEPS = 2
LEARNING_RATE, MOMENTUM, CLIP = 0.05, 0.9, 0.5


@dataclass(frozen=True)
class Reference:
    """What one process computes: losses of two steps, the gradients of the second and their norm, parameters after it.
    In the first step gradients are clipped to ``clip``, half their norm.
    """

    losses: list[float]
    norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    clip: float


@dataclass(frozen=True)
class Case:
    """What every plan of a family needs, found once.

    Attributes:
        tensor_plans: how blocks are split inside.
        first_names: the first name of every parameter that has several, by each of them.
        flow: which layers read what.
        sampled: which arguments of blocks hold the samples.
    """

    family: str
    layers: tuple[Layer, ...]
    tensor_plans: dict[str, TensorPlan]
    first_names: dict[str, str]
    flow: LayerFlow | None
    sampled: dict[str, dict[str, int]]

    @property
    def relative(self) -> float:
        """Largest error, relative to a tensor's largest entry; sums over pixels are longer than those over tokens."""
        return 10 * RELATIVE if self.family in PICTURES else RELATIVE

    def parallel(self, plan: Plan, model: nn.Module | None = None, **options: Any) -> ParallelModel:
        """The family's model, or another one of it, under a plan."""
        (batch,) = make_batches(self.family, SAMPLES, 1)
        options |= {"tensor_plans": self.tensor_plans, "device": "cpu"}
        if model is not None:
            return ParallelModel(model, plan, self.layers, batch, **options)
        with examined(self):
            return ParallelModel(build_model(self.family), plan, self.layers, batch, **options)


def make_case(family: str) -> Case:
    """The case of a family."""
    model, batch, layers = build_family(family, SAMPLES)
    plans = tensor_plans(model, [LayerAssignment(layer, Strategy(tensor=2)) for layer in layers], batch)
    first_names = {name: shared.names[0] for shared in find_shared(model, layers) for name in shared.names}
    flow = preparation.flow_or_none(model, layers, batch, None)
    blocks = [layer.name for layer in layers if layer.role is Role.BLOCK]
    return Case(family, layers, plans, first_names, flow, sample_arguments(model, blocks, batch))


def train_alone(family: str) -> Reference:
    """The family's model, trained by plain PyTorch."""
    model = build_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses, clip, norm = [], 0.0, 0.0
    gradients: dict[str, Tensor] = {}
    for batch in make_batches(family, SAMPLES, STEPS):
        optimizer.zero_grad()
        loss = loss_of(call_model(model, batch), batch)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        if not clip:
            clip = norm / 2
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Reference(losses, norm, gradients, parameters, clip)


def train_each(case: Case, plans: Sequence[Plan], reference: Reference, states: bool = False) -> list[str]:
    """What goes wrong under each plan, empty where nothing does; run on every rank of a world.

    Args:
        case: the family.
        plans: each trains a model of its own.
        reference: what one process computes.
        states: whether the whole model's state and gradients, as users are given them, are compared too.
    """
    return [_train(case, plan, reference, states) for plan in plans]


def train_under_plans(case: Case, plans: Sequence[Plan], reference: Reference) -> list[str]:
    """What goes wrong, with the plans that it goes wrong under; run on every rank of a world."""
    told = zip(plans, train_each(case, plans, reference), strict=True)
    return [f"{describe(plan)}: {wrong}" for plan, wrong in told if wrong]


def train_families(work: Sequence[tuple[Case, Sequence[Plan], Reference]]) -> list[str]:
    """The same for several families, one after another."""
    return [f"{one[0].family}: {wrong}" for one in work for wrong in train_under_plans(*one)]


@contextmanager
def examined(case: Case) -> Iterator[None]:
    """Runs of a model without storages tell the same under every plan and on every rank: they happened once."""

    def flow(*_: Any) -> LayerFlow | None:
        return case.flow

    def arguments(_model: nn.Module, names: Sequence[str], _batch: Any) -> dict[str, dict[str, int]]:
        return {name: case.sampled[name] for name in names if name in case.sampled}

    with patch.object(preparation, "flow_or_none", flow), patch.object(preparation, "sample_arguments", arguments):
        yield


def _train(case: Case, plan: Plan, reference: Reference, states: bool) -> str:
    """A whole step, then one whose parts are called; the second's gradients are right only where the first was."""
    parallel, first_names = case.parallel(plan), case.first_names
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    first, second = make_batches(case.family, SAMPLES, STEPS)
    losses = [float(parallel.train_step(first, optimizer, max_grad_norm=reference.clip))]
    losses.append(global_loss(parallel.backward_step(second)))
    gradients = whole(parallel, first_names, lambda one: one.gradient)
    norm = float(parallel.clip_grad_norm(1e9))
    optimizer.step()
    parameters = whole(parallel, first_names, lambda one: one.parameter.detach())
    found = Reference(losses, norm, gradients, parameters, reference.clip)
    wrong = [*_differences(found, reference, case.relative)]
    return "; ".join([*wrong, *(_state_differences(parallel, reference, case) if states else ())])


def _state_differences(parallel: ParallelModel, reference: Reference, case: Case) -> Iterable[str]:
    """The same of what users are given: every entry of the whole model, on every rank."""
    for what, found, expected in (
        ("state", full_state_dict(parallel), reference.parameters),
        ("whole gradients", full_gradients(parallel), reference.gradients),
    ):
        names = {name: case.first_names.get(name, name) for name in found}
        own = {name: value for name, value in found.items() if names[name] in expected}
        try:
            assert {names[name] for name in own} == set(expected), "names"
            assert_equal_tensors(own, {name: expected[names[name]] for name in own}, case.relative)
        except AssertionError as error:
            yield f"{what}: {error}"


def _differences(found: Reference, reference: Reference, relative: float) -> Iterable[str]:
    if not abs(found.norm - reference.norm) <= relative * reference.norm:
        yield f"gradient norm is {found.norm}, not {reference.norm}"
    for number, (loss, expected) in enumerate(zip(found.losses, reference.losses, strict=True)):
        if not abs(loss - expected) <= relative * abs(expected):
            yield f"loss of step {number + 1} is {loss}, not {expected}"
    for what, tensors, expected_tensors in (
        ("gradients", found.gradients, reference.gradients),
        ("parameters", found.parameters, reference.parameters),
    ):
        held: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(held, set(tensors))
        if set().union(*held) != set(expected_tensors):
            yield f"{what}: all stages together have {len(set().union(*held))} of {len(expected_tensors)}"
        try:
            assert_equal_tensors(tensors, {name: expected_tensors[name] for name in tensors}, relative)
        except AssertionError as error:
            yield f"{what}: {error}"


def global_loss(part: Tensor) -> float:
    """The batch's loss from this rank's part of it."""
    total = part.detach().clone()
    dist.all_reduce(total)
    return float(total)


def whole(
    parallel: ParallelModel, first_names: Mapping[str, str], pick: Callable[[ManagedParameter], Any]
) -> dict[str, Tensor]:
    """Whole tensors of this rank's stage (gradients, parameters), by the name that one process has for them."""
    found: dict[str, Tensor] = {}
    for one in (one for runtime in parallel.runtimes for one in runtime.owned):
        tensor = pick(one)
        if tensor is None:
            continue
        local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        with torch._C.DisableTorchFunctionSubclass():  # loops may not choose elements of a part by their places
            gathered = _gathered(one, local).clone()
        set_guard(gathered, guarded=False)
        found[first_names.get(one.names[0], one.names[0])] = gathered
    return found


def _gathered(one: ManagedParameter, local: Tensor) -> Tensor:
    """The full tensor from every rank's slices."""
    group = one.groups.weights
    if one.shard is not None and group is not None:
        local = gather_full(local, one.shard, ProcessTensorGroup(group))
    if one.spread is not None and one.groups.spread is not None:
        local = gather_full(local, one.spread, ProcessTensorGroup(one.groups.spread.over))
    return local


def curve_alone(family: str, steps: int) -> list[float]:
    """Losses of training by plain PyTorch with AdamW, a new batch every step."""
    model = build_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in make_batches(family, SAMPLES, steps):
        optimizer.zero_grad()
        loss = loss_of(call_model(model, batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def curve_under_plan(case: Case, plan: Plan, steps: int) -> list[float]:
    """The same under a plan; run on every rank of a world."""
    parallel = case.parallel(plan, max_grad_norm=CLIP)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
    return [float(parallel.train_step(batch, optimizer)) for batch in make_batches(case.family, SAMPLES, steps)]
