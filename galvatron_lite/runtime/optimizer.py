"""Parameter groups that any torch optimizer can take, and what happens around the steps of those over them."""

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
    from galvatron_lite.runtime.split_model import SplitModel

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SIZE = 258
"""Rows and columns of what is stepped on: halves are above the sizes below which optimizers treat tensors otherwise
(Adafactor's 128 rows, 8-bit states' 4096 items), and no multiples of the blocks in which 8-bit states are scaled."""
_COPIED = (bool, int, float, str, NoneType, FunctionType)
_STEPS = (1.0, -0.3, 2.0)
_RATE = 1e-2
_FAR = 1e-3
"""Of the largest update: rounding is far below, what depends on norms far above."""
PART_OF = "part_of"
"""Option of groups that were cut: the number of the group in the list that was given."""
Groups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def split_groups(groups: Groups) -> list[dict[str, Any]]:
    """The same groups, cut so that each holds plain tensors of one device, or DTensors of one mesh.

    Optimizers that work on many tensors at once (foreach, fused) refuse mixtures. One group at least: a stage may have
    no parameters, and an optimizer refuses an empty list. Where the groups are not those given any more, ``PART_OF``
    says which of them each is a part of.
    """
    named = [group if isinstance(group, Mapping) else {"params": [group]} for group in groups]
    plain = [p for group in named if set(group) == {"params"} for p in group["params"]]
    wanted = [*([{"params": plain}] if plain else []), *(group for group in named if set(group) != {"params"})]
    cut: list[tuple[int, dict[str, Any]]] = []
    for number, group in enumerate(wanted):
        alike: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            alike.setdefault((mesh, parameter.device.type), []).append(parameter)
        cut += [(number, {**group, "params": parameters}) for parameters in alike.values()]
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


class OptimizerSteps:
    """Sees every optimizer of this process that steps over a model's parameters, whoever made it: it is checked before
    its first step under a plan, sees plain gradients, and what it updated is published.
    """

    def __init__(self, parallel: SplitModel) -> None:
        self._parallel = weakref.ref(parallel)
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Plan] = weakref.WeakKeyDictionary()
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_begin_all))
            _HOOKS.append(register_optimizer_step_post_hook(_end_all))
        _MODELS.add(self)

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
            replicated = everywhere and all(one.copies == devices for one in runtime.owned)
            refused = refused or check_optimizer(optimizer, runtime.owned, devices, replicated, build)
        if together:
            refused = next((one for one in everyone(refused) if one is not None), None)
        if refused is not None:
            raise refused
        self._checked[optimizer] = parallel.plan

    def _model_of(self, optimizer: torch.optim.Optimizer) -> SplitModel | None:
        """The model, where the optimizer is over parameters of it."""
        parallel = self._parallel()
        if parallel is None:
            return None
        every = [one for runtime in parallel.runtimes for one in runtime.owned]
        known = {id(parameter) for one in every for parameter in (one.parameter, one.updated)}
        return parallel if any(id(p) in known for group in optimizer.param_groups for p in group["params"]) else None

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        if (parallel := self._model_of(optimizer)) is not None:
            self.check(optimizer, together=False)
            for runtime in parallel.runtimes:
                guard_gradients(runtime.owned, guarded=False)
                guard_values(runtime.owned, guarded=False)
                runtime.updates.follow_loop()

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if (parallel := self._model_of(optimizer)) is not None:
            for runtime in parallel.runtimes:  # one of several optimizers may have stepped before
                runtime.updates.due = runtime.updates.is_needed
            parallel.publish()
            parallel.note_update()
            for runtime in parallel.runtimes:
                runtime.updates.show()


_MODELS: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_HOOKS: list[Any] = []
"""They stay: torch cannot go on over its hooks where a model that is collected meanwhile removes some."""


def _begin_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in list(_MODELS):
        one._begin(optimizer)


def _end_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in list(_MODELS):
        one._end(optimizer)


