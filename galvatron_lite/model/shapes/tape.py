"""A layer as a tape of operator calls: what each call reads, writes and saves for backward.

The figures of a ``LayerKind`` are sums over a tape, so they follow from one rule per operator (``ops``) instead of one
formula per model. What an operator saves is what PyTorch's autograd saves for it (the tests compare real blocks); the
sums agree with Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, if flash attention replaces their matrices
of attention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from galvatron_lite.model.graph import (
    Layer,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorClass,
    Passed,
    Recompute,
    Role,
    Routing,
    Sharding,
    SplitDims,
    TensorBoundary,
    TensorSplit,
    Tie,
)
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes.records import (
    FP32,
    INDEX,
    Record,
    ShapeCall,
    Value,
    backward_peak,
    compile_records,
    excess,
    forward_peak,
    full_tokens,
    overwrites_anchors,
    runs_again,
    saved_by,
    selected,
    split_of,
)
from galvatron_lite.model.trainable import LayerTraining, layer_training


@dataclass(slots=True)
class Tape:
    """Calls of one layer in the order they run; a builder, used once."""

    item_bytes: int  # of activations
    kernels: Kernels = EAGER
    records: list[Record] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)  # boundary tensors that enter
    # parameter items, by how tensor parallelism divides them (TENSOR or NONE)
    weights: dict[Sharding, int] = field(default_factory=lambda: dict.fromkeys(Sharding, 0))
    buffer_bytes: int = 0  # of non-trained state
    lent: list[Value] = field(default_factory=list)  # tensors kept for other layers' backward passes
    borrowed: set[int] = field(default_factory=set)  # keys of inputs that another layer keeps (the encoder's output)
    expert_items: int = 0  # parameter items that expert parallelism divides; part of ``weights``
    dispatched_bytes: int = 0  # of the copies of tokens that go to experts
    routing: Routing = Routing()  # noqa: RUF009  frozen
    training: LayerTraining | None = field(default_factory=layer_training)  # None: everything trains
    frozen: dict[Sharding, int] = field(default_factory=lambda: dict.fromkeys(Sharding, 0))  # part of ``weights``
    frozen_experts: int = 0  # part of ``expert_items``
    # items counted since the last call, and expert items before it
    _counted: tuple[Counter[Sharding], int] = field(default_factory=lambda: (Counter(), 0))
    _constant: set[int] = field(default_factory=set)  # keys of tensors that no trained parameter is behind
    _keys: int = 0  # storages so far
    _read: set[int] = field(default_factory=set)  # keys of tensors with gradients that a call has read
    _gathered: set[int] = field(default_factory=set)  # keys
    _casts: dict[int, Value] = field(default_factory=dict)  # copies in one byte an item, by key
    # inputs of column-split matmuls by key: bytes, whether gradients flow back, whether backward gathers it again
    _entered: dict[int, tuple[int, bool, bool]] = field(default_factory=dict)
    _left: list[tuple[int, bool]] = field(default_factory=list)  # outputs of row-split matmuls: bytes, backward or not

    def value(self, items: int, sharding: Sharding = Sharding.NONE, item_bytes: int = 0, grad: bool = True) -> Value:
        """Make a tensor with a storage of its own; ``item_bytes`` are the tape's if 0."""
        self._keys += 1
        return Value(self._keys, items, item_bytes or self.item_bytes, sharding, grad)

    def like(self, value: Value, item_bytes: int = 0) -> Value:
        """Make a tensor of the items and sharding of another one; ``item_bytes`` are the tape's if 0."""
        return self.value(value.items, value.sharding, item_bytes)

    def enter(
        self, items: int, sharding: Sharding = Sharding.SEQUENCE, item_bytes: int = 0, grad: bool = True
    ) -> Value:
        """Make a boundary tensor that enters the layer."""
        returns = self.training is None or self.training.returns
        self.inputs.append(self.value(items, sharding, item_bytes, grad and returns))
        return self.inputs[-1]

    def labels(self, items: int) -> Value:
        """Make indices of the right classes: part of the batch, no boundary tensor."""
        return self.value(items, item_bytes=INDEX, grad=False)

    def borrow(self, items: int) -> Value:
        """Make a boundary tensor that enters the layer and that another layer keeps."""
        value = self.enter(items)
        self.borrowed.add(value.key)
        return value

    def keep(self, value: Value) -> None:
        """Count a tensor as kept here, whatever is recomputed: later layers' backward passes read it."""
        self.lent.append(value)

    def count(self, items: int, sharding: Sharding = Sharding.NONE) -> None:
        """Count parameter items."""
        self.weights[sharding] += items
        self._counted[0][sharding] += items

    def gather(self, value: Value) -> Value:
        """Gather a tensor over the tensor group: each device holds all of it while it computes."""
        self._gathered.add(value.key)
        return replace(value, sharding=Sharding.NONE)

    def regathers(self, value: Value) -> bool:
        """Whether a gathered input is gathered again in backward."""
        return self.kernels.regather and value.sharding is Sharding.NONE and value.key in self._gathered

    def record(self, call: ShapeCall, operator: Operator) -> Value:
        """Add a call and its cost; return the call's output.

        A tensor that an earlier call has read gets a second gradient: adding it moves three times its bytes.
        Parameters counted since the last call belong to this call.
        """
        if self.training is not None:
            call, operator = self._as_trained(call, operator)
        inputs = {value.key: value for value in call.inputs if value.grad and value.key != call.output.key}
        sums = 3 * sum(value.bytes for key, value in inputs.items() if key in self._read and not value.storage)
        self._read |= inputs.keys()
        summed = replace(operator, backward_moved=operator.backward_moved + sums) if sums else operator
        self.records.append((call, summed))
        return call.output

    def memory(
        self, name: str, inputs: tuple[Value, ...], out: Value, moved: int, backward_moved: int | None = None, *,
        like: Value | None = None, saved: tuple[Value, ...] = (), weight_bytes: int = 0, items: int = 0, count: int = 1,
        **traits: Any,
    ) -> Value:  # fmt: skip
        """Record a call bound by memory; return its output.

        Args:
            name, moved, backward_moved, weight_bytes, items, count: see ``memory_operator``; backward moves as much as
                forward if None.
            inputs, out, saved, traits: see ``ShapeCall``.
            like: the tensor whose items its kernels work on; the output if None.
        """
        back = moved if backward_moved is None else backward_moved
        operator = memory_operator(name, like or out, moved, back, weight_bytes, items, count)
        return self.record(ShapeCall(inputs, out, saved, **traits), operator)

    def _as_trained(self, call: ShapeCall, operator: Operator) -> Record:
        """The call if some parameters are frozen: what its backward does, and what is saved for that.

        A frozen matmul or convolution passes its gradient on to its input, for which it saves no input. A call that
        neither trains nor passes gradients on has no backward.
        """
        counted, experts = self._counted
        self._counted = (Counter(), self.expert_items)
        weighted = counted.total() > 0 or operator.weight_bytes > 0
        frozen = weighted and self.freezes(operator.name)
        if frozen:
            self.frozen_experts += self.expert_items - experts
            for sharding, items in counted.items():
                self.frozen[sharding] += items
        inputs = tuple(replace(input_, grad=input_.grad and input_.key not in self._constant) for input_ in call.inputs)
        flows, operator = any(input_.grad for input_ in inputs), replace(operator, frozen=frozen)
        if not flows and (frozen or not weighted):
            self._constant.add(call.output.key)
            silent = replace(call, inputs=inputs, saved=(), output=replace(call.output, grad=False))
            return silent, replace(operator, backward_flops=0, backward_moved=0)
        if weighted and operator.kind is not OperatorClass.MEMORY and (frozen or not flows):
            half = min(operator.backward_flops, operator.flops)
            operator = replace(operator, backward_flops=half, backward_moved=operator.backward_moved // 2)
            call = replace(call, saved=()) if frozen else call
        return replace(call, inputs=inputs), operator

    def freezes(self, name: str) -> bool:
        """Whether the weights of an operator get no gradient."""
        return self.training is not None and name in self.training.frozen

    def split(self, name: str, x: Value, out: Value, sharding: Sharding) -> None:
        """Note that a matmul split by columns (TENSOR) begins a region, or one split by rows (SEQUENCE) ends it."""
        trains, returns = not self.freezes(name), x.grad and x.key not in self._constant
        if sharding is Sharding.TENSOR:
            again = self._entered.get(x.key, (0, False, False))[2] or (trains and returns)
            self._entered[x.key] = (x.bytes, returns, again)
        elif sharding is Sharding.SEQUENCE:
            self._left.append((out.bytes, trains or returns))

    def _boundaries(self) -> tuple[TensorBoundary, ...]:
        """All collectives of regions (see ``LayerKind``), if only some parameters train."""
        if self.training is None:
            return ()
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for size, returns, again in self._entered.values():
            counts[size].update(begins=1, returns=int(returns), regathers=int(again))
        for size, resumes in self._left:
            counts[size].update(ends=1, resumes=int(resumes))
        shared = [TensorBoundary(size, True, **count) for size, count in counts.items()]
        unshared = (replace(boundary, shared=False, begins=0, resumes=0, regathers=0) for boundary in shared)
        return *unshared, *shared

    def narrow_copy(self, value: Value) -> tuple[Value, bool]:
        """Return the copy of a tensor in one byte an item, and whether it is new: all readers of a tensor share it."""
        new = value.key not in self._casts
        if new:
            self._casts[value.key] = self.like(value, 1)
        return self._casts[value.key], new

    def widened(self, value: Value) -> Value:
        """Return a copy of a tensor in fp32, or the tensor if it is in fp32."""
        return value if value.item_bytes == FP32 else self.like(value, FP32)

    def extra(self, operator: Operator) -> None:
        """Add the cost of a kernel that prepares the next call and whose result does not outlive it."""
        nothing = self.value(0, grad=False)
        self.records.append((ShapeCall((), nothing), operator))

    def kind(
        self, name: str, outputs: tuple[Value, ...], dims: SplitDims, *, gathered: Value | None = None,
        recomputed: bool = True, regions: tuple[int, int] | None = None, sequence_parallel: bool = False, **traits: Any,
    ) -> LayerKind:  # fmt: skip
        """Sum the tape up.

        Temporary results that are sharded by tokens count in full in backward: a collective holds the full tensor
        beside its shards. In forward one of them does: the sum that is scattered at a region's end.

        Args:
            name, dims, sequence_parallel, traits: see ``LayerKind``.
            outputs: boundary tensors that leave.
            gathered: the output that is gathered after a column-split last matmul.
            recomputed: whether recomputation is offered; only blocks can run again.
            regions: gathers and scatters of one forward pass (see ``LayerKind``); half of the collectives each if None.
        """
        records = compile_records(self.records, self.inputs, outputs) if self.kernels.compiled else self.records
        calls = [call for call, _ in records]
        lasting = selected(records, self.inputs, "norms") if self.kernels.remade else saved_by(calls)
        saved = self._kept([*lasting, *self.lent])
        backward = [*backward_peak(calls, outputs), *self.lent]
        output_bytes = sum(value.bytes for value in outputs)
        # at the moment of the most bytes, and at that of the most bytes that matmuls do not split
        most, most_unsplit = (
            full_tokens(excess(self._kept([*values, *self.lent]), saved), output_bytes)
            for values in forward_peak(calls, self.inputs, outputs)
        )
        unsplit = [max(getattr(most, part), getattr(most_unsplit, part)) for part in ("sequence", "whole")]
        forward_working = TensorSplit(max(most.total - sum(unsplit), 0), *unsplit)
        kept = {Recompute.NONE: saved} | (self._recomputed(records, saved) if recomputed else {})
        operators = merged(records, self.kernels if recomputed else None)
        if not sequence_parallel:
            operators = tuple(
                replace(op, sharding=Sharding.NONE) if op.sharding is Sharding.SEQUENCE else op for op in operators
            )
            kept = {choice: full_tokens(split) for choice, split in kept.items()}
        return LayerKind(
            name=name,
            parameters=TensorSplit(tensor=self.weights[Sharding.TENSOR], whole=self.weights[Sharding.NONE]),
            frozen=TensorSplit(tensor=self.frozen[Sharding.TENSOR], whole=self.frozen[Sharding.NONE]),
            frozen_experts=self.frozen_experts,
            operators=operators,
            kept=kept,
            working=full_tokens(excess(self._kept(backward), saved)),
            forward_working=forward_working,
            input_bytes=sum(value.bytes for value in self.inputs),
            output_bytes=output_bytes,
            dims=dims,
            buffer_bytes=self.buffer_bytes,
            sequence_parallel=sequence_parallel,
            gathered_output_bytes=0 if gathered is None else gathered.bytes,
            tensor_gathers=regions[0] if regions else None,
            tensor_scatters=regions[1] if regions else None,
            boundaries=self._boundaries(),
            regathers=len(self._gathered) if self.kernels.regather else 0,
            regathers_recomputed=len(self._gathered) if self.kernels.regather_recomputed else 0,
            expert_parameters=self.expert_items,
            dispatched_bytes=self.dispatched_bytes,
            routing=self.routing,
            **traits,
        )

    def _kept(self, values: Iterable[Value]) -> TensorSplit:
        return split_of(value for value in values if value.key not in self.borrowed)

    def _recomputed(self, records: list[Record], saved: TensorSplit) -> dict[Recompute, TensorSplit]:
        """Kept bytes by recomputation choice: the inputs, and what the kernels' meaning of selective keeps.

        A choice that keeps more than no recomputation is not offered: it would only cost time. With a compiler or
        another meaning of selective it is offered, as it is what such software runs if asked to. Selective
        recomputation is not offered if outputs of matmuls or convolutions are overwritten in place: to keep them would
        take new tensors.
        """
        choices = {
            Recompute.SELECTIVE: self._kept([*selected(records, self.inputs, self.kernels.selective), *self.lent]),
            Recompute.FULL: self._kept([*self.inputs, *self.lent]),
        }
        if overwrites_anchors(records):
            del choices[Recompute.SELECTIVE]
        marks_all = self.kernels.compiled or self.kernels.selective != "operators"
        return {choice: kept for choice, kept in choices.items() if marks_all or kept.total <= saved.total}


def narrow(value: Value) -> Value:
    """Reduce a tensor over the tensor group, and scatter it by tokens under sequence parallelism."""
    return replace(value, sharding=Sharding.SEQUENCE)


def merged(records: Sequence[Record], kernels: Kernels | None) -> tuple[Operator, ...]:
    """Merge operators by name, and mark those that selective recomputation runs again.

    If these are all memory-bound ones and nothing else, no mark is needed (see ``Operator.again``).
    """
    again = runs_again(records, kernels.selective) if kernels and kernels.selective != "operators" else set()
    operators: dict[str, Operator] = {}
    for index, (_, operator) in enumerate(records):
        if not operator.name:
            continue
        marked = replace(operator, again=True) if index in again else operator
        if (first := operators.get(operator.name)) is not None:
            marked = replace(first, **{name: getattr(first, name) + getattr(marked, name) for name in _SUMMED})
        operators[operator.name] = marked
    return tuple(operators.values())


_SUMMED = ("count", "flops", "backward_flops", "moved", "backward_moved", "weight_bytes", "statistics")


def memory_operator(
    name: str, value: Value, moved: int, backward_moved: int, weight_bytes: int = 0, items: int = 0, count: int = 1
) -> Operator:
    """Make an operator bound by memory: ``count`` kernels that work on ``items`` per sample, or those of ``value``."""
    return Operator(
        name, OperatorClass.MEMORY, (items or value.items,), count, 0, 0, moved, backward_moved, weight_bytes,
        value.sharding,
    )  # fmt: skip


def blocks(prefix: str, kind: str, count: int) -> list[Layer]:
    """Make equal blocks, named ``prefix.0``, ``prefix.1``, ..."""
    return [Layer(f"{prefix}.{index}", kind, Role.BLOCK) for index in range(count)]


def assemble(
    name: str,
    kinds: Sequence[LayerKind],
    middle: Sequence[Layer],
    *,
    sequence: int,
    precision: str,
    ties: Mapping[tuple[str, str], int] | None = None,
    notes: tuple[str, ...] = (),
    tensors: Sequence[Passed] = (),
) -> ModelGraph:
    """Make the graph of ``before``, the layers in the middle, and ``after``."""
    layers = (Layer("before", "before", Role.BEFORE), *middle, Layer("after", "after", Role.AFTER))
    shared = tuple(Tie(first, second, items) for (first, second), items in (ties or {}).items())
    return ModelGraph(
        name=name,
        layers=layers,
        kinds={kind.name: kind for kind in kinds},
        sequence=sequence,
        precision=precision,
        ties=shared,
        source="shapes",
        notes=notes,
        tensors=tuple(tensors),
    )


def chained(names: Sequence[str], size: int) -> list[Passed]:
    """Return a tensor of ``size`` bytes per sample from each layer to the next."""
    return [Passed(left, (right,), size) for left, right in pairwise(names)]


def with_skips(graph: ModelGraph, skips: Sequence[Passed]) -> ModelGraph:
    """Add tensors that go further than to the next layer to a chain, whose own are the kinds' outputs."""
    if not skips:
        return graph
    chain = [
        Passed(left.name, (right.name,), graph.kind_of(left).output_bytes) for left, right in pairwise(graph.layers)
    ]
    indices = {layer.name: index for index, layer in enumerate(graph.layers)}
    return replace(graph, tensors=tuple(sorted([*chain, *skips], key=lambda tensor: indices[tensor.producer])))
