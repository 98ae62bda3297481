"""Values and calls of one layer, and figures of a sequence of calls: kept bytes, peaks, and what a compiler fuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding, TensorSplit
from galvatron_lite.model.kernels import Selective

FP32 = 4  # bytes of an fp32 item
INDEX = 8  # bytes of an index

_REPLICATION = {sharding: order for order, sharding in enumerate(Sharding)}
"""Shardings from the most to the least divided: a storage held in two ways counts as the less divided."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of one sample."""

    key: int  # of the storage; two values of one key are the same memory on one device
    items: int  # per sample
    item_bytes: int
    sharding: Sharding  # how tensor parallelism divides it
    grad: bool = True  # whether a gradient flows to it
    storage: int = 0  # bytes of the storage that the value is a view of; 0 if it is no view

    @property
    def bytes(self) -> int:
        """Bytes per sample that a kernel reads or writes, on one device that does all of it."""
        return self.items * self.item_bytes

    @property
    def held(self) -> int:
        """Bytes per sample of its storage."""
        return self.storage or self.bytes

    def view(self, items: int) -> Value:
        """Part of the tensor, in its storage."""
        return replace(self, items=items, storage=self.held)


@dataclass(frozen=True, slots=True)
class ShapeCall:
    """One operator call."""

    inputs: tuple[Value, ...]  # without parameters
    output: Value
    saved: tuple[Value, ...] = ()  # by autograd, for backward
    anchor: tuple[Value, ...] = ()  # outputs of matmuls and attention, which selective recomputation of operators keeps
    shares_gradient: bool = False  # whether the inputs' gradients are the output's gradient itself (addition)
    inplace: bool = False  # whether the input's gradient overwrites what is saved
    core: bool = False  # whether it belongs to the attention core (scores, softmax, dropout, context)
    fusible: bool = False  # whether a compiler fuses it with its neighbours (element-wise and row-wise calls)
    rebuilt: tuple[Value, ...] = ()  # what exists again during its backward (inputs gathered again from saved shards)


Record = tuple[ShapeCall, Operator]
"""A call and its cost."""


def split_of(values: Iterable[Value]) -> TensorSplit:
    """Add up the bytes of different storages, by how tensor parallelism divides them."""
    storages: dict[int, Value] = {}
    for value in values:
        other = storages.setdefault(value.key, value)
        if _REPLICATION[value.sharding] > _REPLICATION[other.sharding]:
            storages[value.key] = value
    sums = dict.fromkeys(Sharding, 0)
    for value in storages.values():
        sums[value.sharding] += value.held
    return TensorSplit(*sums.values())


def saved_by(calls: Iterable[ShapeCall]) -> list[Value]:
    """Return what autograd saves for some calls."""
    return [value for call in calls for value in call.saved]


def selected(records: Sequence[Record], inputs: Sequence[Value], meaning: Selective) -> list[Value]:
    """Return what is kept under selective recomputation of a kind (see ``Selective``)."""
    if meaning == "attention":
        entering = [value for call, _ in records if call.core for value in call.inputs]
        outputs = {call.output.key for call, _ in records if call.core}
        outside = saved_by(call for call, _ in records if not call.core)
        return [*outside, *(value for value in entering if value.key not in outputs)]
    if meaning == "norms":
        cheap = {records[index][0].output.key for index in _norms_and_activations(records)}
        return [value for value in saved_by(call for call, _ in records) if value.key not in cheap]
    dropped = _second_matmuls(records) if meaning == "alternate" else set()
    anchors = [value for index, (call, _) in enumerate(records) if index not in dropped for value in call.anchor]
    return [*inputs, *anchors]


def overwrites_anchors(records: Sequence[Record]) -> bool:
    """Whether a call overwrites the output of an earlier matmul, convolution or attention."""
    anchors: set[int] = set()
    for call, _ in records:
        if call.output.key in anchors:
            return True
        anchors |= {value.key for value in call.anchor}
    return False


