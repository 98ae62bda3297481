"""Functions on whole tensors, and on cut ones by threads: results and gradients of everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor, gathered, leave, sum_over
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    Rules,
    ShardedTensor,
    ShardSpec,
    global_shape,
    specs_of,
)
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement
from tests.parallelism.thread_group import Meeting, ThreadGroup, grid_groups, run_threads


def gather_running(layer: nn.Module, line: AxisGroup) -> None:
    """Make running statistics right in all channels; all ranks of the line call it."""
    for module in layer.modules():
        with torch.no_grad():
            for buffer in (getattr(module, "running_mean", None), getattr(module, "running_var", None)):
                if isinstance(buffer, Tensor):
                    cut = ShardSpec(0, buffer.shape[0], line)
                    own = buffer.narrow(0, cut.start, cut.length).contiguous()
                    buffer.copy_(gather_shares(own, line, cut.extent, 0))


def gather_shares(local: Tensor, group: TensorGroup, extent: int, dim: int) -> Tensor:
    """The whole tensor from shares along a dim."""
    return gathered(local, ShardSpec(dim % local.dim(), extent, group))  # type: ignore[arg-type]


def gather_full(local: Tensor, shard: ParameterShard, group: TensorGroup) -> Tensor:
    """The whole tensor from every device's part; all devices of the group must call it.

    Replicated and partial tensors come back as they are: sum a partial gradient over the group first.
    """
    if shard.placement is not Placement.SHARDED:
        return local
    pieces = torch.split(local, [length for _, length in shard.ranges], shard.dim)
    gathered = [gather_shares(piece, group, n, shard.dim) for piece, n in zip(pieces, shard.parts, strict=True)]
    return torch.cat(gathered, shard.dim)


Parameters = dict[str, Tensor]
Function = Callable[[Tensor, Parameters], Tensor]


@dataclass
class Outcome:
    """What a function gave: its result, the picture's gradient, the parameters' and what became of them."""

    result: Tensor
    picture: Tensor
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]
    sent: dict[int, int]
    sent_bytes: int = 0


def unexpected(call: Call) -> object:
    raise AssertionError(f"no rule for {call.name}")


SHAPES: Mapping[str, Handler] = {
    "dim": lambda call: len(global_shape(call.args[0])),
    "shape": lambda call: torch.Size(global_shape(call.args[0])),
    "size": lambda call: torch.Size(global_shape(call.args[0]))[call.args[1]],
}


def rules(handlers: Mapping[str, Handler]) -> Rules:
    """These, and what tells a picture's shape."""
    return Rules({**SHAPES, **handlers}, unexpected)


def alone(function: Function, picture: Tensor, parameters: Parameters, weight: Tensor) -> Outcome:
    leaf, mine = picture.clone().requires_grad_(), _copies(parameters)
    result = function(leaf, mine)
    (result * weight).sum().backward()
    assert leaf.grad is not None
    return Outcome(result.detach(), leaf.grad, _gradients(mine), _values(mine), {})


def together(
    function: Function, picture: Tensor, parameters: Parameters, weight: Tensor, degrees: dict[int, int], how: Rules
) -> list[Outcome]:
    """By ranks of a grid of ``degrees``: how many share which dim."""

    def work(group: ThreadGroup) -> Outcome:
        lines = lines_of(group, degrees)
        cuts = tuple(ShardSpec(dim, picture.shape[dim], line) for dim, line in lines.items())
        leaf, mine = picture.clone().requires_grad_(), _copies(parameters)
        cut = distribute(leaf, cuts, how)
        result = function(cut, mine)
        result = leave(full_tensor(result), [group])
        (result * weight).sum().backward()
        gradients = {name: sum_over(one, [group]) for name, one in _gradients(mine).items()}
        sent = {dim: sum(line.calls.values()) for dim, line in lines.items()}
        sent_bytes = sum(line.sent_bytes for line in lines.values())
        return Outcome(result.detach(), sum_over(leaf.grad, [group]), gradients, _values(mine), sent, sent_bytes)

    return run_threads(prod(degrees.values()), work)


def assert_equal(ours: Outcome, theirs: Outcome, tolerance: float = 1e-10) -> None:
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(ours.result, theirs.result, **near)
    torch.testing.assert_close(ours.picture, theirs.picture, **near)
    torch.testing.assert_close(ours.gradients, theirs.gradients, **near)
    torch.testing.assert_close(ours.after, theirs.after, **near)


def lines_of(group: ThreadGroup, degrees: dict[int, int]) -> dict[int, ThreadGroup]:
    """The line of this rank along each dim of a grid of all threads, the last dim's innermost."""
    lines, rest = {}, group.rank
    places = {}
    for dim, degree in reversed(degrees.items()):
        rest, places[dim] = divmod(rest, degree)
    for dim, degree in degrees.items():
        mates = tuple(place for other, place in sorted(places.items()) if other != dim)
        shown = group.meeting.show(group.rank, (mates, Meeting(degree)))
        lines[dim] = ThreadGroup(degree, places[dim], next(meeting for key, meeting in shown if key == mates))
    return lines


def _copies(parameters: Parameters) -> Parameters:
    return {name: one.detach().clone().requires_grad_(one.requires_grad) for name, one in parameters.items()}


def _gradients(parameters: Parameters) -> dict[str, Tensor]:
    return {name: one.grad for name, one in parameters.items() if one.grad is not None}


def _values(parameters: Parameters) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in parameters.items()}


Lines = tuple[int, ...]
"""Which dims of a tensor are cut: by the first and the second side of the grid."""


