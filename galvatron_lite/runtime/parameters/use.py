"""What a training loop does with a split model between steps: followed where the plan can, refused where it cannot."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.offload.apply import local_of_rank
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.stages import StageRuntime

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.split_model import SplitModel


def check_hooks(model: nn.Module) -> None:
    """Raise InputError for a model whose parameters have hooks, which would see gradients of shares of the batch."""
    for name, parameter in model.named_parameters():
        if any(_has_hook(parameter, kind) for kind in _KINDS):
            raise _hook_error(name)


def is_alone(plan: Plan) -> bool:
    """Whether gradients are those that autograd makes of a batch at once, on one device."""
    return plan.devices == 1 and plan.microbatches == 1


_COPY = (
    "A rank has a part of it. Copy what auto_parallelize returned (torch.optim.swa_utils.AveragedModel takes it, too), "
    "or load its full_state_dict()."
)
_SPLIT: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_unsplit(model: nn.Module) -> None:
    """Raise InputError for a model that a plan has split, or one around it."""
    if any(module in _SPLIT for module in model.modules()):
        remedy = "An earlier auto_parallelize has split it: go on with what that returned, or make the model anew."
        raise InputError("model", type(model).__name__, remedy)


def refuse_copies(model: nn.Module, remedy: str = _COPY) -> None:
    """Have ``copy.deepcopy`` of a model of which this rank has a part raise InputError."""

    def copied(_memo: object) -> None:
        raise InputError("copy.deepcopy", type(model).__name__, remedy)

    object.__setattr__(model, "__deepcopy__", copied)


def guard_model(model: nn.Module, parallel: SplitModel) -> None:
    """Have a model that was split refuse to be called by itself where gradients, or outputs, would not be its own, and
    warn where its state is not that of the full model.
    """
    if not is_alone(parallel.plan):
        _SPLIT.add(model)
    owner = weakref.ref(parallel)

    def check(module: nn.Module, _args: object) -> None:
        parallel = owner()
        if (
            parallel is None
            or is_alone(parallel.plan)
            or any(runtime.traffic.is_running for runtime in parallel.runtimes)
        ):
            return
        narrow = any(runtime.updates.has_casts for runtime in parallel.runtimes)
        uncast = narrow and not torch.is_autocast_enabled(parallel.device.type)
        if torch.is_grad_enabled() or len(parallel.plan.stages) > 1 or uncast:
            remedy = (
                "The plan has split it over ranks. Call what auto_parallelize returned: parallel(batch), "
                "parallel.outputs(batch) or parallel.train_step(batch, optimizer)."
            )
            name = type(module).__name__.removeprefix("FSDP")  # how torch calls the classes it makes
            raise InputError("call of the model itself", name, remedy)

    def warn(*_: object) -> None:
        parallel = owner()
        if parallel is not None and any(runtime.holds_shares for runtime in parallel.runtimes):
            warnings.warn(
                "state_dict() holds this rank's shares alone; under ZeRO-1 weights are in the precision of compute. "
                "Call parallel.save(folder) on all ranks.",
                stacklevel=3,
            )

    if any(runtime.holds_shares for runtime in parallel.runtimes):
        refuse_copies(model)
    else:
        vars(model).pop("__deepcopy__", None)
    model.register_forward_pre_hook(check)
    model.register_state_dict_pre_hook(warn)  # type: ignore[no-untyped-call]


class ReplacedParameter(nn.Parameter):
    """A parameter from before the plan, which has another one in its place: who uses it is told."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        remedy = (
            "The plan has put its shards in its place. Take parameters after auto_parallelize, for the optimizer and "
            "for clipping, too: parallel.optimizer(...), parallel.parameters(), parallel.clip_grad_norm(...)."
        )
        raise InputError("parameter", "one from before auto_parallelize", remedy)


def retire(before: Iterable[tuple[str, weakref.ref[nn.Parameter]]], runtimes: Iterable[StageRuntime]) -> None:
    """Have parameters that were replaced, and that the user still holds, say so."""
    now = {name: one.parameter for runtime in runtimes for one in runtime.owned for name in one.names}
    for name, reference in before:
        old = reference()
        if old is not None and now.get(name, old) is not old:
            old.__class__ = ReplacedParameter


