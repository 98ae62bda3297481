"""What a training loop does with a split model between steps: followed if the plan allows it, else refused."""

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
    from galvatron_lite.runtime.sharded_model import ShardedModel

_COPY = (
    "A rank has a part of it. Copy what auto_parallelize returned (torch.optim.swa_utils.AveragedModel takes it, too), "
    "or load its full_state_dict()."
)
_HOOK_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes with the hooks of a tensor, as PyTorch has no public function that returns them."""
_PACKAGE = __name__.partition(".")[0]
_SPLIT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a plan has split."""


def is_alone(plan: Plan) -> bool:
    """Whether gradients are those that autograd computes of a full batch at once, on one device."""
    return plan.devices == 1 and plan.microbatches == 1


def check_hooks(model: nn.Module) -> None:
    """Raise InputError if a parameter has a hook, which would see gradients of shares of the batch."""
    for name, parameter in model.named_parameters():
        if any(_has_hook(parameter, kind) for kind in _HOOK_KINDS):
            raise _hook_error(name)


def check_unsplit(model: nn.Module) -> None:
    """Raise InputError if a plan has split a model, or a module of it."""
    if any(module in _SPLIT for module in model.modules()):
        remedy = "An earlier auto_parallelize has split it: go on with what that returned, or make the model anew."
        raise InputError("model", type(model).__name__, remedy)


def refuse_copies(model: nn.Module, remedy: str = _COPY) -> None:
    """Let ``copy.deepcopy`` of a model of which this rank has a part raise InputError."""

    def refuse(_memo: object) -> None:
        raise InputError("copy.deepcopy", type(model).__name__, remedy)

    object.__setattr__(model, "__deepcopy__", refuse)