def results_of(value: Any) -> list[Tensor]:
    """The tensors in what a function returns."""
    if isinstance(value, Tensor):
        return [value]
    return [one for item in value for one in results_of(item)] if isinstance(value, (tuple, list)) else []


def in_numbers(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def weights(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(tuple(global_shape(one)), generator=generator, dtype=torch.float64) for one in results]


def train(function: Callable[..., Any], leaves: Sequence[Tensor], given: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Results, and gradients of leaves: of a sum of the results with fixed weights, shared by the ranks."""
    results = results_of(function(*given))
    full = [full_tensor(one) for one in results]
    # torch must agree with what the cut tensor says of its shape before it is gathered
    assert [tuple(one.shape) for one in results] == [tuple(one.shape) for one in full]
    loss = sum((in_numbers(one) * w).sum() for one, w in zip(full, weights(results), strict=True)) / ranks
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        loss.backward()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves if leaf.requires_grad]
    return [one.detach() for one in full] + [in_numbers(one) for one in grads]


def compare(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    cut: Sequence[Lines],
    degrees: Sequence[int],
    *,
    stays_cut: bool | None = None,
    gathers: bool | None = False,
    tolerance: float = 1e-10,
) -> None:
    """Check a function.

    Args:
        function: of the tensors; floating-point ones get gradients.
        tensors: whole.
        cut: of each tensor the dims that the sides of the grid cut; -1 for a side that does not.
        degrees: ranks of each side, one or two.
        stays_cut: whether every result must be cut (True) or whole (False); None: either.
        gathers: whether it must say that it gathers a picture; None: it may.
        tolerance: relative and absolute.
    """
    rows, columns = (*degrees, 1)[:2]

    def leaves() -> list[Tensor]:
        return [one.clone().requires_grad_(one.is_floating_point()) for one in tensors]

    def work(group: ThreadGroup) -> list[Tensor]:
        lines = grid_groups(group, rows, columns)
        held = leaves()
        given = [
            distribute(one.view_as(one), cuts_on(one, dims, lines[: len(degrees)]), PIXELS_RULES)
            for one, dims in zip(held, cut, strict=True)
        ]

        def checked(*args: Tensor) -> Any:
            result = function(*args)
            kinds = {isinstance(one, ShardedTensor) for one in results_of(result)}
            assert stays_cut is None or kinds == {stays_cut}
            return result

        return train(checked, held, given, rows * columns)

    alone = leaves()
    expected = train(function, alone, [one.view_as(one) for one in alone], 1)
    count = len(expected) - sum(one.requires_grad for one in alone)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        everyone = run_threads(rows * columns, work)
    assert gathers in (None, any("the whole picture is gathered" in str(one.message) for one in said))
    for found in everyone:
        for one, wanted in zip(found[:count], expected[:count], strict=True):
            assert one.dtype == wanted.dtype
            torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    for number in range(count, len(expected)):
        total = torch.stack([found[number] for found in everyone]).sum(0)
        torch.testing.assert_close(total, expected[number], rtol=tolerance, atol=tolerance)


def cuts_on(tensor: Tensor, dims: Lines, lines: Sequence[ThreadGroup]) -> tuple[ShardSpec, ...]:
    cuts = [ShardSpec(dim, tensor.shape[dim], line) for dim, line in zip(dims, lines, strict=False) if dim >= 0]
    return tuple(sorted(cuts, key=lambda one: one.dim))


def picture(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def is_cut(tensor: Tensor) -> bool:
    return bool(specs_of(tensor))


STRICT = Rules(PIXELS_RULES.handlers, unexpected)
"""Nothing is gathered because there is no handler for it."""

GRIDS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 4)]
Layer = Callable[..., Tensor]


def grid_of(group: ThreadGroup, rows: int, columns: int) -> tuple[ThreadGroup | None, ...]:
    down, along = grid_groups(group, rows, columns)
    return (None, down if rows > 1 else None, along if columns > 1 else None)


def on_whole(layer: Layer, picture: Tensor, parameters: Sequence[Tensor], seed: int) -> Outcome:
    weight = _direction(layer(picture, *parameters), seed)
    return alone(lambda x, p: layer(x, *p.values()), picture, _named(parameters), weight)


def shared(
    layer: Layer,
    picture: Tensor,
    parameters: Sequence[Tensor],
    grid: tuple[int, int],
    seed: int,
    rules: Rules = STRICT,
) -> list[Outcome]:
    """The same where ranks share rows and columns; gradients are summed over them."""
    degrees = {picture.dim() - 2 + side: degree for side, degree in enumerate(grid) if degree > 1}
    weight = _direction(layer(picture, *parameters), seed)
    return together(lambda x, p: layer(x, *p.values()), picture, _named(parameters), weight, degrees, rules)


def check_shared(
    layer: Layer, picture: Tensor, parameters: Sequence[Tensor], grid: tuple[int, int], seed: int = 0,
    rules: Rules = STRICT,
) -> None:  # fmt: skip
    """Check that a layer gives on shared pictures what it gives on the whole one."""
    wanted = on_whole(layer, picture, parameters, seed)
    for found in shared(layer, picture, parameters, grid, seed, rules):
        assert_equal(found, wanted)


def _named(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): one.clone().requires_grad_() for number, one in enumerate(parameters)}


def _direction(output: Tensor, seed: int) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def kept(run: Callable[[], Any]) -> list[Tensor]:
    """What autograd keeps of a forward pass."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return found