class ParameterUse:
    """Looks at this rank's parameters before each step."""

    def __init__(self, runtimes: Iterable[StageRuntime], plan: Plan) -> None:
        owned = [one for runtime in runtimes for one in runtime.owned]
        self._owned, self._alone, self._at_once = owned, is_alone(plan), plan.microbatches == 1
        self._frozen = [one for one in owned if not one.parameter.requires_grad]
        self._trained = [one.parameter.requires_grad for one in owned]
        self._kinds = [(one.parameter.dtype, one.parameter.device) for one in owned]
        shared = (one for one in owned if one.is_zero or one.share is not None)
        self._storages = [
            (one, tensor, tensor.untyped_storage()._cdata) for one in shared for tensor in {one.parameter, one.reduced}
        ]
        modules = {module for runtime in runtimes for module in runtime.model.modules()}
        self._structure = [
            (module, isinstance(module, FSDPModule), dict(module._parameters), dict(module._modules))
            for module in modules
        ]
        self._versions = self._current_versions()

    def has_changed(self) -> bool:
        """Whether parameters were changed in place since this was last asked: what was gathered of them is stale."""
        before, self._versions = self._versions, self._current_versions()
        return before != self._versions

    def _current_versions(self) -> tuple[int, ...]:
        return tuple(one.parameter._version for one in self._owned)

    @staticmethod
    def _trains(module: nn.Module | None, before: nn.Module | None, split: Collection[int]) -> bool:
        """Whether a module that was put somewhere has parameters that no plan knows, or took the place of some."""
        new = [] if module is None or id(module) in split else list(module.parameters())
        return bool(new) or (before is not None and any(True for _ in before.parameters()))

    def check(self) -> None:
        """What the loop froze stays frozen; what cannot be followed is refused."""
        for one, kind in zip(self._owned, self._kinds, strict=True):
            if (now := (one.parameter.dtype, one.parameter.device)) != kind:
                raise moved_error(*now)
        for one, tensor, storage in self._storages:
            if tensor.untyped_storage()._cdata != storage:
                remedy = "Ranks share it under this plan: change it in place (parameter.data.copy_(values))."
                raise InputError("parameter.data", f"another tensor for {one.names[0]}", remedy)
        for module, is_zero, parameters, children in self._structure:
            other = [name for name, one in module._modules.items() if one is not children.get(name)]
            if other:
                split = {id(one) for one, *_ in self._structure}
                other = [name for name in other if self._trains(module._modules[name], children.get(name), split)]
            held = module._parameters
            other += [name for name, one in parameters.items() if name not in held or _is_replaced(one, held[name])]
            other += held.keys() - parameters.keys()
            if other or isinstance(module, FSDPModule) != is_zero:
                what = f"{other[0]} in" if other else "class of"
                remedy = "The plan has split what it was: change the model before auto_parallelize."
                raise InputError("model", f"another {what} {type(module).__name__.removeprefix('FSDP')}", remedy)
        for one, trained in zip(self._owned, self._trained, strict=True):
            source = one.updated if one.parameter.requires_grad == trained else one.parameter  # which the loop changed
            for tensor in (one.parameter, one.reduced, one.updated):
                tensor.requires_grad_(source.requires_grad)
        self._trained = [one.parameter.requires_grad for one in self._owned]
        for one in self._frozen:
            if one.parameter.requires_grad:
                remedy = (
                    "It was frozen when the plan was applied, so its gradient is not summed over ranks. Let it require "
                    "a gradient before auto_parallelize, and freeze it afterwards."
                )
                raise InputError("requires_grad", one.names[0], remedy)
        for one in self._owned:
            if self._alone and one.updated is one.parameter:
                continue
            # FSDP calls hooks of the second kind with reduced gradients
            kinds = _KINDS[:1] if one.is_zero and self._at_once else _KINDS
            if any(_has_hook(tensor, kind) for tensor in (one.parameter, one.updated) for kind in kinds):
                raise _hook_error(one.names[0])


def _is_replaced(parameter: nn.Parameter | None, other: nn.Parameter | None) -> bool:
    """Whether another parameter was put in the place of one; FSDP does so while it has gathered a layer."""
    gathered = isinstance(parameter, DTensor) and other is not None and not isinstance(other, DTensor)
    return other is not parameter and not gathered