def runs_again(records: Sequence[Record], meaning: Selective) -> set[int]:
    """Return the indices of the calls that selective recomputation runs again."""
    if meaning == "attention":
        return {index for index, (call, _) in enumerate(records) if call.core}
    if meaning == "norms":
        return _norms_and_activations(records)
    memory = {index for index, (call, _) in enumerate(records) if not call.anchor}
    return memory | (_second_matmuls(records) if meaning == "alternate" else set())


def _norms_and_activations(records: Sequence[Record]) -> set[int]:
    """Indices of normalisations and activations (with a gated MLP's product) whose inputs are kept."""
    return {
        index for index, (call, operator) in enumerate(records)
        if call.fusible and operator.name.rsplit(".")[-1].strip("12345").endswith(("norm", "act", "product"))
    }  # fmt: skip


def _second_matmuls(records: Sequence[Record]) -> set[int]:
    """Indices of the second, fourth, ... matmul with weights (torchtitan's ``_apply_ac_to_transformer_block``)."""
    matmuls = [i for i, (_, op) in enumerate(records) if op.kind is OperatorClass.MATMUL and op.weight_bytes]
    return set(matmuls[1::2])


def excess(live: TensorSplit, kept: TensorSplit) -> TensorSplit:
    """Subtract kept bytes from live ones: no part falls below zero, and parts add up to the difference of totals."""
    parts = [live.tensor - kept.tensor, live.sequence - kept.sequence, live.whole - kept.whole]
    debt = -sum(part for part in parts if part < 0)
    left = [max(part, 0) for part in parts]
    for index in sorted(range(3), key=lambda i: -left[i]):
        paid = min(debt, left[index])
        left[index] -= paid
        debt -= paid
    return TensorSplit(*left)


def full_tokens(split: TensorSplit, limit: int | None = None) -> TensorSplit:
    """Move the part that is sharded by tokens, or at most ``limit`` bytes of it, to the part that is not sharded."""
    changed = split.sequence if limit is None else min(split.sequence, limit)
    return TensorSplit(tensor=split.tensor, sequence=split.sequence - changed, whole=split.whole + changed)


def _bytes_of(values: Sequence[Value], split: bool = True) -> int:
    """Bytes of different storages; without ``split`` only of those that matmuls do not split."""
    return sum({v.key: v.held for v in values if split or v.sharding is not Sharding.TENSOR}.values())


def _larger(best: list[Value], values: Sequence[Value], split: bool = True) -> list[Value]:
    return list(values) if _bytes_of(values, split) > _bytes_of(best, split) else best