def guard_model(model: nn.Module, parallel: ShardedModel) -> None:
    """Guard the user's model, which was split, against uses other than through ``parallel``.

    A call of the model itself raises InputError if its outputs or gradients would be those of a part. Its
    ``state_dict()`` warns if it is that of a part.
    """
    if not is_alone(parallel.plan):
        _SPLIT.add(model)
    reference = weakref.ref(parallel)

    def check(module: nn.Module, _args: object) -> None:
        parallel = reference()
        if parallel is None or is_alone(parallel.plan) or any(one.traffic.is_running for one in parallel.runtimes):
            return
        has_casts = any(runtime.updates.has_casts for runtime in parallel.runtimes)
        needs_autocast = has_casts and not torch.is_autocast_enabled(parallel.device.type)
        if torch.is_grad_enabled() or len(parallel.plan.stages) > 1 or needs_autocast:
            remedy = (
                "The plan has split it over ranks. Call what auto_parallelize returned: parallel(batch), "
                "parallel.outputs(batch) or parallel.train_step(batch, optimizer)."
            )
            name = type(module).__name__.removeprefix("FSDP")  # which torch adds to the names of classes
            raise InputError("call of the model itself", name, remedy)
        parallel.release_gathered()

    def warn(*_: object) -> None:
        parallel = reference()
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
    """A parameter of the unsplit model that its shards have replaced: every use of it raises InputError."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        remedy = (
            "The plan has put its shards in its place. Take parameters after auto_parallelize, for the optimizer and "
            "for clipping, too: parallel.optimizer(...), parallel.parameters(), parallel.clip_grad_norm(...)."
        )
        raise InputError("parameter", "one from before auto_parallelize", remedy)


def retire(unsplit: Iterable[tuple[str, weakref.ref[nn.Parameter]]], runtimes: Iterable[StageRuntime]) -> None:
    """Turn parameters of the unsplit model that were replaced, and that the user still holds, into
    ``ReplacedParameter``."""
    current = {name: managed.parameter for runtime in runtimes for managed in runtime.owned for name in managed.names}
    for name, reference in unsplit:
        parameter = reference()
        if parameter is not None and current.get(name, parameter) is not parameter:
            parameter.__class__ = ReplacedParameter


class ParameterUse:
    """Checks this rank's parameters and modules before each step, and follows what the training loop froze."""

    def __init__(self, runtimes: Iterable[StageRuntime], plan: Plan) -> None:
        self._managed = managed = [parameter for runtime in runtimes for parameter in runtime.owned]
        self._is_alone, self._has_one_microbatch = is_alone(plan), plan.microbatches == 1
        self._frozen = [one for one in managed if not one.parameter.requires_grad]
        self._required_grad = [one.parameter.requires_grad for one in managed]
        self._kinds = [(one.parameter.dtype, one.parameter.device) for one in managed]
        shared = (one for one in managed if one.is_zero or one.share is not None)
        self._storages = [
            (one.names[0], tensor, tensor.untyped_storage()._cdata)
            for one in shared
            for tensor in {one.parameter, one.reduced}
        ]
        modules = {module for runtime in runtimes for module in runtime.model.modules()}
        self._structure = [
            (module, isinstance(module, FSDPModule), dict(module._parameters), dict(module._modules))
            for module in modules
        ]

    def check(self) -> None:
        """Freeze what the training loop froze, and refuse what cannot be followed.

        Raises:
            InputError: parameters were moved, cast or replaced, modules were replaced or added, a parameter that was
                frozen when the plan was applied requires a gradient, or a parameter has a hook.
        """
        for managed, kind in zip(self._managed, self._kinds, strict=True):
            now = managed.parameter.dtype, managed.parameter.device
            if now != kind:
                raise moved_error(*now)
        for name, tensor, storage in self._storages:
            if tensor.untyped_storage()._cdata != storage:
                remedy = "Ranks share it under this plan: change it in place (parameter.data.copy_(values))."
                raise InputError("parameter.data", f"another tensor for {name}", remedy)
        self._check_structure()
        self._follow_frozen()
        self._check_hooks()

    def _check_structure(self) -> None:
        for module, is_zero, parameters, children in self._structure:
            replaced = [name for name, child in module._modules.items() if child is not children.get(name)]
            if replaced:
                split = {id(module) for module, *_ in self._structure}
                replaced = [name for name in replaced if _trains(module._modules[name], children.get(name), split)]
            current = module._parameters
            replaced += [
                name
                for name, parameter in parameters.items()
                if name not in current or _is_replaced(parameter, current[name])
            ]
            replaced += current.keys() - parameters.keys()
            if replaced or isinstance(module, FSDPModule) != is_zero:
                what = f"{replaced[0]} in" if replaced else "class of"
                remedy = "The plan has split what it was: change the model before auto_parallelize."
                raise InputError("model", f"another {what} {type(module).__name__.removeprefix('FSDP')}", remedy)

    def _follow_frozen(self) -> None:
        for managed, before in zip(self._managed, self._required_grad, strict=True):
            is_unchanged = managed.parameter.requires_grad == before
            source = managed.updated if is_unchanged else managed.parameter  # which the training loop changed
            for tensor in (managed.parameter, managed.reduced, managed.updated):
                tensor.requires_grad_(source.requires_grad)
        self._required_grad = [managed.parameter.requires_grad for managed in self._managed]
        for managed in self._frozen:
            if managed.parameter.requires_grad:
                remedy = (
                    "It was frozen when the plan was applied, so its gradient is not summed over ranks. Let it require "
                    "a gradient before auto_parallelize, and freeze it afterwards."
                )
                raise InputError("requires_grad", managed.names[0], remedy)

    def _check_hooks(self) -> None:
        for managed in self._managed:
            if self._is_alone and managed.updated is managed.parameter:
                continue
            # FSDP calls hooks of the second kind with reduced gradients
            kinds = _HOOK_KINDS[:1] if managed.is_zero and self._has_one_microbatch else _HOOK_KINDS
            if any(_has_hook(tensor, kind) for tensor in (managed.parameter, managed.updated) for kind in kinds):
                raise _hook_error(managed.names[0])