def moved_error(dtype: torch.dtype, device: torch.device) -> InputError:
    """Of a split model whose parameters were cast or moved."""
    remedy = (
        "The plan has taken the model's parameters apart. Move and cast the model before auto_parallelize, or compute "
        "in another type with precision=."
    )
    return InputError("to", f"{dtype} on {device}", remedy)


def _hook_error(name: str) -> InputError:
    remedy = (
        "A hook on a parameter sees the gradient of a share of the batch, before ranks have summed it. Change "
        "gradients between loss.backward() and optimizer.step() instead: for p in parallel.parameters(): p.grad..."
    )
    return InputError("hook of a parameter", name, remedy)


_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes with the hooks of a tensor; PyTorch has no public way to ask for them."""
_PACKAGE = __name__.partition(".")[0]


def _has_hook(tensor: Tensor, kind: str) -> bool:
    """Whether a tensor has a hook of other code than this package's."""
    hooks = (getattr(tensor, kind, None) or {}).values()
    homes = (getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks)
    return any(home.partition(".")[0] != _PACKAGE for home in homes)


class LocalCopy(Tensor):
    """What this rank holds of a parameter, copied. Functions take it beside DTensors, whose local part they see."""

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors((args, kwargs or {}), local_of_rank)
        return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]


class ParameterCopies(nn.Module):
    """A ``copy.deepcopy`` of a split model: copies of its ``parameters()`` and ``buffers()``, in their order.

    Its ``state_dict()`` is the whole model's, which all ranks ask for and load together.
    """

    def __init__(self, parallel: SplitModel) -> None:
        super().__init__()
        self._parallel = [parallel]  # in a list: it is no part of this module
        self._copy()
        parallel.averages.append(weakref.ref(self))

    def _copy(self) -> None:
        (parallel,) = self._parallel
        for number, parameter in enumerate(parallel.parameters()):
            local = local_of_rank(parameter.detach()).clone().as_subclass(LocalCopy)
            copied = nn.Parameter(local, parameter.requires_grad)
            self.register_parameter(f"parameter{number}", copied)
        for number, buffer in enumerate(parallel.buffers()):
            self.register_buffer(f"buffer{number}", buffer.detach().clone())

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """There is no split model of these values.

        Raises:
            InputError: always.
        """
        remedy = "Load its full_state_dict() into the model (parallel.load_full_state_dict), or into an unsplit one."
        raise InputError("call of the model", "copies of parameters", remedy)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's ``state_dict()`` with these values, on the CPU of every rank; all ranks call it."""
        with self._swapped():
            return self._parallel[0].full_state_dict()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        destination.update({f"{prefix}{name}": value for name, value in self.full_state_dict().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        (parallel,) = self._parallel
        with self._swapped():
            parallel.load_full_state_dict({name.removeprefix(prefix): one for name, one in state_dict.items()})
            held = [*parallel.parameters(), *parallel.buffers()]
            for one, value in zip([*self.parameters(), *self.buffers()], held, strict=True):
                one.data.copy_(value)

    def follow(self, state: Mapping[str, Any]) -> None:
        """The plan has changed: copy the other parameters, with the values that ``full_state_dict()`` gave before."""
        self._parameters.clear()
        self._buffers.clear()
        self._copy()
        self._load_from_state_dict(state, "")

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        (parallel,) = self._parallel
        parallel.publish()
        held = [*parallel.parameters(), *parallel.buffers()]
        before = [one.detach().clone() for one in held]
        try:
            self._set(held, [*self.parameters(), *self.buffers()])
            yield
        finally:
            self._set(held, before)

    @torch.no_grad()
    def _set(self, held: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        (parallel,) = self._parallel
        for one, value in zip(held, values, strict=True):
            local_of_rank(one).copy_(local_of_rank(value))
        for runtime in parallel.runtimes:
            runtime.updates.due = runtime.updates.is_needed
        parallel.publish()


class InferenceModel(nn.Module):
    """Called like the model, or with a batch, alike on every rank; gives the model's own outputs, without gradients."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel = parallel
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; see ``ParallelModel.outputs``."""
        return self.parallel.outputs(*args, **kwargs)
