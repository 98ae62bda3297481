"""Whether an optimizer may update parts of parameters: it steps on small tensors, and on their halves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.sharding import Owned

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SIZE = 256
"""Rows and columns of what is stepped on: halves are above the sizes below which optimizers treat tensors otherwise
(Adafactor's 128 rows, 8-bit states' 4096 items)."""
_COPIED = (bool, int, float, str, NoneType, FunctionType)
_STEPS = (1.0, -0.3, 2.0)
_RATE = 1e-2
_FAR = 1e-3
"""Of the largest update: rounding is far below, what depends on norms far above."""


def check_optimizer(
    optimizer: torch.optim.Optimizer, owned: Sequence[Owned], stage_devices: int, everywhere: bool, build: Build | None
) -> InputError | None:
    """Why an optimizer would not train as in one process; None where it does. Nothing of it is changed.

    Args:
        optimizer: over this rank's parameters.
        owned: this rank's parameters.
        stage_devices: ranks of the stage.
        everywhere: whether every parameter of the model has a part on this rank.
        build: makes such an optimizer of other parameter groups; its class and defaults are taken if not given.
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
            ways = [build] if build is not None else [_copied(optimizer), _built_again(optimizer)]
            reach = _reach(ways, options, dims, parameter.device, pieces=one is not None)
            if reach is not None:
                name = type(optimizer).__name__
                return InputError("optimizer", name, _remedy(reach, one.names[0] if one else None))
    return None


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


def _reach(ways: Sequence[Build], options: dict[str, Any], dims: int, device: torch.device, pieces: bool) -> str | None:
    """On what an element's update depends: ``tensor``, ``model``, or why it cannot be told; None: on itself."""
    for way in ways:
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                return _depends(way, options, dims, device, pieces)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return said


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
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        torch.optim.Optimizer.__init__(made, groups, dict(optimizer.defaults))
        for key, value in vars(optimizer).items():
            replaced = callable(getattr(type(optimizer), key, None))
            if key not in vars(made) and not replaced and isinstance(value, _COPIED):
                setattr(made, key, value)
        return made

    return build
