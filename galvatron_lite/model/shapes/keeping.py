"""Which tensors of a layer's calls are kept from forward to backward, by what is recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from galvatron_lite.model.graph import Operator, OperatorClass, TensorSplit
from galvatron_lite.model.kernels import Selective
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value

Record = tuple[ShapeCall, Operator]
"""A call and what it costs."""


def split_of(values: Iterable[Value]) -> TensorSplit:
    """Bytes of different storages, by how tensor parallelism divides them."""
    widest: dict[int, Value] = {}
    for value in values:
        if value.key not in widest or value.part > widest[value.key].part:
            widest[value.key] = value
    sums = [0, 0, 0]
    for value in widest.values():
        sums[value.part] += value.held
    return TensorSplit(*sums)


def saved_by(calls: Iterable[ShapeCall]) -> list[Value]:
    """What autograd keeps of some calls."""
    return [value for call in calls for value in call.saved]


def selected(records: Sequence[Record], inputs: Sequence[Value], meaning: Selective) -> list[Value]:
    """What selective recomputation keeps, by what it means (see ``Selective``)."""
    if meaning == "attention":
        entering = [value for call, _ in records if call.core for value in call.inputs]
        made = {call.output.key for call, _ in records if call.core}
        outside = saved_by(call for call, _ in records if not call.core)
        return [*outside, *(value for value in entering if value.key not in made)]
    if meaning == "norms":
        cheap = {records[index][0].output.key for index in _norms_and_activations(records)}
        return [value for value in saved_by(call for call, _ in records) if value.key not in cheap]
    dropped = _every_second(records) if meaning == "alternate" else set()
    anchors = [value for index, (call, _) in enumerate(records) if index not in dropped for value in call.anchor]
    return [*inputs, *anchors]


def overwrites_anchors(records: Sequence[Record]) -> bool:
    """Whether some call writes its output over what a matmul, a convolution or attention before it gave."""
    anchors: set[int] = set()
    for call, _ in records:
        if call.output.key in anchors:
            return True
        anchors |= {value.key for value in call.anchor}
    return False


def runs_again(records: Sequence[Record], meaning: Selective) -> set[int]:
    """Indices of the calls that selective recomputation runs again."""
    if meaning == "attention":
        return {index for index, (call, _) in enumerate(records) if call.core}
    if meaning == "norms":
        return _norms_and_activations(records)
    memory = {index for index, (call, _) in enumerate(records) if not call.anchor}
    return memory | (_every_second(records) if meaning == "alternate" else set())


def _norms_and_activations(records: Sequence[Record]) -> set[int]:
    """Indices of normalisations and activations (with a gated MLP's product) of which the sources are kept."""
    return {
        index for index, (call, operator) in enumerate(records)
        if call.fusible and operator.name.rsplit(".")[-1].strip("12345").endswith(("norm", "act", "product"))
    }  # fmt: skip


def _every_second(records: Sequence[Record]) -> set[int]:
    """Indices of the second, fourth, ... matmul with weights (torchtitan's ``_apply_ac_to_transformer_block``)."""
    matmuls = [i for i, (_, op) in enumerate(records) if op.kind is OperatorClass.MATMUL and op.weight_bytes]
    return set(matmuls[1::2])


def excess(live: TensorSplit, kept: TensorSplit) -> TensorSplit:
    """What is live beyond ``kept``, no part below zero, the parts adding up to the difference of the totals."""
    parts = [live.tensor - kept.tensor, live.sequence - kept.sequence, live.whole - kept.whole]
    debt = -sum(part for part in parts if part < 0)
    left = [max(part, 0) for part in parts]
    for index in sorted(range(3), key=lambda i: -left[i]):
        paid = min(debt, left[index])
        left[index] -= paid
        debt -= paid
    return TensorSplit(*left)


def whole_tokens(split: TensorSplit, limit: int | None = None) -> TensorSplit:
    """The same where no tokens are shared, or no more than ``limit`` bytes of them are not."""
    changed = split.sequence if limit is None else min(split.sequence, limit)
    return TensorSplit(tensor=split.tensor, sequence=split.sequence - changed, whole=split.whole + changed)


def share_of(value: Value) -> Value:
    """The value's share under sequence parallelism."""
    return replace(value, part=Division.SEQUENCE)
