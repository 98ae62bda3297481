"""Parameter groups for any torch optimizer, and what happens before and after the steps of optimizers over them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.parameters.guard import guard_gradients, guard_values
from galvatron_lite.runtime.parameters.managed import ManagedParameter
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.world import messages_carry_data

if TYPE_CHECKING:
    from galvatron_lite.runtime.sharded_model import ShardedModel

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Creates an optimizer of parameter groups."""
SIZE = 258
"""Rows and columns of trial tensors: halves are above the sizes below which optimizers treat tensors otherwise
(Adafactor's 128 rows, 8-bit states' 4096 items), and no multiples of the blocks in which 8-bit states are scaled."""
_COPIED = (bool, int, float, str, NoneType, FunctionType)
_STEPS = (1.0, -0.3, 2.0)
"""Factors of the gradient in the steps of a trial."""
_RATE = 1e-2
_TOLERANCE = 1e-3
"""Of the largest update: rounding is far below, what depends on norms far above."""
PART_OF = "part_of"
"""Option of groups that were split: the index of the original group."""
Groups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def split_groups(groups: Groups) -> list[dict[str, Any]]:
    """Split groups so that each contains plain tensors of one device, or DTensors of one mesh.

    Optimizers that work on many tensors at once (foreach, fused) refuse mixtures. There is at least one group: a stage
    may have no parameters, and an optimizer refuses an empty list. If the groups change, ``PART_OF`` is the index of
    the group that each is a part of.
    """
    named = [group if isinstance(group, Mapping) else {"params": [group]} for group in groups]
    plain = [p for group in named if set(group) == {"params"} for p in group["params"]]
    merged = [*([{"params": plain}] if plain else []), *(group for group in named if set(group) != {"params"})]
    parts: list[tuple[int, dict[str, Any]]] = []
    for number, group in enumerate(merged):
        alike: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            alike.setdefault((mesh, parameter.device.type), []).append(parameter)
        parts += [(number, {**group, "params": parameters}) for parameters in alike.values()]
    if [number for number, _ in parts] != [*range(len(merged))]:
        parts = [(number, {**group, PART_OF: number}) for number, group in parts]
    return [group for _, group in parts] or [{"params": []}]