def _trains(module: nn.Module | None, before: nn.Module | None, split: Collection[int]) -> bool:
    """Whether a new module has parameters that no plan has split, or replaces a module with parameters."""
    new = [] if module is None or id(module) in split else list(module.parameters())
    return bool(new) or (before is not None and any(True for _ in before.parameters()))


def _is_replaced(before: nn.Parameter | None, now: nn.Parameter | None) -> bool:
    """Whether another parameter replaces one; while FSDP has gathered a layer, plain tensors replace its shards."""
    is_gathered = isinstance(before, DTensor) and now is not None and not isinstance(now, DTensor)
    return now is not before and not is_gathered


def moved_error(dtype: torch.dtype, device: torch.device) -> InputError:
    """The error if parameters of a split model are cast or moved."""
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


def _has_hook(tensor: Tensor, kind: str) -> bool:
    """Whether code outside of this package has registered a hook of a tensor."""
    hooks = (getattr(tensor, kind, None) or {}).values()
    modules = (getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks)
    return any(module.partition(".")[0] != _PACKAGE for module in modules)


class LocalCopy(Tensor):
    """A copy of this rank's part of a parameter. Functions of it and DTensors work on the local parts of these."""

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors((args, kwargs or {}), local_of_rank)
        return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]


class ParameterCopies(nn.Module):
    """A ``copy.deepcopy`` of a split model: copies of its ``parameters()`` and ``buffers()``, in their order.

    Its ``state_dict()`` is the full model's. All ranks call it, or load one, together.
    """

    def __init__(self, parallel: ShardedModel) -> None:
        super().__init__()
        self._parallel = [parallel]  # in a list, so that it is no submodule
        self._copy()
        parallel.averages.append(weakref.ref(self))

    def _copy(self) -> None:
        (parallel,) = self._parallel
        for number, parameter in enumerate(parallel.parameters()):
            local = local_of_rank(parameter.detach()).clone().as_subclass(LocalCopy)
            self.register_parameter(f"parameter{number}", nn.Parameter(local, parameter.requires_grad))
        for number, buffer in enumerate(parallel.buffers()):
            self.register_buffer(f"buffer{number}", buffer.detach().clone())

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """Refuse the call: no split model has these values.

        Raises:
            InputError: always.
        """
        remedy = "Load its full_state_dict() into the model (parallel.load_full_state_dict), or into an unsplit one."
        raise InputError("call of the model", "copies of parameters", remedy)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The full model's ``state_dict()`` with these values, on the CPU of every rank; all ranks call it."""
        with self._swapped():
            return self._parallel[0].full_state_dict()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        destination.update({f"{prefix}{name}": value for name, value in self.full_state_dict().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        (parallel,) = self._parallel
        with self._swapped():
            parallel.load_full_state_dict({name.removeprefix(prefix): value for name, value in state_dict.items()})
            values = [*parallel.parameters(), *parallel.buffers()]
            for copy, value in zip([*self.parameters(), *self.buffers()], values, strict=True):
                copy.data.copy_(value)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Follow a change of plan: copy the new shards, and set them from the ``full_state_dict()`` before it."""
        self._parameters.clear()
        self._buffers.clear()
        self._copy()
        self._load_from_state_dict(state, "")

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Inside, the split model has the values of the copies."""
        (parallel,) = self._parallel
        parallel.publish()
        tensors = [*parallel.parameters(), *parallel.buffers()]
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            self._set(tensors, [*self.parameters(), *self.buffers()])
            yield
        finally:
            self._set(tensors, before)

    @torch.no_grad()
    def _set(self, tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        (parallel,) = self._parallel
        for tensor, value in zip(tensors, values, strict=True):
            local_of_rank(tensor).copy_(local_of_rank(value))
        for runtime in parallel.runtimes:
            runtime.updates.due = runtime.updates.is_needed
        parallel.publish()


class InferenceModel(nn.Module):
    """Called like the model, or with a batch, alike on every rank; returns the model's outputs, without gradients."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel = parallel
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; see ``ParallelModel.outputs``."""
        return self.parallel.outputs(*args, **kwargs)
