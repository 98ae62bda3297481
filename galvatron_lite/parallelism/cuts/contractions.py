"""Products that sum over dims: ``linear``, ``matmul``, ``einsum``, and attention.

Dims are named as in Einstein's convention. A dim that is cut in one operand is cut alike in all that have it. What
is summed over a cut dim is a part of the sum on every rank, and the line adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import at, brought, first_cuts, moved
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import sum_over
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    Cut,
    Cuts,
    CutTensor,
    Handler,
    cut_like,
    cuts_of,
    local_of,
    shares_only,
    whole_shape,
)

Labels = Sequence[str]
"""A letter a dim, of each operand."""


def contract(function: Callable[..., Any], operands: Sequence[Tensor], labels: Labels, result: str, call: Call) -> Any:
    """A product of operands whose dims bear these letters, on shares.

    Args:
        function: makes it of the (local) operands.
        operands: plain and cut ones.
        labels: of each operand.
        result: of what it returns.
        call: what is done, for its rules.
    """
    cuts = _cuts_by_letter(operands, labels)
    if any(_extents(operands, labels, letter) - {cut.extent} for letter, cut in cuts.items()):
        return on_whole(call)
    with shares_only():
        shares = [
            brought(one, _named(letters, cuts), len(letters)) for one, letters in zip(operands, labels, strict=True)
        ]
        made = sum_over(function(*shares), [cut.line for letter, cut in cuts.items() if letter not in result])
    return cut_like(made, _named(result, cuts), call.rules)


def _cuts_by_letter(operands: Sequence[Tensor], labels: Labels) -> dict[str, Cut]:
    letters = sorted(set("".join(labels)))
    found = first_cuts(
        [moved(cut, letters.index(named[cut.dim])) for cut in cuts_of(one)]
        for one, named in zip(operands, labels, strict=True)
    )
    return {letters[cut.dim]: cut for cut in found}


def _extents(operands: Sequence[Tensor], labels: Labels, letter: str) -> set[int]:
    return {
        whole_shape(one)[named.index(letter)] for one, named in zip(operands, labels, strict=True) if letter in named
    }


def _named(letters: str, cuts: Mapping[str, Cut]) -> Cuts:
    """Cuts of a tensor whose dims bear these letters."""
    return tuple(moved(cuts[letter], dim) for dim, letter in enumerate(letters) if letter in cuts)


def _matmul_labels(left: int, right: int) -> tuple[str, str, str]:
    """Letters of the operands and the result of ``matmul`` of tensors with so many dims."""
    rows, inner, columns = "rkc"
    free = ascii_letters.translate(str.maketrans("", "", "rkc"))
    before, behind = max(left - 2, 0), max(right - 2, 0)
    batch = free[: max(before, behind)]
    one = batch[len(batch) - before :] + (rows + inner if left > 1 else inner)
    other = batch[len(batch) - behind :] + (inner + columns if right > 1 else inner)
    return one, other, batch + rows * (left > 1) + columns * (right > 1)


def _matmul(call: Call) -> Any:
    call = fronted(call)
    left, right = call.args[0], argument(call, 1, "other", argument(call, 1, "mat2"))
    if call.name == "__rmatmul__":
        left, right = right, left
    one, other, result = _matmul_labels(len(whole_shape(left)), len(whole_shape(right)))
    return contract(lambda a, b: a @ b, [left, right], [one, other], result, call)


def _linear(call: Call) -> Any:
    """``linear``: the bias joins where the outputs are whole sums."""
    call = fronted(call)
    tensor, weight, bias = call.args[0], argument(call, 1, "weight"), argument(call, 2, "bias")
    inner = ascii_letters[: len(whole_shape(tensor)) - 1]
    if len(whole_shape(weight)) != 2:
        return on_whole(call)
    plain = not cuts_of(weight) and (bias is None or not cuts_of(bias))
    if plain and isinstance(tensor, CutTensor) and at(tensor.cuts, len(inner)) is None:
        return cut_like(call.function(local_of(tensor), weight, bias), tensor.cuts, call.rules)
    product = contract(call.function, [tensor, weight], [f"{inner}Y", "ZY"], f"{inner}Z", call)
    return product if bias is None else product + bias


def _einsum(call: Call) -> Any:
    """``einsum`` with letters for all dims."""
    equation, operands = call.args[0], call.args[1:]
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or "." in equation:
        return on_whole(call)
    left, arrow, result = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(one)) < len(one) for one in labels):
        return on_whole(call)
    return contract(lambda *shares: call.function(f"{left}->{result}", *shares), operands, labels, result, call)


def _attention(call: Call) -> Any:
    """``scaled_dot_product_attention``: every rank its own queries, with the keys and values of all."""
    call = fronted(call)
    query, key, value = (argument(call, number, name) for number, name in enumerate(("query", "key", "value")))
    more = {**dict(zip(_ATTENTION, call.args[3:], strict=False)), **call.kwargs}
    dims, mask = len(whole_shape(query)), more.get("attn_mask")
    cuts = tuple(cut for cut in cuts_of(query) if cut.dim < dims - 1)
    # where the pattern depends on the query's place, or on chance
    if not cuts or more.get("is_causal") or more.get("dropout_p") or more.get("enable_gqa"):
        return on_whole(call)
    samples = tuple(cut for cut in cuts if cut.dim < dims - 2)
    with shares_only():
        shares = [brought(query, cuts, dims), brought(key, samples, dims), brought(value, samples, dims)]
        if mask is not None:
            more["attn_mask"] = brought(mask, cuts, dims)
        result = call.function(*shares, **{name: one for name, one in more.items() if name not in _OPERANDS})
    return cut_like(result, cuts, call.rules)


_OPERANDS = ("query", "key", "value")
_ATTENTION = ("attn_mask", "dropout_p", "is_causal")

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_matmul, "matmul __matmul__ __rmatmul__ bmm mm mv"),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}