def fused_on_host(
    groups: list[dict[str, Any]], factory: Callable[..., Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Use the fused update for groups in host memory, if the optimizer has one and the options do not decide.

    It reads and writes the states once; other implementations do so once an operator.
    """
    if "fused" not in inspect.signature(factory).parameters or {"fused", "foreach"} & set(options):
        return groups
    return [
        {**group, "fused": True} if all(p.device.type == "cpu" for p in group["params"]) and group["params"] else group
        for group in groups
    ]


class OptimizerSteps:
    """Observes every optimizer of this process that updates a model's parameters, whoever created it.

    The optimizer is checked before its first step under a plan, its steps use plain gradients, and what it updates is
    published.
    """

    def __init__(self, parallel: ShardedModel) -> None:
        self._parallel = weakref.ref(parallel)
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Plan] = weakref.WeakKeyDictionary()
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
            _HOOKS.append(register_optimizer_step_post_hook(_after_step))
        _OBSERVERS.add(self)

    def check(self, optimizer: torch.optim.Optimizer, build: Build | None = None, together: bool = True) -> None:
        """Check that an optimizer trains this model as it would in one process; once under each plan.

        Args:
            optimizer: any; it has not stepped yet.
            build: creates another one like it; default: its class.
            together: whether all ranks call this, so that all of them raise the error of any.

        Raises:
            InputError: its parameters are not those of this model, or its update of a parameter needs parts of others
                or of itself that are on other ranks.
        """
        parallel = self._parallel()
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # of a wrapper: accelerate's
        if parallel is None or self._checked.get(optimizer) is parallel.plan or not messages_carry_data():
            return
        managed = parallel.managed
        error = _check_parameters(optimizer, [one.updated for one in managed], [one.parameter for one in managed])
        has_all = len(parallel.plan.stages) == 1 and not parallel.plan.branches
        for runtime in parallel.runtimes:
            devices = runtime.meshes.stage_devices
            is_replicated = has_all and all(one.copies == devices for one in runtime.owned)
            error = error or check_optimizer(optimizer, runtime.owned, devices, is_replicated, build)
        if together:
            error = next((other for other in everyone(error) if other is not None), None)
        if error is not None:
            raise error
        self._checked[optimizer] = parallel.plan

    def _model_of(self, optimizer: torch.optim.Optimizer) -> ShardedModel | None:
        """The model, if the optimizer has parameters of it."""
        parallel = self._parallel()
        if parallel is None:
            return None
        ids = {id(parameter) for one in parallel.managed for parameter in (one.parameter, one.updated)}
        return parallel if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]) else None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer, and give it plain tensors."""
        if (parallel := self._model_of(optimizer)) is not None:
            self.check(optimizer, together=False)
            for runtime in parallel.runtimes:
                guard_gradients(runtime.owned, guarded=False)
                guard_values(runtime.owned, guarded=False)
                runtime.updates.follow_loop()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish what the optimizer updated, and guard it."""
        if (parallel := self._model_of(optimizer)) is not None:
            for runtime in parallel.runtimes:  # one of several optimizers may have stepped before
                runtime.updates.due = runtime.updates.is_needed
            parallel.publish()
            parallel.note_update()
            for runtime in parallel.runtimes:
                runtime.updates.show()


_OBSERVERS: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_HOOKS: list[Any] = []
"""They are never removed: torch iterates over its hooks, and a model may be collected meanwhile."""


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for observer in list(_OBSERVERS):
        observer.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for observer in list(_OBSERVERS):
        observer.after_step(optimizer)


def _check_parameters(
    optimizer: torch.optim.Optimizer, updated: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]
) -> InputError | None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        remedy = "Gradients of embeddings are dense under every plan. Take SGD, Adagrad or AdamW."
        return InputError("optimizer", "SparseAdam", remedy)
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    right = {id(p) for p in updated}
    wrong = listed & {id(p) for p in parameters} - right
    if not wrong and (not listed or listed & right or not any(p.requires_grad for p in updated)):
        return None  # a stage may have none of the parameters
    remedy = (
        "Its parameters are not those that this rank updates under the plan. Make it of the split model: "
        "parallel.optimizer(torch.optim.AdamW, lr=...), or of parallel.parameters()."
    )
    return InputError("optimizer", type(optimizer).__name__, remedy)


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[ManagedParameter],
    stage_devices: int,
    has_all: bool,
    build: Build | None,
) -> InputError | None:
    """Return the error if an optimizer of this rank's parameters would not train as in one process, else None.

    ``has_all`` is whether this rank has a part of every parameter of the model. ``build`` creates another optimizer
    like it; by default its class does, with its defaults.
    """
    split = {one.updated: one for one in parameters if one.copies < stage_devices and one.updated.requires_grad}
    seen: set[tuple[str, int, bool]] = set()
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            dims, managed = min(parameter.dim(), 2), split.get(parameter)
            key = repr(options), dims, managed is None
            if dims == 0 or key in seen or (managed is None and has_all):
                continue
            seen.add(key)
            builds = [build] if build is not None else [_copied(optimizer), _built_again(optimizer)]
            reach = _reach(builds, options, dims, parameter.device, pieces=managed is not None)
            if reach is not None:
                return InputError("optimizer", name, _remedy(reach, managed.names[0] if managed else None))
            if isinstance(parameter, DTensor) and (error := _error_on_shards(builds, options, parameter)):
                remedy = (
                    f"Its update does not run on shards ({error}). It runs without ZeRO (forbid=('zero',)); "
                    "or take AdamW, SGD."
                )
                return InputError("optimizer", name, remedy)
    return None


def _error_on_shards(builds: Sequence[Build], options: dict[str, Any], like: DTensor) -> str:
    """The error of a step on a small DTensor with the placements of another; empty if there is none."""
    local = torch.ones((2,) * like.dim(), dtype=like.dtype, device=like.device)
    parameter = nn.Parameter(DTensor.from_local(local, like.device_mesh, like.placements, run_check=False))
    parameter.grad = parameter.detach().clone()
    for build in builds:
        try:
            build([{**options, "params": [parameter]}]).step()
        except Exception as error:
            message = str(error).split(". ")[0]
        else:
            return ""
    return message


def _remedy(reach: str, split: str | None) -> str:
    where = "this plan has parameters on other ranks" if split is None else f"{split} is split over ranks by this plan"
    plans = "data parallelism, context parallelism and recomputation"
    if reach == "tensor":
        why, plans = "The update of an element depends on others of its tensor", f"{plans}, and pipelines of them"
    elif reach == "model":
        why = "The update of a tensor depends on other tensors"
    else:
        why = f"It cannot be tried on small tensors ({reach}), so nothing says that parts may be updated apart"
    return (
        f"{why}, and {where}. It trains as in one process under plans that keep parameters whole ({plans}: "
        "forbid=('tp', 'zero', 'expert')); or take an optimizer whose updates are element-wise (AdamW, SGD)."
    )


def _reach(
    builds: Sequence[Build], options: dict[str, Any], dims: int, device: torch.device, pieces: bool
) -> str | None:
    """What the update of an element depends on: its ``tensor``, the ``model``, or nothing else (None).

    If no trial runs, return the error of the last one.
    """
    for build in builds:
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                return _depends(build, options, dims, device, pieces)
        except Exception as error:
            message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return message


def _depends(build: Build, options: dict[str, Any], dims: int, device: torch.device, pieces: bool) -> str | None:
    (value, gradient), other = _value_and_gradient(1, dims, device), _value_and_gradient(2, dims, device)
    (alone,) = _updates(build, options, [(value, gradient)])
    if _differ(alone, _updates(build, options, [(value, gradient), other])[0]):
        return "model"
    for dim in range(dims if pieces else 0):
        halves = zip(value.chunk(2, dim), gradient.chunk(2, dim), strict=True)
        parts = [_updates(build, options, [half])[0] for half in halves]
        if _differ(alone, torch.cat(parts, dim)):
            return "tensor"
    return None


def _value_and_gradient(seed: int, dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A value and a gradient whose halves, rows and columns differ in size."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1, SIZE)
    scales = scale if dims == 1 else scale[:, None] * scale.roll(SIZE // 3)
    shape = (SIZE,) * dims
    return tuple((torch.randn(shape, generator=generator) * scales * seed).to(device) for _ in range(2))  # type: ignore[return-value]


def _updates(build: Build, options: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The changes of values by some steps with their gradients."""
    parameters = [nn.Parameter(value.clone()) for value, _ in pairs]
    optimizer = build([{**_with_rate(options), "params": parameters}])
    if callable(train := getattr(optimizer, "train", None)):  # schedule-free optimizers have modes
        train()
    for step in _STEPS:
        for parameter, (_, gradient) in zip(parameters, pairs, strict=True):
            parameter.grad = gradient * step
        optimizer.step()
    return [parameter.detach() - value for parameter, (value, _) in zip(parameters, pairs, strict=True)]


def _with_rate(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a learning rate that is not zero, as it may be in a warm-up."""
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        return {**options, "lr": torch.full_like(rate, _RATE)}
    return options if rate is None else {**options, "lr": _RATE}


def _differ(update: Tensor, other: Tensor) -> bool:
    largest = max(float(update.abs().max()), 1e-12)
    return not float((update - other).abs().max()) <= _TOLERANCE * largest


def _built_again(optimizer: torch.optim.Optimizer) -> Build:
    parameters = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in parameters}
    return lambda groups: type(optimizer)(groups, **options)


def _copied(optimizer: torch.optim.Optimizer) -> Build:
    """Create an optimizer of the same class, with the plain values that it has beside its defaults, without states.

    Methods that were replaced on the instance are left out: a learning rate scheduler's ``step()`` steps the original.
    """

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        twin: torch.optim.Optimizer = object.__new__(type(optimizer))
        torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
        for key, value in vars(optimizer).items():
            is_method = callable(getattr(type(optimizer), key, None))
            if key not in vars(twin) and not is_method and isinstance(value, _COPIED):
                setattr(twin, key, value)
        return twin

    return build