def forward_peak(
    calls: Sequence[ShapeCall], inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Return the tensors that live at the worst moments of forward.

    Inputs and saved tensors live throughout, temporary results until they are last read. The moments are that of the
    most bytes, and that of the most bytes that matmuls do not split, which is the worst under a large degree.
    """

    def identity(value: Value) -> tuple[int, Sharding]:
        return value.key, value.sharding  # a gathered tensor and its saved shard have one key

    last_read = {identity(value): index for index, call in enumerate(calls) for value in call.inputs}
    staying = {identity(value) for value in (*outputs, *saved_by(calls))}
    live, most, most_unsplit = list(inputs), list(inputs), list(inputs)
    for index, call in enumerate(calls):
        live += [*call.inputs, call.output, *call.saved]
        most, most_unsplit = _larger(most, live), _larger(most_unsplit, live, split=False)
        live = [v for v in live if identity(v) in staying or last_read.get(identity(v), -1) > index]
    return most, most_unsplit


def backward_peak(calls: Sequence[ShapeCall], outputs: Sequence[Value]) -> list[Value]:
    """Return the tensors that live at the worst moment of backward: what is still saved, and gradients until last
    read."""
    readers = Counter(key for call in calls for key in {value.key for value in call.saved})
    saved = {value.key: value for value in sorted(saved_by(calls), key=lambda value: _REPLICATION[value.sharding])}
    gradients: dict[int, Value] = {}  # by numbers below 0
    gradient_of: dict[int, int] = {}  # number of the gradient of a tensor; several tensors may share one
    numbers = count(-1, -1)

    def new_gradient(value: Value) -> int:
        number = next(numbers)
        gradients[number] = replace(value, key=number)
        return number

    def accumulate(value: Value, gradient: int) -> None:
        """Add a gradient to that of a tensor; if others share that one, the sum is a new gradient."""
        old = gradient_of.get(value.key)
        shared = old is not None and Counter(gradient_of.values())[old] > 1
        gradient_of[value.key] = new_gradient(value) if shared else gradient if old is None else old

    def release(call: ShapeCall) -> None:
        """Drop what was saved for this call alone."""
        for key in {value.key for value in call.saved}:
            readers[key] -= 1
            if not readers[key]:
                del saved[key]

    for value in outputs:
        accumulate(value, new_gradient(value))
    most = [*saved.values(), *gradients.values()]
    for call in reversed(calls):
        if call.inplace:
            release(call)
        gradient = gradient_of.pop(call.output.key, None)
        if gradient is not None:
            for value in call.inputs:
                if value.grad:
                    accumulate(value, gradient if call.shares_gradient else new_gradient(value))
        most = _larger(most, [*saved.values(), *call.rebuilt, *gradients.values()])
        for key in gradients.keys() - set(gradient_of.values()):
            del gradients[key]
        if not call.inplace:
            release(call)
    return most


def compile_records(records: Sequence[Record], inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Record]:
    """Fuse calls, and drop saved tensors, as a compiler does."""
    lean, compiled, readers = _without_rebuilt(records, inputs), list[Record](), dict[int, list[int]]()
    for index, (call, _) in enumerate(lean):
        for value in (*call.inputs, *call.saved):
            readers.setdefault(value.key, []).append(index)
    start = 0
    for fusible, group in groupby(lean, key=lambda record: record[0].fusible):
        run = list(group)
        stop = start + len(run)
        compiled += _fused(run, readers, (start, stop), {value.key for value in outputs}) if fusible else run
        start = stop
    return compiled


def _without_rebuilt(records: Sequence[Record], inputs: Sequence[Value]) -> list[Record]:
    """Drop saved tensors that only fusible calls read, and that fusible calls make of other saved tensors."""
    saved = {value.key for call, _ in records for value in call.saved} | {value.key for value in inputs}
    wanted = {value.key for call, _ in records if not call.fusible for value in call.saved}
    again: set[int] = set()
    for call, _ in records:
        sources = {value.key for value in call.inputs if value.grad}
        if call.fusible and call.output.key not in sources | wanted and sources <= saved:
            again.add(call.output.key)
    return [
        (replace(call, saved=tuple(value for value in call.saved if value.key not in again)), operator)
        for call, operator in records
    ]


def _fused(
    run: Sequence[Record], readers: dict[int, list[int]], span: tuple[int, int], outputs: set[int]
) -> list[Record]:
    """The calls of a run with the cost of one operator: it reads what enters and writes what leaves, once.

    Backward reads the gradients of what leaves and what is saved, and writes the gradients of what enters.
    """
    results = {call.output.key: call.output for call, _ in run}
    enters = {v.key: v for call, _ in run for v in call.inputs if v.key not in results}
    saved = {v.key: v for call, _ in run for v in call.saved}
    leaves = [
        v for key, v in results.items()
        if key in outputs or key in saved or any(not span[0] <= index < span[1] for index in readers.get(key, ()))
    ]  # fmt: skip
    new_saved = [v for key, v in saved.items() if key not in enters and key not in results]
    moved = sum(v.bytes for v in (*enters.values(), *leaves, *new_saved))
    backward = sum(v.bytes for v in (*(v for v in (*leaves, *enters.values()) if v.grad), *saved.values()))
    operators = [operator for _, operator in run]
    widest = max(operators, key=lambda operator: operator.moved)
    total = replace(
        widest,
        name="+".join(dict.fromkeys(operator.name for operator in operators)),
        moved=min(moved, sum(operator.moved for operator in operators)),
        backward_moved=min(backward, sum(operator.backward_moved for operator in operators)),
        weight_bytes=sum(operator.weight_bytes for operator in operators),
        statistics=sum(operator.statistics for operator in operators),
        count=1,
    )
    silent = replace(total, name="", moved=0, backward_moved=0, weight_bytes=0, statistics=0, count=0)
    return [(run[0][0], total), *((call, silent) for call, _ in run[1:])]
