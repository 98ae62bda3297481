"""A layer written down call by call: what each call reads, makes and leaves to its backward pass.

The figures of a ``LayerKind`` are sums over such a tape, so they follow from one rule per operator (``ops``) instead of
one formula per model. What an operator keeps is what PyTorch's autograd saves for it (checked against real blocks in
the tests); the sums agree with Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, where flash attention
takes the place of their attention matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, Sharding, SplitDims, TensorSplit
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes.calls import Call, Part, Value
from galvatron_lite.model.shapes.liveness import backward_peak, forward_peak

_SHARDING = {Part.TENSOR: Sharding.TENSOR, Part.SEQUENCE: Sharding.SEQUENCE, Part.WHOLE: Sharding.NONE}


def split_of(values: Iterable[Value]) -> TensorSplit:
    """Bytes of different storages, by how tensor parallelism divides them."""
    widest: dict[int, Value] = {}
    for value in values:
        if value.key not in widest or value.part > widest[value.key].part:
            widest[value.key] = value
    sums = [sum(value.bytes for value in widest.values() if value.part is part) for part in Part]
    return TensorSplit(*sums)


@dataclass(slots=True)
class Tape:
    """Calls of one layer in the order they run; a builder, used once.

    Attributes:
        item_bytes: bytes of one activation item.
        kernels: which kernels run.
        calls: what ran.
        operators: the same, summed by name, for the cost model.
        inputs: boundary tensors that enter.
        weights: parameter items, by how tensor parallelism divides them (tensor, whole).
        buffer_bytes: bytes of non-trained state.
        lent: tensors kept for other layers' backward passes.
        borrowed: keys of inputs that another layer keeps (the encoder's output, read by every decoder block).
    """

    item_bytes: int
    kernels: Kernels = EAGER
    calls: list[Call] = field(default_factory=list)
    operators: dict[str, Operator] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    weights: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    buffer_bytes: int = 0
    lent: list[Value] = field(default_factory=list)
    borrowed: set[int] = field(default_factory=set)
    _keys: int = 0
    _read: set[int] = field(default_factory=set)

    def value(self, items: int, part: Part, item_bytes: int = 0, grad: bool = True) -> Value:
        """A new tensor of its own storage; at the tape's precision unless told."""
        self._keys += 1
        return Value(self._keys, items, item_bytes or self.item_bytes, part, grad)

    def enter(self, items: int, part: Part = Part.SEQUENCE, item_bytes: int = 0, grad: bool = True) -> Value:
        """A boundary tensor that enters the layer."""
        self.inputs.append(self.value(items, part, item_bytes, grad))
        return self.inputs[-1]

    def labels(self, items: int) -> Value:
        """Indices of the right classes: part of the batch, no boundary tensor."""
        return self.value(items, Part.WHOLE, 8, grad=False)

    def borrow(self, items: int) -> Value:
        """A boundary tensor that enters the layer and that another layer keeps."""
        value = self.enter(items)
        self.borrowed.add(value.key)
        return value

    def keep(self, value: Value) -> None:
        """Count a tensor that later layers' backward passes read as kept here, whatever is recomputed."""
        self.lent.append(value)

    def own(self, items: int, part: Part = Part.WHOLE) -> None:
        """Count parameter items."""
        self.weights[part] += items

    def record(self, call: Call, operator: Operator) -> Value:
        """Add a call and its cost; calls of one name and shape are summed. Returns the call's output.

        A tensor that a call before has read already gets a second gradient: adding it moves three times its bytes.
        """
        self.calls.append(call)
        taken = {value.key: value for value in call.inputs if value.grad and value.key != call.output.key}
        sums = 3 * sum(value.bytes for key, value in taken.items() if key in self._read)
        self._read |= taken.keys()
        operator = replace(operator, backward_moved=operator.backward_moved + sums)
        before = self.operators.get(operator.name)
        self.operators[operator.name] = operator if before is None else _sum(before, operator)
        return call.output

    def kind(
        self,
        name: str,
        outputs: tuple[Value, ...],
        dims: SplitDims,
        tensor_degrees: int = 1,
        tensor_reason: str = "",
        tensor_collectives: int = 0,
        sequence_parallel: bool = False,
        gathered: Value | None = None,
        recomputed: bool = True,
    ) -> LayerKind:
        """Sum the tape up.

        Temporary results of all tokens count as whole: a collective holds the whole tensor beside its shares.

        Args:
            name, dims, tensor_degrees, tensor_reason, tensor_collectives, sequence_parallel: see ``LayerKind``.
            outputs: boundary tensors that leave.
            gathered: the output that is gathered after a column-split last matmul.
            recomputed: whether recomputation is offered; only blocks can be run again.
        """
        saved = self._kept([*(value for call in self.calls for value in call.saved), *self.lent])
        forward, backward = forward_peak(self.calls, self.inputs, outputs), backward_peak(self.calls, outputs)
        kept = {Recompute.NONE: saved} | (self._recomputed(saved) if recomputed else {})
        operators = tuple(self.operators.values())
        return LayerKind(
            name=name,
            parameters=TensorSplit(tensor=self.weights[Part.TENSOR], whole=self.weights[Part.WHOLE]),
            operators=operators if sequence_parallel else tuple(_unshared(operator) for operator in operators),
            kept=kept if sequence_parallel else {choice: _whole_tokens(split) for choice, split in kept.items()},
            working=_whole_tokens(excess(self._kept(backward), saved)),
            forward_working=_whole_tokens(excess(self._kept(forward), saved)),
            input_bytes=sum(value.bytes for value in self.inputs),
            output_bytes=sum(value.bytes for value in outputs),
            dims=dims,
            buffer_bytes=self.buffer_bytes,
            tensor_degrees=tensor_degrees,
            tensor_reason=tensor_reason,
            tensor_collectives=tensor_collectives,
            sequence_parallel=sequence_parallel,
            gathered_output_bytes=0 if gathered is None else gathered.bytes,
        )

    def _kept(self, values: Iterable[Value]) -> TensorSplit:
        return split_of(value for value in values if value.key not in self.borrowed)

    def _recomputed(self, saved: TensorSplit) -> dict[Recompute, TensorSplit]:
        """Kept bytes under recomputation: the inputs, and under selective the matmul and attention outputs too.

        A choice that would keep more than no recomputation does is left out: it would only cost time.
        """
        anchors = [value for call in self.calls for value in call.anchor]
        choices = {
            Recompute.SELECTIVE: self._kept([*self.inputs, *self.lent, *anchors]),
            Recompute.FULL: self._kept([*self.inputs, *self.lent]),
        }
        return {choice: kept for choice, kept in choices.items() if kept.total <= saved.total}


def _whole_tokens(split: TensorSplit) -> TensorSplit:
    return TensorSplit(tensor=split.tensor, whole=split.sequence + split.whole)


def _unshared(operator: Operator) -> Operator:
    return replace(operator, sharding=Sharding.NONE) if operator.sharding is Sharding.SEQUENCE else operator


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


def sharding_of(value: Value) -> Sharding:
    """How tensor parallelism divides the work on a value."""
    return _SHARDING[value.part]


def widen(value: Value) -> Value:
    """The value gathered over the tensor group: every device holds all of it."""
    return replace(value, part=Part.WHOLE)


def narrow(value: Value) -> Value:
    """The value reduced (and scattered, under sequence parallelism) over the tensor group."""
    return replace(value, part=Part.SEQUENCE)


def _sum(first: Operator, second: Operator) -> Operator:
    return replace(
        first,
        count=first.count + second.count,
        flops=first.flops + second.flops,
        backward_flops=first.backward_flops + second.backward_flops,
        moved=first.moved + second.moved,
        backward_moved=first.backward_moved + second.backward_moved,
        weight_bytes=first.weight_bytes + second.weight_bytes,
    )


def memory_operator(
    name: str, value: Value, moved: int, backward_moved: int, weight_bytes: int = 0, items: int = 0, count: int = 1
) -> Operator:
    """An operator bound by memory; ``items`` where its shape is not that of ``value``, ``count`` of its kernels."""
    return Operator(
        name, OperatorClass.MEMORY, (items or value.items,), count, 0, 0, moved, backward_moved, weight_bytes,
        sharding_of(value),
    )  # fmt: skip
