"""Parameter groups that any torch optimizer can take, and what happens around the steps of those over them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.gradient_guard import guard_gradients
from galvatron_lite.runtime.optimizer_check import Build, check_optimizer
from galvatron_lite.runtime.setup import StageRuntime
from galvatron_lite.world import messages_carry_data

PART_OF = "part_of"
"""Option of groups that were cut: the number of the group in the list that was given."""
Groups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def split_groups(groups: Groups) -> list[dict[str, Any]]:
    """The same groups, cut so that each holds plain tensors of one device, or DTensors of one mesh.

    Optimizers that work on many tensors at once (foreach, fused) refuse mixtures. One group at least: a stage may have
    no parameters, and an optimizer refuses an empty list. Where the groups are not those given any more, ``PART_OF``
    says which of them each is a part of.
    """
    cut: list[tuple[int, dict[str, Any]]] = []
    given = [group if isinstance(group, Mapping) else {"params": [group]} for group in groups]
    plain = [group for group in given if set(group) == {"params"}]
    merged = [{"params": [p for group in plain for p in group["params"]]}] if plain else []
    wanted = [*merged, *(group for group in given if set(group) != {"params"})]
    for number, group in enumerate(wanted):
        options = {key: value for key, value in group.items() if key != "params"}
        alike: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            alike.setdefault((mesh, parameter.device.type), []).append(parameter)
        cut += [(number, {"params": parameters, **options}) for parameters in alike.values()]
    if [number for number, _ in cut] != [*range(len(wanted))]:
        cut = [(number, {**group, PART_OF: number}) for number, group in cut]
    return [group for _, group in cut] or [{"params": []}]


def fused_on_host(
    groups: list[dict[str, Any]], factory: Callable[..., Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The same groups; those in host memory ask for the fused update, where the optimizer has one and nothing else was
    asked for: it passes over the states once, where its other ways do so once an operator.
    """
    if "fused" not in inspect.signature(factory).parameters or {"fused", "foreach"} & set(options):
        return groups
    return [
        {**group, "fused": True} if all(p.device.type == "cpu" for p in group["params"]) and group["params"] else group
        for group in groups
    ]


class ShardedModel(Protocol):
    """A model whose parameters optimizers update: a ``ParallelModel``."""

    plan: Plan

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """What trains the parts of the model that are on this rank."""
        ...

    def publish(self) -> None:
        """Bring what optimizers updated to every rank."""


class OptimizerSteps:
    """Sees every optimizer of this process that steps over a model's parameters, whoever made it: it is checked before
    its first step under a plan, sees plain gradients, and what it updated is published.

    Args:
        parallel: the model.
    """

    def __init__(self, parallel: ShardedModel) -> None:
        self._parallel = weakref.ref(parallel)
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Plan] = weakref.WeakKeyDictionary()
        handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._end(optimizer)),
        ]
        for handle in handles:
            weakref.finalize(parallel, handle.remove)

    def check(self, optimizer: torch.optim.Optimizer, build: Build | None = None, together: bool = True) -> None:
        """Refuse an optimizer that would not train this model as one process does; once under each plan.

        Args:
            optimizer: any; its first step is yet to come.
            build: makes another one like it, of parameter groups; its class does if not given.
            together: whether all ranks call this, so that all are told of an error on any.

        Raises:
            InputError: see above; its parameters are not those of this model; it needs whole parameters that are split.
        """
        parallel = self._parallel()
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # of a wrapper: accelerate's
        if parallel is None or self._checked.get(optimizer) is parallel.plan or not messages_carry_data():
            return
        owned = [one for runtime in parallel.runtimes for one in runtime.owned]
        refused = _check_parameters(optimizer, [one.updated for one in owned], [one.parameter for one in owned])
        everywhere = len(parallel.plan.stages) == 1 and not parallel.plan.branches
        for runtime in parallel.runtimes:
            devices = runtime.meshes.stage_devices
            whole = everywhere and all(one.copies == devices for one in runtime.owned)
            refused = refused or check_optimizer(optimizer, runtime.owned, devices, whole, build)
        if together and dist.get_world_size() > 1:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, refused)
            refused = next((one for one in every if one is not None), None)
        if refused is not None:
            raise refused
        self._checked[optimizer] = parallel.plan

    def _updates(self, optimizer: torch.optim.Optimizer) -> ShardedModel | None:
        """The model, where the optimizer is over parameters of it."""
        parallel = self._parallel()
        if parallel is None:
            return None
        own = {id(one.updated) for runtime in parallel.runtimes for one in runtime.owned}
        return parallel if any(id(p) in own for group in optimizer.param_groups for p in group["params"]) else None

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        if (parallel := self._updates(optimizer)) is not None:
            self.check(optimizer, together=False)
            for runtime in parallel.runtimes:
                guard_gradients(runtime.owned, guarded=False)

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if (parallel := self._updates(optimizer)) is not None:
            for runtime in parallel.runtimes:  # one of several optimizers may have stepped before
                runtime.updates.due = runtime.updates.is_needed
            parallel.publish()


def _check_parameters(
    optimizer: torch.optim.Optimizer, updated: Sequence[nn.Parameter], computing: Sequence[nn.Parameter]
) -> InputError | None:
    """Parameters that are this model's, as an optimizer is to have them."""
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    right = {id(p) for p in updated}
    beside = listed & {id(p) for p in computing} - right
    if not beside and (listed & right or not any(p.requires_grad for p in updated)):
        return None
    remedy = (
        "Its parameters are not those that this rank updates under the plan. Make it of the split model: "
        "parallel.optimizer(torch.optim.AdamW, lr=...), or of parallel.parameters()."
    )
    return InputError("optimizer", type(optimizer).__name__, remedy)
