"""What a layer does, written down: values and the calls that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count, groupby

from galvatron_lite.model.graph import Operator, OperatorClass, TensorSplit
from galvatron_lite.model.kernels import Selective

FP32 = 4  # bytes of an fp32 item

INDEX = 8  # bytes of an index


class Division(IntEnum):
    """How tensor parallelism divides a value; the larger one wins where a value is held in two ways."""

    TENSOR = 0
    SEQUENCE = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of one sample."""

    key: int  # which storage; two values of one key are the same memory on one device
    items: int  # elements per sample
    item_bytes: int  # bytes of one element
    part: Division  # how tensor parallelism divides it
    grad: bool = True  # whether a gradient flows to it
    storage: int = 0  # bytes of the storage where the value is a view of part of it; 0: it has its own

    @property
    def bytes(self) -> int:
        """Bytes per sample that a kernel reads or writes, on one device that does all of it."""
        return self.items * self.item_bytes

    @property
    def held(self) -> int:
        """Bytes per sample that live while it does."""
        return self.storage or self.bytes

    def view(self, items: int) -> Value:
        """Part of the tensor, in its storage."""
        return replace(self, items=items, storage=self.held)


@dataclass(frozen=True, slots=True)
class ShapeCall:
    """One operator call."""

    inputs: tuple[Value, ...]  # tensors it reads, parameters left out
    output: Value  # tensor it makes
    saved: tuple[Value, ...] = ()  # what autograd keeps for its backward pass
    # what selective recomputation by operators keeps of it (matmul and attention outputs), empty else
    anchor: tuple[Value, ...] = ()
    shares_gradient: bool = False  # whether the inputs' gradients are the output's gradient itself (addition)
    inplace: bool = False  # whether the input's gradient takes the place of what is saved
    core: bool = False  # whether it belongs to the attention core (scores, softmax, dropout, context)
    fusible: bool = False  # whether a compiler joins it with its neighbours (element-wise and row-wise calls)
    # what exists again while its backward runs (gathered inputs of which a share is kept)
    rebuilt: tuple[Value, ...] = ()


Record = tuple[ShapeCall, Operator]  # A call and what it costs


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
        outputs = {call.output.key for call, _ in records if call.core}
        outside = saved_by(call for call, _ in records if not call.core)
        return [*outside, *(value for value in entering if value.key not in outputs)]
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


def full_tokens(split: TensorSplit, limit: int | None = None) -> TensorSplit:
    """The same where no tokens are shared, or no more than ``limit`` bytes of them are not."""
    changed = split.sequence if limit is None else min(split.sequence, limit)
    return TensorSplit(tensor=split.tensor, sequence=split.sequence - changed, whole=split.whole + changed)


def _total(values: Sequence[Value], split: bool = True) -> int:
    """Bytes of different storages; ``split``: also of those that matmuls split."""
    return sum({one.key: one.held for one in values if split or one.part is not Division.TENSOR}.values())


def _larger(best: list[Value], values: Sequence[Value], split: bool = True) -> list[Value]:
    return list(values) if _total(values, split) > _total(best, split) else best


def forward_peak(
    calls: Sequence[ShapeCall], inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Tensors alive at the worst moments of forward: inputs, what is saved, and temporary results until last read.

    The moment of the most bytes, and that of the most that matmuls do not split: the worst where they split much.
    """
    # a gathered tensor and the shard of it that is kept have one key
    last_read = {(value.key, value.part): index for index, call in enumerate(calls) for value in call.inputs}
    staying = {(value.key, value.part) for value in (*outputs, *(value for call in calls for value in call.saved))}
    live, best, widest = list(inputs), list(inputs), list(inputs)
    for index, call in enumerate(calls):
        live += [*call.inputs, call.output, *call.saved]
        best, widest = _larger(best, live), _larger(widest, live, split=False)
        live = [
            value for value in live
            if (value.key, value.part) in staying or last_read.get((value.key, value.part), -1) > index
        ]  # fmt: skip
    return best, widest


def backward_peak(calls: Sequence[ShapeCall], outputs: Sequence[Value]) -> list[Value]:
    """Tensors alive at the worst moment of backward: what is still saved, and gradients from made to last read."""
    readers = Counter(key for call in calls for key in {value.key for value in call.saved})
    everything = (value for call in calls for value in call.saved)
    saved = {value.key: value for value in sorted(everything, key=lambda value: value.part)}
    buffers: dict[int, Value] = {}  # of gradients, by numbers below 0
    of: dict[int, int] = {}  # buffers by the key of the tensor, of which several may share one
    numbers = count(-1, -1)

    def new(value: Value) -> int:
        number = next(numbers)
        buffers[number] = replace(value, key=number)
        return number

    def give(value: Value, buffer: int) -> None:
        """Hand a gradient to a tensor; where it has one already that is shared, the sum takes a new buffer."""
        old = of.get(value.key)
        shared = old is not None and Counter(of.values())[old] > 1
        of[value.key] = new(value) if shared else buffer if old is None else old

    def release(call: ShapeCall) -> None:
        """Drop what only this call's backward still needed."""
        for key in {value.key for value in call.saved}:
            readers[key] -= 1
            if not readers[key]:
                del saved[key]

    for value in outputs:
        give(value, new(value))
    best = [*saved.values(), *buffers.values()]
    for call in reversed(calls):
        if call.inplace:
            release(call)
        arrived = of.pop(call.output.key, None)
        if arrived is not None:
            for value in call.inputs:
                if value.grad:
                    give(value, arrived if call.shares_gradient else new(value))
        best = _larger(best, [*saved.values(), *call.rebuilt, *buffers.values()])
        for key in buffers.keys() - set(of.values()):
            del buffers[key]
        if not call.inplace:
            release(call)
    return best


def compile_records(records: Sequence[Record], inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Record]:
    """The calls as a compiler runs them."""
    lean, done, needed = _without_rebuilt(records, inputs), list[Record](), dict[int, list[int]]()
    for index, (call, _) in enumerate(lean):
        for value in (*call.inputs, *call.saved):
            needed.setdefault(value.key, []).append(index)
    start = 0
    for fusible, run in groupby(lean, key=lambda record: record[0].fusible):
        part = list(run)
        stop = start + len(part)
        done += _fused(part, needed, (start, stop), {value.key for value in outputs}) if fusible else part
        start = stop
    return done


def _without_rebuilt(records: Sequence[Record], inputs: Sequence[Value]) -> list[Record]:
    """Drop saved tensors that a fusible call can make again, from tensors that are saved, where only such read them."""
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
    """The run's calls, their cost in one operator: what enters is read and what leaves is written, once.

    Backward reads the gradients of what leaves and what is saved, and writes the gradients of what enters.
    """
    made = {call.output.key: call.output for call, _ in run}
    enters = {v.key: v for call, _ in run for v in call.inputs if v.key not in made}
    saved = {v.key: v for call, _ in run for v in call.saved}
    leaves = [
        v for key, v in made.items()
        if key in outputs or key in saved or any(not span[0] <= index < span[1] for index in readers.get(key, ()))
    ]  # fmt: skip
    new_saved = [v for key, v in saved.items() if key not in enters and key not in made]
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
