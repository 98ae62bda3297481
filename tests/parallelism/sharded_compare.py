"""One function on a whole picture, and on cut ones by threads: results and gradients of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor, leave, sum_over
from galvatron_lite.parallelism.sharded.tensor import Call, Handler, Rules, ShardSpec, global_shape
from tests.parallelism.thread_group import Meeting, ThreadGroup, run_threads

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