def _check_parameters(
    optimizer: torch.optim.Optimizer, updated: Sequence[nn.Parameter], computing: Sequence[nn.Parameter]
) -> InputError | None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        remedy = "Gradients of embeddings are dense under every plan. Take SGD, Adagrad or AdamW."
        return InputError("optimizer", "SparseAdam", remedy)
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


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[ManagedParameter],
    stage_devices: int,
    everywhere: bool,
    build: Build | None,
) -> InputError | None:
    """Why an optimizer would not train as in one process; None where it does. Nothing of it is changed.

    ``owned`` are this rank's parameters, ``everywhere`` whether every parameter of the model has a part on this rank.
    ``build`` makes such an optimizer of other parameter groups; its class and defaults are taken if not given.
    """
    cut = {one.updated: one for one in owned if one.copies < stage_devices and one.updated.requires_grad}
    seen: set[tuple[str, int, bool]] = set()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            dims, one = min(parameter.dim(), 2), cut.get(parameter)
            key = repr(options), dims, one is None
            if dims == 0 or key in seen or (one is None and everywhere):
                continue
            seen.add(key)
            builds = [build] if build is not None else [_copied(optimizer), _built_again(optimizer)]
            reach = _reach(builds, options, dims, parameter.device, pieces=one is not None)
            if reach is not None:
                name = type(optimizer).__name__
                return InputError("optimizer", name, _remedy(reach, one.names[0] if one else None))
            if isinstance(parameter, DTensor) and (error := _error_on_shards(builds, options, parameter)):
                remedy = (
                    f"Its update does not run on shards ({error}). It runs without ZeRO (forbid=('zero',)); "
                    "or take AdamW, SGD."
                )
                return InputError("optimizer", type(optimizer).__name__, remedy)
    return None


def _error_on_shards(builds: Sequence[Build], options: dict[str, Any], like: DTensor) -> str:
    """What goes wrong in a step on a small DTensor that lies as another does; empty where nothing does."""
    local = torch.ones((2,) * like.dim(), dtype=like.dtype, device=like.device)
    parameter = nn.Parameter(DTensor.from_local(local, like.device_mesh, like.placements, run_check=False))
    parameter.grad = parameter.detach().clone()
    for attempt in builds:
        try:
            attempt([{**options, "params": [parameter]}]).step()
        except Exception as error:
            message = str(error).split(". ")[0]
        else:
            return ""
    return message


def _remedy(reach: str, cut: str | None) -> str:
    where = "this plan has parameters on other ranks" if cut is None else f"{cut} is split over ranks by this plan"
    keeps = "data parallelism, context parallelism and recomputation"
    if reach == "tensor":
        why, keeps = "The update of an element depends on others of its tensor", f"{keeps}, and pipelines of them"
    elif reach == "model":
        why = "The update of a tensor depends on other tensors"
    else:
        why = f"It cannot be tried on small tensors ({reach}), so nothing says that parts may be updated apart"
    return (
        f"{why}, and {where}. It trains as in one process under plans that keep parameters whole ({keeps}: "
        "forbid=('tp', 'zero', 'expert')); or take an optimizer whose updates are element-wise (AdamW, SGD)."
    )


def _reach(
    builds: Sequence[Build], options: dict[str, Any], dims: int, device: torch.device, pieces: bool
) -> str | None:
    """On what an element's update depends: ``tensor``, ``model``, or why it cannot be told; None: on itself."""
    for attempt in builds:
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                return _depends(attempt, options, dims, device, pieces)
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
    """A value and a gradient whose halves, rows and columns are of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1, SIZE)
    scales = scale if dims == 1 else scale[:, None] * scale.roll(SIZE // 3)
    shape = (SIZE,) * dims
    return tuple((torch.randn(shape, generator=generator) * scales * seed).to(device) for _ in range(2))  # type: ignore[return-value]


def _updates(build: Build, options: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value, _ in pairs]
    optimizer = build([{**_moving(options), "params": parameters}])
    if callable(begin := getattr(optimizer, "train", None)):  # schedule-free ones have modes
        begin()
    for step in _STEPS:
        for parameter, (_, gradient) in zip(parameters, pairs, strict=True):
            parameter.grad = gradient * step
        optimizer.step()
    return [parameter.detach() - value for parameter, (value, _) in zip(parameters, pairs, strict=True)]


def _moving(options: dict[str, Any]) -> dict[str, Any]:
    """Options with a rate that shows: in a warm-up it may be zero."""
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        return {**options, "lr": torch.full_like(rate, _RATE)}
    return options if rate is None else {**options, "lr": _RATE}


def _differ(one: Tensor, other: Tensor) -> bool:
    largest = max(float(one.abs().max()), 1e-12)
    return not float((one - other).abs().max()) <= _FAR * largest


def _built_again(optimizer: torch.optim.Optimizer) -> Build:
    taken = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return lambda groups: type(optimizer)(groups, **options)


def _copied(optimizer: torch.optim.Optimizer) -> Build:
    """One of its class with the plain values that it keeps beside its defaults, without states.

    Methods that were replaced on the instance stay out: a learning rate scheduler's ``step()`` steps the first one.
    """

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        twin: torch.optim.Optimizer = object.__new__(type(optimizer))
        torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
        for key, value in vars(optimizer).items():
            replaced = callable(getattr(type(optimizer), key, None))
            if key not in vars(twin) and not replaced and isinstance(value, _COPIED):
                setattr(twin, key, value)
        return twin

    return build
