"""Pools to given extents of pictures whose pixels ranks share.

Along a side that is cut each of these is one of three things. To 1: every rank pools its share, and the results are
summed, or gathered and pooled again; they are whole on every rank. To an extent that divides the picture's, its own
too: a pool of equal windows. Where windows differ, or there are fewer of them than ranks, the picture is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional

from galvatron_lite.parallelism.cuts.functions import gather_cuts, sum_over
from galvatron_lite.parallelism.cuts.grid import PIXELS
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Cuts, Handler, cut_tensor, cuts_of, local_of, whole_shape
from galvatron_lite.parallelism.spatial.layers import cuts_after
from galvatron_lite.parallelism.spatial.pooling import can_pool, max_of_windows, mean_of_windows, pool_of, sides_of
from galvatron_lite.parallelism.spatial.windows import SideWindow, refusal

UNEQUAL = "gathers pictures of this size by design, as its windows are unlike or fewer than ranks"
"""Said where what comes out does not divide the picture, or leaves a rank without a window."""
Extents = int | None | Sequence[int | None]
"""What comes out: one number for all sides or one a side; None: the picture's own."""


def adaptive_avg_pool(call: Call) -> Any:
    """adaptive_avg_pool1d, 2d and 3d of a cut picture: whole along sides that come to 1, cut along the others.

    Raises:
        InputError: the picture has no dim of samples.
    """
    return _adaptive(call, _mean_of_windows, _mean)


def adaptive_max_pool(call: Call) -> Any:
    """adaptive_max_pool1d, 2d and 3d of a cut picture, as ``adaptive_avg_pool``; with places the picture is gathered.

    Raises:
        InputError: the picture has no dim of samples.
    """
    return _adaptive(call, max_of_windows, _largest)


def _adaptive(
    call: Call,
    of_windows: Callable[[Tensor, str, Sequence[SideWindow]], Tensor],
    of_all: Callable[[Call, Tensor, Cuts, tuple[int, ...]], Tensor],
) -> Any:
    picture, targets, places = _arguments(sides_of(call), *call.args, **call.kwargs)
    if _gives_places(call) or places or not can_pool(picture, [SideWindow()] * len(targets), call):
        return call.rules.otherwise(call)
    cuts = cuts_of(picture)
    reduced = tuple(cut for cut in cuts if targets[cut.dim - PIXELS] == 1)
    left = tuple(cut for cut in cuts if cut not in reduced)
    windows = _windows(left, targets)
    if windows is None:
        return call.rules.otherwise(call._replace(because=UNEQUAL))
    pooled = any(window.kernel > 1 for window in windows)
    share = of_windows(picture, call.name.removeprefix("adaptive_"), windows) if pooled else local_of(picture)
    left = cuts_after(left, windows)
    lengths = {cut.dim: cut.length for cut in left}
    sizes = tuple(lengths.get(dim, target) for dim, target in enumerate(targets, PIXELS))
    return cut_tensor(of_all(call, share, reduced, sizes), left, call.rules)


def _gives_places(call: Call) -> bool:
    """Whether this is torch's own function below the one of ``torch.nn.functional``: that gives places too."""
    return "max" in call.name and call.function.__module__ != functional.__name__


def _arguments(
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    output_size: Extents,
    return_indices: bool = False,
) -> tuple[Tensor, tuple[int, ...], bool]:
    given = (output_size,) * sides if isinstance(output_size, int) or output_size is None else tuple(output_size)
    given = given * sides if len(given) == 1 else given
    extents = whole_shape(input)[-sides:]
    return input, tuple(have if n is None else n for n, have in zip(given, extents, strict=True)), return_indices


def _windows(cuts: Cuts, targets: Sequence[int]) -> tuple[SideWindow, ...] | None:
    """Equal windows along the sides that are cut, one a side of the picture; None where there are none."""
    windows = [SideWindow()] * len(targets)
    for cut in cuts:
        target = targets[cut.dim - PIXELS]
        size = cut.extent // max(target, 1)
        windows[cut.dim - PIXELS] = SideWindow(size, max(size, 1))
        if size * target != cut.extent or refusal(windows[cut.dim - PIXELS], cut.extent, cut.line.size):
            return None
    return tuple(windows)


def _mean_of_windows(picture: Tensor, name: str, windows: Sequence[SideWindow]) -> Tensor:
    return mean_of_windows(local_of(picture), pool_of(picture, name, windows))


def _mean(call: Call, share: Tensor, reduced: Cuts, sizes: tuple[int, ...]) -> Tensor:
    """The mean over sides that come to 1 on all ranks, of shares that may differ in length."""
    made: Tensor = getattr(functional, call.name)(share, sizes)
    if not reduced:
        return made
    weight = prod(cut.length / cut.extent for cut in reduced)
    return sum_over(made * weight, [cut.line for cut in reduced])


def _largest(call: Call, share: Tensor, reduced: Cuts, sizes: tuple[int, ...]) -> Tensor:
    """The largest over sides that come to 1, of all ranks' largest."""
    function: Callable[..., Tensor] = getattr(functional, call.name)
    made = function(share, sizes)
    for cut in reduced:
        made = function(gather_cuts(cut_tensor(made, [Cut(cut.dim, cut.line.size, cut.line)], call.rules)), sizes)
    return made


_POOLS: Mapping[str, Handler] = {"adaptive_avg_pool": adaptive_avg_pool, "adaptive_max_pool": adaptive_max_pool}

HANDLERS: Mapping[str, Handler] = {
    f"{name}{sides}d": handler for name, handler in _POOLS.items() for sides in (1, 2, 3)
}
"""Pools to given extents."""
