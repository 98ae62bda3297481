"""Copies of a model without storages, to run for shapes only; and preparation of a model for training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint

from galvatron_lite.errors import LOG, TraceError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's type of every precision a model can be traced at."""

LOCAL_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
BATCH_NORMS = (*LOCAL_BATCH_NORMS, nn.SyncBatchNorm)
"""Modules with statistics over samples."""


def check_model(model: object) -> None:
    """Refuse objects that are no modules, and modules that are compiled, scripted, lazy or wrapped for many ranks, or
    whose parameters share memory with other tensors."""
    if not isinstance(model, nn.Module):
        remedy = "Give an nn.Module: an instance, not its class."
    elif compiled := [path for path, one in model.named_modules() if "_orig_mod" in one._modules]:
        # torch.compile's, whose class takes more than a second to import
        remedy = "Give the model before torch.compile; compile=True compiles its blocks under every plan."
        raise TraceError("model", f"{compiled[0] or type(model).__name__}, made by torch.compile", remedy)
    elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        remedy = "Give the model inside, model.module: the plan shares it out."
    elif scripted := [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        raise TraceError("model", f"{scripted[0] or 'it'}, made by torch.jit", "Give the module that it was made of.")
    elif lazy := [name for name, one in (*model.named_parameters(), *model.named_buffers()) if is_lazy(one)]:
        raise TraceError("model", f"{lazy[0]}, whose shape is not known yet", "Run the model once on a batch before.")
    elif shared := _sharing_memory(model):
        remedy = (
            "They share memory, which they would not once the model is split or moved to a device. Tie them by one "
            "nn.Parameter in both places, take views in forward, or clone one of them."
        )
        raise TraceError("model", " and ".join(shared), remedy)
    else:
        return
    raise TraceError("model", getattr(model, "__name__", type(model).__name__), remedy)


def _sharing_memory(model: nn.Module) -> tuple[str, str] | None:
    """Names of a parameter and of another tensor of the model in the same memory: a parameter, a buffer, or a view in
    an attribute."""
    views = (
        (f"{path}.{name}".lstrip("."), one)
        for path, module in model.named_modules()
        for name, one in vars(module).items()
        if isinstance(one, Tensor) and one._base is not None and one.requires_grad
    )
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, one in (*model.named_parameters(), *model.named_buffers(), *views):
        if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided and not one.is_meta and one.numel():
            storages.setdefault(one.untyped_storage().data_ptr(), []).append((name, one))
    for tensors in storages.values():
        if not any(isinstance(one, nn.Parameter) for _, one in tensors):
            continue
        spans = sorted((*_bytes_of(one), place) for place, (_, one) in enumerate(tensors))
        for (_, end, place), (start, _, other) in pairwise(spans):
            if start < end:
                return tensors[min(place, other)][0], tensors[max(place, other)][0]
    return None


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(tensor.storage_offset()) * tensor.element_size(), int(last + 1) * tensor.element_size()


def meta_copy(model: nn.Module, precision: str | None = None) -> nn.Module:
    """Copy a model to the meta device, in training mode, without reading its storages; tied parameters stay tied.

    The copy runs as the model does in training; see ``prepare_for_training``.
    """
    dtype = None if precision is None else dtype_of(precision)
    _check_hooks(model)
    try:
        twin = copy_with(model, partial(_meta_tensor, dtype=dtype))
    except Exception as cause:
        raise TraceError("model", type(model).__name__, f"It must allow copy.deepcopy: {cause}") from cause
    for module in twin.modules():
        _simplify(module)
    prepare_for_training(twin)
    return twin.train()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def copy_with(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model with other tensors, without reading its own: ``make`` returns one for each parameter, buffer and
    other tensor that a module holds, also in lists and dicts. Parameters stay parameters, and shared tensors stay
    shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors_in(vars(module)):
            if id(tensor) not in memo:
                twin = make(tensor)
                wrapped = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
                memo[id(tensor)] = wrapped
    return copy.deepcopy(model, memo)


def _check_hooks(model: nn.Module) -> None:
    """Refuse weights computed by old-style hooks: torch cannot copy them once they have run."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    old = next((type(hook) for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))), None)
    if old is not None:
        name = old.__module__
        remedy = f"Use {name.replace('utils.', 'utils.parametrizations.')}, whose modules can be copied."
        raise TraceError("model", name, remedy)


def _simplify(module: nn.Module) -> None:
    """Switch off code that needs data or other ranks."""
    experts: dict[str, str | None] = getattr(module, "get_experts_implementation", dict)()
    if set(experts.values()) & {"eager", "batched_mm"}:
        # loops over experts that tokens chose need data; what is planned for takes them together
        with suppress(ValueError):  # a model without experts says that it has no choice
            module.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    if isinstance(module, BATCH_NORMS) and module.momentum is None:
        # a running mean: torch would read how many batches there were; what runs is the same with any momentum
        module.momentum = 0.1
    normalise_alone(module)


def normalise_alone(module: nn.Module) -> None:
    """Let a ``SyncBatchNorm`` take statistics of this rank: its forward needs a GPU and the other ranks. Other modules
    do not change."""
    if isinstance(module, nn.SyncBatchNorm):
        module.forward = partial(_alone, module)  # type: ignore[method-assign]


def _alone(norm: nn.SyncBatchNorm, tensor: Tensor) -> Tensor:
    statistics, training = (norm.running_mean, norm.running_var), norm.training or norm.running_mean is None
    return batch_norm(tensor, *statistics, norm.weight, norm.bias, training, norm.momentum or 0.0, norm.eps)


def _meta_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device="meta")


def dtype_of(precision: str) -> torch.dtype:
    """Torch's type of a precision."""
    if precision not in DTYPES:
        raise TraceError("precision", precision, f"Choose one of {', '.join(DTYPES)}.")
    return DTYPES[precision]


def precision_of(model: nn.Module) -> str:
    """Return the precision of most floating parameters; ``fp32`` for a model without any."""
    items: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            items[parameter.dtype] = items.get(parameter.dtype, 0) + parameter.numel()
    most = max(items, key=lambda dtype: items[dtype], default=torch.float32)
    return next((name for name, dtype in DTYPES.items() if dtype is most), "fp32")


def prepare_for_training(model: nn.Module) -> None:
    """Change a model in place so that it trains in the same way under every plan.

    - While gradients are wanted, every module whose forward takes ``use_cache`` is called with ``use_cache=False``,
      whatever its config, its caller or the batch says: a cache of keys and values has no use in training, and a layer
      that is recomputed would append to it twice. In evaluation mode and without gradients nothing changes.
    - The gradient checkpointing of transformers is switched off: the plan chooses what is recomputed.
    - Embeddings with ``sparse=True`` get dense gradients, which can be summed over ranks and sharded.
    """
    for module in model.modules():
        if _cache_place(type(module).forward) is not None and _without_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)
        if vars(module).get("gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            note("gradient checkpointing of the model is switched off: the plan chooses what is recomputed")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.sparse = False
            note(
                "embeddings with sparse=True get dense gradients; SGD, Adagrad and Adam take them, SparseAdam does not"
            )


@cache
def _cache_place(forward: Callable[..., Any]) -> int | None:
    """The index of ``use_cache`` among the arguments of a class's forward, without ``self``."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index("use_cache") if "use_cache" in names else None


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    place = _cache_place(type(module).forward)
    if place is None or not (module.training and torch.is_grad_enabled()):
        return None
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


@cache
def note(line: str) -> None:
    """Log a line once, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        LOG.info(f"note: {line}")


_LEFT_TO_PLAN: ContextVar[bool] = ContextVar("left_to_plan", default=False)
_reentrant = checkpoint.CheckpointFunction.apply
_without_reentry = checkpoint._checkpoint_without_reentrant_generator


@contextmanager
def left_to_the_plan(decides: bool = True) -> Iterator[None]:
    """Inside, checkpoints of the model's code do not recompute; with False they do."""
    token = _LEFT_TO_PLAN.set(decides)
    try:
        yield
    finally:
        _LEFT_TO_PLAN.reset(token)


def _apply(function: Any, preserve: bool, *args: Any) -> Any:
    if not _LEFT_TO_PLAN.get():
        return _reentrant(function, preserve, *args)  # type: ignore[no-untyped-call]
    note("the model's own torch.utils.checkpoint is left out: the plan chooses what is recomputed")
    return function(*args)


def _generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    if not _LEFT_TO_PLAN.get():
        yield from _without_reentry(*args, **kwargs)
        return
    note("the model's own torch.utils.checkpoint is left out: the plan chooses what is recomputed")
    yield


checkpoint.CheckpointFunction.apply = _apply  # type: ignore[method-assign]
checkpoint._checkpoint_without_reentrant_generator = _generator
