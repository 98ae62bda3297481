"""What has no handler: the picture is gathered, and the function runs on the whole, on every rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.calls import in_place
from galvatron_lite.parallelism.cuts.functions import gather_cuts
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, cut_tensors, whole_shape

FLAT = 4
"""Dims of pictures without planes."""


def on_whole(call: Call) -> Any:
    """Gather every cut tensor among the arguments and call the function with what is whole; warn once a place.

    What the function returns is whole on every rank; a view is one of the gathered copy.

    Raises:
        InputError: the function would write to a cut tensor.
    """
    refuse_writing(call)
    warn_gathered(call, next(cut_tensors((call.args, call.kwargs))))
    return call.function(*gathered(call.args), **gathered(call.kwargs))


def refuse_writing(call: Call) -> None:
    """Raises InputError where a call would write to a cut tensor: a gathered copy is not what it means."""
    target = call.args[0] if call.args and in_place(call) else call.kwargs.get("out")
    written = next(cut_tensors(target), None)
    if written is not None:
        remedy = "Write what returns a new tensor instead (x = x.add(y) for x.add_(y), torch.where, torch.cat), or "
        raise InputError(
            f"{call.name} of a split {written.rules.what}", _place(_caller()), f"{remedy}{keep_whole(written)}"
        )


def gathered(value: Any) -> Any:
    """A nest of tuples, lists and mappings with whole tensors in place of cut ones; autograd follows."""
    if isinstance(value, CutTensor):
        return gather_cuts(value)
    if isinstance(value, Mapping):
        return {name: gathered(one) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)([gathered(one) for one in value])
    return value


def warn_gathered(call: Call, picture: CutTensor) -> None:
    """Say, once a place in the user's code, that a function gathers the picture; the first rank of the picture does."""
    if any(cut.line.rank for cut in picture.cuts):
        return
    frame = _caller()
    what = picture.rules.what
    why = call.because or f"has no rule for split {what}s"
    message = (
        f"torch.{call.name} {why}: in {_place(frame)} the whole {what} is gathered on every "
        f"rank, and what follows is computed by all of them. If that costs too much, {keep_whole(picture)}"
    )
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry
    )


def keep_whole(picture: CutTensor) -> str:
    """How to plan so that a layer sees whole pictures: without the degrees that may have cut this one."""
    flat = len(whole_shape(picture)) == FLAT
    names = " ".join(f"--fix LAYER.{name}=1" for name in picture.rules.pins if not (flat and name == "depth"))
    return f"keep its layer whole: plan with {names} (LAYER: its name in the plan)."


def _caller() -> FrameType:
    """The innermost frame that is neither torch's nor this package's; the outermost one where there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame):
        frame = frame.f_back
    return frame


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "galvatron_lite")


def _place(frame: FrameType) -> str:
    """Module, file and line of the user's code."""
    module = frame.f_locals.get("self")
    name = f"{type(module).__name__}, " if isinstance(module, nn.Module) else ""
    return f"{name}{frame.f_code.co_filename}:{frame.f_lineno}"
