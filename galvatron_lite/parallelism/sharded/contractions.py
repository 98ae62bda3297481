"""Products that sum over dims: ``linear``, ``matmul``, ``einsum``, and attention.

Dims are named as in Einstein's convention. A dim that is sharded in one operand is sharded alike in all that have it.
Over a sharded dim that is summed every rank has a part of the sum, and the group adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor

from galvatron_lite.parallelism.sharded.calls import (
    align,
    argument,
    first_specs,
    handled_by,
    input_first,
    on_full,
    spec_at,
    wrap_like,
)
from galvatron_lite.parallelism.sharded.collectives import sum_over
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)


def _contract(
    call: Call, function: Callable[..., Any], operands: Sequence[Tensor], labels: Sequence[str], result: str
) -> Any:
    """A product on shards, of operands whose dims bear these letters; ``result``: the letters of what it returns."""
    letters = sorted(set("".join(labels)))
    pairs = list(zip(operands, labels, strict=True))
    specs = {
        letters[spec.dim]: spec
        for spec in first_specs(
            [spec.at_dim(letters.index(named[spec.dim])) for spec in specs_of(one)] for one, named in pairs
        )
    }
    if any(
        global_shape(one)[named.index(letter)] != spec.extent
        for letter, spec in specs.items()
        for one, named in pairs
        if letter in named
    ):
        return on_full(call)
    with locals_only():
        local = function(*(align(one, _specs_of_letters(named, specs), len(named)) for one, named in pairs))
        total = sum_over(local, [spec.group for letter, spec in specs.items() if letter not in result])
    return wrap_locals(total, _specs_of_letters(result, specs), call.rules)


def _specs_of_letters(letters: str, specs: Mapping[str, ShardSpec]) -> ShardSpecs:
    return tuple(specs[letter].at_dim(dim) for dim, letter in enumerate(letters) if letter in specs)


def _matmul(call: Call) -> Any:
    call = input_first(call)
    left, right = call.args[0], argument(call, 1, "other", argument(call, 1, "mat2"))
    if call.name == "__rmatmul__":
        left, right = right, left
    dims = len(global_shape(left)), len(global_shape(right))
    batch = ascii_letters[: max(*dims, 2) - 2]
    rows, columns = "Y" * (dims[0] > 1), "Z" * (dims[1] > 1)
    labels = (
        batch[len(batch) - max(dims[0] - 2, 0) :] + rows + "X",
        batch[len(batch) - max(dims[1] - 2, 0) :] + "X" + columns,
    )
    return _contract(call, lambda a, b: a @ b, [left, right], labels, batch + rows + columns)


def _linear(call: Call) -> Any:
    """``linear``: the bias joins where the outputs are complete sums."""
    call = input_first(call)
    tensor, weight, bias = call.args[0], argument(call, 1, "weight"), argument(call, 2, "bias")
    inner = ascii_letters[: len(global_shape(tensor)) - 1]
    if len(global_shape(weight)) != 2:
        return on_full(call)
    plain = not specs_of(weight) and (bias is None or not specs_of(bias))
    if plain and isinstance(tensor, ShardedTensor) and spec_at(tensor.specs, len(inner)) is None:
        return wrap_like(call, call.function(to_local(tensor), weight, bias), tensor)
    product = _contract(call, call.function, [tensor, weight], [f"{inner}Y", "ZY"], f"{inner}Z")
    return product if bias is None else product + bias


def _einsum(call: Call) -> Any:
    """``einsum`` with letters for all dims."""
    equation, operands = call.args[0], call.args[1:]
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or "." in equation:
        return on_full(call)
    left, arrow, result = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(one)) < len(one) for one in labels):
        return on_full(call)
    return _contract(call, lambda *shards: call.function(f"{left}->{result}", *shards), operands, labels, result)


def _attention(call: Call) -> Any:
    """``scaled_dot_product_attention``: every rank its queries, with the keys and values of all."""
    call = input_first(call)
    query, key, value = (argument(call, number, name) for number, name in enumerate(_OPERANDS))
    options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), call.args[3:], strict=False)), **call.kwargs}
    dims, mask = len(global_shape(query)), options.get("attn_mask")
    specs = tuple(spec for spec in specs_of(query) if spec.dim < dims - 1)
    # where the pattern depends on the query's place, or on chance
    if not specs or options.get("is_causal") or options.get("dropout_p") or options.get("enable_gqa"):
        return on_full(call)
    samples = tuple(spec for spec in specs if spec.dim < dims - 2)
    with locals_only():
        shards = [align(query, specs, dims), align(key, samples, dims), align(value, samples, dims)]
        if mask is not None:
            options["attn_mask"] = align(mask, specs, dims)
        result = call.function(*shards, **{name: one for name, one in options.items() if name not in _OPERANDS})
    return wrap_locals(result, specs, call.rules)


_OPERANDS = ("query", "key", "value")

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_matmul, "matmul __matmul__ __rmatmul__ bmm mm mv"),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}
