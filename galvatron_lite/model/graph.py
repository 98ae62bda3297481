"""The model as the planner sees it: layers, and the figures of each kind of layer.

Conventions
    Every figure is for ONE sample (one row of the batch) unless its name says otherwise, at the graph's sequence
    length and precision, on one device that holds the whole layer. FLOPs count a multiply-add as two.
    How a figure shrinks under tensor parallelism is part of the figure: see ``TensorSplit``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated

from galvatron_lite.arrays import Flag, Real, Whole, where
from galvatron_lite.files import Strict
from galvatron_lite.limits import Amount, Count, Extent, Flops, Layers, Name, Precision, Samples, Size
from galvatron_lite.units import format_bytes, format_count

if TYPE_CHECKING:
    import networkx


class OperatorClass(StrEnum):
    """What bounds an operator."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MEMORY = "memory"


class Role(StrEnum):
    """Where a layer stands: before the repeated blocks, one of them, or after them."""

    BEFORE = "before"
    BLOCK = "block"
    AFTER = "after"


class Recompute(StrEnum):
    """Which activations are discarded in forward and computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sharding(StrEnum):
    """How tensor parallelism of degree t divides a figure: by t, by t with sequence parallelism only, or not."""

    TENSOR = "tensor"
    SEQUENCE = "sequence"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TensorSplit(Strict):
    """A figure in three parts, by how tensor parallelism of degree t divides them."""

    tensor: Flops = 0  # the part that is divided by t
    sequence: Flops = 0  # the part that is divided by t under sequence parallelism only
    whole: Flops = 0  # the part that is not divided

    def at(self, degree: Whole, sequence_parallel: Flag) -> Real:
        """The figure on one device under tensor parallelism of this degree; an array for an array of degrees."""
        shared = where(sequence_parallel, self.sequence / degree, self.sequence)
        return self.tensor / degree + shared + self.whole

    @property
    def total(self) -> int:
        """The figure without tensor parallelism."""
        return self.tensor + self.sequence + self.whole


@dataclass(frozen=True, slots=True)
class Operator(Strict):
    """One kind of call inside a layer."""

    name: Name  # of its origin, for people (``attention.qkv``, ``mlp.act``)
    kind: OperatorClass  # what bounds it
    # matmul (rows per sample, inner, columns); attention (query heads, key-value heads, query length, key length,
    # head size); convolution (input channels, output channels, groups) and sides; memory: (items per sample,), of a
    # window (pooling, interpolation) its channels and sides too. Sides are input extents, kernel extents, strides,
    # paddings and dilations (see ``model.sides``)
    shape: tuple[Extent, ...]
    count: Size  # how many such calls one forward pass makes
    flops: Flops  # forward FLOPs per sample, all calls together
    backward_flops: Flops  # backward FLOPs per sample, all calls together
    moved: Flops  # bytes read and written per sample in forward, weights not counted, all calls together
    backward_moved: Flops  # the same in backward
    weight_bytes: Flops = 0  # bytes of weights read once a call whatever the batch, all calls together
    sharding: Sharding = Sharding.NONE  # how tensor parallelism divides it
    # of attention: whether a query sees no later key. ``flops`` count the whole score matrix all the same; a fused
    # kernel does half of them
    causal: bool = False
    # whether selective recompute runs it again; if this is false for all operators of a layer, it runs the memory-bound
    # ones again
    again: bool = False
    precision: str = ""  # of its compute, if that is not the graph's (``fp8`` matmuls among bf16 activations)
    channels_last: bool = False  # of a convolution: whether a pixel's channels lie side by side in memory (NHWC)
    # items that are summed over all pixels before the operator's result is known (sums and squares of a batch
    # normalisation's channels, a mean over the picture)
    statistics: Flops = 0
    frozen: bool = False  # its weights get no gradient
    reads: Count = 0  # of a matmul with weights: number of its input tensor in the layer; 0: unknown


@dataclass(frozen=True, slots=True)
class SplitDims(Strict):
    """Extents along which a layer can be split; 0 if it has no such extent."""

    sequence: Size = 0
    heads: Size = 0
    kv_heads: Size = 0
    hidden: Size = 0
    ffn_hidden: Size = 0
    vocab: Size = 0
    experts: Size = 0
    in_channels: Size = 0
    out_channels: Size = 0
    depth: Size = 0
    height: Size = 0
    width: Size = 0


@dataclass(frozen=True, slots=True)
class TensorBoundary(Strict):
    """Tensors of one size at which regions of a tensor group begin or end, and numbers of their collectives."""

    bytes: Size  # per sample, of all devices' shards together
    shared: bool = False  # whether under sequence parallelism (tokens are sharded) or without
    begins: Count = 0  # all-gathers in forward, under sequence parallelism
    ends: Count = 0  # sums in forward: reduce-scatters under sequence parallelism
    returns: Count = 0  # sums of gradients where regions begin: reduce-scatters under sequence parallelism
    resumes: Count = 0  # all-gathers of gradients where regions end, under sequence parallelism
    regathers: Count = 0  # all-gathers in backward of inputs of which a shard was kept


@dataclass(frozen=True, slots=True)
class Routing(Strict):
    """How a mixture sends tokens to its experts."""

    choices: Size = 0  # experts that a token visits; 0: unknown
    unique: bool = False  # whether a node or rank receives one copy of a token, however many of its experts it holds
    groups: Size = 1  # of experts
    chosen_groups: Size = 1  # that a token visits at most
    excess: Amount = 0.0  # tokens of the most loaded expert over the mean, as a share of it


@dataclass(frozen=True, slots=True)
class LayerKind(Strict):
    """What structurally equal layers share."""

    name: Name  # key of the kind (``block``, ``before``, ``encoder_block``)
    parameters: TensorSplit  # parameter items of one such layer
    operators: tuple[Operator, ...]  # what one forward pass calls
    # bytes per sample that autograd keeps from forward to backward, by recompute choice; absent where a choice cannot
    # be run. The layer's own input counts only where autograd keeps it (it does under full)
    kept: dict[Recompute, TensorSplit]
    # bytes per sample live at the worst moment of the layer's backward beyond what ``kept`` (no recompute) holds:
    # gradients of activations and temporary results
    working: TensorSplit
    forward_working: TensorSplit  # the same for forward: temporary results that are not kept
    input_bytes: Size  # bytes per sample of the boundary tensors that enter
    output_bytes: Size  # bytes per sample of the boundary tensors that leave
    dims: SplitDims = SplitDims()  # what can be split
    buffer_bytes: Size = 0  # bytes of non-trained state
    # a tensor-parallel degree is legal if it divides this number. 1: tensor parallelism is not offered
    tensor_degrees: Samples = 1
    tensor_reason: str = ""  # why tensor parallelism is limited or not offered; may be empty
    # all-gathers plus reduce-scatters (or as many all-reduces with half the pairs) of the boundary tensor that tensor
    # parallelism costs in one forward pass: 4 for a transformer block (two gather/scatter pairs)
    tensor_collectives: Count = 0
    # whether the layer outside its sharded regions works token by token, so that sequence parallelism may be used
    sequence_parallel: bool = False
    # bytes per sample of an output that is gathered over the tensor group after a column-split last matmul (the
    # logits of an LM head), unless the loss is computed on its shards; 0 if there is none
    gathered_output_bytes: Size = 0
    # bytes per sample that each device of a tensor group sends for a loss on shards of that output, in one gather of
    # forward; 0 if the loss needs the full output
    loss_bytes: Size = 0
    # working bytes per sample that backward of such a loss saves, on all devices together: it needs no log-likelihoods
    # beside the logits
    spared_bytes: Size = 0
    # how many regions whose first matmul is split by columns begin in one forward pass: each gathers the input under
    # sequence parallelism, and in backward sums (and scatters) its gradient. None: half of ``tensor_collectives``
    tensor_gathers: Count | None = None
    # how many regions whose last matmul is split by rows end: each sums (and scatters, under sequence parallelism)
    # the output, and in backward gathers its gradient under sequence parallelism. None: half of
    # ``tensor_collectives``
    tensor_scatters: Count | None = None
    # further all-gathers in one backward pass under sequence parallelism, of inputs of which only a shard is kept,
    # without recomputation
    regathers: Count = 0
    regathers_recomputed: Count = 0  # the same with recomputation
    # all of these collectives if the counts above are not enough: adapters begin and end with narrow tensors, and not
    # all gradients of frozen layers are summed or gathered. Empty if they are enough
    boundaries: tuple[TensorBoundary, ...] = ()
    # the part of ``parameters`` that belongs to experts, which expert parallelism divides; of ``parameters.tensor``
    # where tensor parallelism is offered
    expert_parameters: Size = 0
    # bytes per sample of the copies of tokens that go to experts in one forward pass; as many come back, and the same
    # goes both ways in backward
    dispatched_bytes: Size = 0
    routing: Routing = Routing()  # how tokens go to experts
    # why the layer's code does not run on shards of ``filters`` or ``channels``, by name; empty if it does
    channel_reasons: dict[str, str] = field(default_factory=dict)
    context_reason: str = ""  # why the layer's code does not run on shards of the tokens; empty if it does
    expert_reason: str = ""  # why the experts of a mixture cannot be spread; empty if they can
    frozen: TensorSplit = TensorSplit()  # the part of ``parameters`` that gets no gradient
    frozen_experts: Size = 0  # the part of ``expert_parameters`` that gets no gradient
    shares: bool = False  # whether it uses parameters of another layer (``Tie``), which ``parameters`` does not count

    @property
    def trainable(self) -> int:
        """Parameter items that get a gradient."""
        return self.parameters.total - self.frozen.total

    @property
    def returns(self) -> bool:
        """Whether it has a backward pass: something in it trains, or in layers before it."""
        return not self.frozen.total or any(
            operator.backward_flops or operator.backward_moved for operator in self.operators
        )

    @property
    def flops(self) -> int:
        """Forward FLOPs per sample."""
        return sum(operator.flops for operator in self.operators)

    @property
    def backward_flops(self) -> int:
        """Backward FLOPs per sample."""
        return sum(operator.backward_flops for operator in self.operators)

    @property
    def active_parameters(self) -> int:
        """Parameter items except those of experts that a token does not visit."""
        choices, experts = self.routing.choices, self.dims.experts
        idle = self.expert_parameters * (experts - choices) // experts if choices and experts else 0
        return self.parameters.total - idle

    def with_copy(self, items: int, frozen: int = 0) -> LayerKind:
        """Add a copy of shared parameters, which tensor parallelism splits as those of their owner.

        Args:
            items: of the copy.
            frozen: items of the copy that get no gradient.
        """
        if items == 0:
            return self
        copied = replace(self.parameters, tensor=self.parameters.tensor + items)
        return replace(self, parameters=copied, frozen=replace(self.frozen, tensor=self.frozen.tensor + frozen))


@dataclass(frozen=True, slots=True)
class Layer(Strict):
    """One or more submodules that the planner treats as one unit."""

    name: Name  # unique: the module path of a block (``model.layers.0``), or ``before`` or ``after``
    kind: Name  # key into ``ModelGraph.kinds``
    role: Role
    modules: tuple[str, ...] = ()  # paths of its modules, in the order they run


@dataclass(frozen=True, slots=True)
class Tie(Strict):
    """Parameters that two layers share (embedding and head)."""

    first: Name  # name of the layer that owns them
    second: Name  # name of the layer that uses them too; its kind's ``parameters`` do not count them
    parameters: Size  # items shared; 0: the two only have the same strategy
    frozen: Size = 0  # items shared that get no gradient


@dataclass(frozen=True, slots=True)
class Passed(Strict):
    """A tensor that one layer makes and later layers read."""

    producer: Name  # a layer
    readers: tuple[Name, ...]  # layers after the producer, in the order they run
    size: Size  # bytes per sample
    # whether autograd keeps it for readers whose kinds do not count it: the producer's kind does, and a pipeline stage
    # that reads it without the producer keeps a copy
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class DeadParameters(Strict):
    """Parameters of a module that never reach an output, or the loss of a user's ``loss_fn``."""

    path: Name  # of the module, the outermost whose parameters are all dead; or of a single parameter
    items: Size  # parameter items


@dataclass(frozen=True, slots=True)
class ModelGraph(Strict):
    """A model as the planner sees it: layers in the order they run.

    Attributes:
        name: for people.
        layers: in the order they run.
        kinds: what equal layers share, by key.
        sequence: tokens per sample; 1 for models without a sequence.
        precision: of activations and compute (``fp32``, ``bf16``); the byte figures are at this precision.
        tensors: tensors between layers, by producer; empty for a chain: only the next layer reads the output of a
            layer (its kind's ``output_bytes``).
        ties: shared parameters.
        source: where the graph comes from (``traced``, ``shapes``), for people.
        notes: what the reader should know (blocks without tensor parallelism and why).
        whole: why the layers cannot be on several pipeline stages; empty if they can.
        dead: parameters that train nothing.
        undivided: why several micro-batches train something else than one; empty if they do not.
        compares: the module that decides what it runs by a number made of all samples; empty if none does.
        trains: of a closed form, which parameters train: the value of ``--trainable``, then the patterns of
            ``--freeze``; empty if all do.
        least_samples: the fewest samples that the model runs on in training (batch norm over rows needs two).
        folded: an input or output of a block whose dim 0 is samples times something else, or whose samples lie along
            another dim, so that all layers must have the same samples; empty if there is none.
    """

    name: Name
    layers: Annotated[tuple[Layer, ...], Layers]
    kinds: dict[str, LayerKind]
    sequence: Samples
    precision: Precision
    tensors: tuple[Passed, ...] = ()
    ties: tuple[Tie, ...] = ()
    source: str = "traced"
    notes: tuple[str, ...] = field(default=())
    whole: str = ""
    dead: tuple[DeadParameters, ...] = ()
    undivided: str = ""
    least_samples: int = 1
    folded: str = ""
    trains: tuple[str, ...] = ()
    compares: str = ""

    def kind_of(self, layer: Layer) -> LayerKind:
        """The kind of a layer."""
        return self.kinds[layer.kind]

    @property
    def parameters(self) -> int:
        """Parameter items of the whole model, shared ones counted once."""
        return sum(self.kinds[layer.kind].parameters.total for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameter items that one token is multiplied by: without tables (before the blocks) and experts that it does
        not visit."""
        return sum(self.kinds[layer.kind].active_parameters for layer in self.layers if layer.role is not Role.BEFORE)

    @property
    def trainable(self) -> int:
        """Parameter items of the whole model that get a gradient."""
        return sum(self.kinds[layer.kind].trainable for layer in self.layers)

    @property
    def flops(self) -> int:
        """Forward and backward FLOPs of one sample, nothing recomputed."""
        kinds = [self.kinds[layer.kind] for layer in self.layers]
        return sum(kind.flops + kind.backward_flops for kind in kinds)

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of layer names, from producer to reader, in the order of the layers."""
        if not self.tensors:
            return tuple(pairwise(layer.name for layer in self.layers))
        index = {layer.name: number for number, layer in enumerate(self.layers)}
        pairs = {(tensor.producer, reader) for tensor in self.tensors for reader in tensor.readers}
        return tuple(sorted(pairs, key=lambda pair: (index[pair[0]], index[pair[1]])))

    def crossing(self, cut: int) -> int:
        """Bytes per sample of all tensors made before the layer of index ``cut`` and read by it or after it."""
        if not self.tensors:
            return self.kinds[self.layers[cut - 1].kind].output_bytes if 0 < cut < len(self.layers) else 0
        return self.crossings()[cut]

    def crossings(self) -> tuple[int, ...]:
        """``crossing`` of all indices from 0 to the number of layers."""
        if not self.tensors:
            return tuple(self.crossing(cut) for cut in range(len(self.layers) + 1))
        index = {layer.name: number for number, layer in enumerate(self.layers)}
        steps = [0] * (len(self.layers) + 1)
        for tensor in self.tensors:
            steps[index[tensor.producer] + 1] += tensor.size
            steps[max(index[reader] for reader in tensor.readers) + 1] -= tensor.size
        return tuple(accumulate(steps))

    def exchanges(self, inside: range) -> tuple[tuple[int, int, int], ...]:
        """Pairs of indices of a stage's layers between which tensors go, with their bytes per sample.

        A tensor goes directly from its producer to each reader. The first layer of the stage stands for producers
        before it, the last layer for readers after it. Tensors between the same two layers add up.
        """
        if not self.tensors:
            return tuple((left, right, self.crossing(right)) for left, right in pairwise(inside))
        index = {layer.name: number for number, layer in enumerate(self.layers)}
        sizes: dict[tuple[int, int], int] = {}
        for tensor in self.tensors:
            producer, read = index[tensor.producer], [index[reader] for reader in tensor.readers]
            ends = {min(reader, inside.stop - 1) for reader in read if reader >= inside.start}
            start = max(producer, inside.start)
            for end in ends if producer < inside.stop and tensor.size else ():
                if start < end:
                    sizes[start, end] = sizes.get((start, end), 0) + tensor.size
        return tuple((*pair, size) for pair, size in sorted(sizes.items()))

    def borrowed(self, inside: range) -> int:
        """Bytes per sample that a stage of the layers ``inside`` keeps as copies of borrowed tensors made before it."""
        if not any(tensor.borrowed for tensor in self.tensors):
            return 0
        before = {layer.name for layer in self.layers[: inside.start]}
        inner = {layer.name for layer in self.layers[inside.start : inside.stop]}
        lent = (tensor for tensor in self.tensors if tensor.borrowed and tensor.producer in before)
        return sum(tensor.size for tensor in lent if not inner.isdisjoint(tensor.readers))

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The layers as a directed graph; nodes carry their ``Layer`` under ``layer``."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from((layer.name, {"layer": layer}) for layer in self.layers)
        graph.add_edges_from(self.edges)
        return graph


_ADAM = 16
"""Bytes of a trainable parameter item with Adam in fp32: weight, gradient and two moments."""
_NAMED = 4  # modules that a note names at most


def dead_note(dead: Collection[DeadParameters], parameters: int, goal: str) -> tuple[str, ...]:
    """A line on dead parameters, if there are any: their number, modules, cost and remedy."""
    if not dead:
        return ()
    items = sum(group.items for group in dead)
    largest = [group.path for group in sorted(dead, key=lambda group: -group.items)]
    more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
    return (
        f"{format_count(items)} of {format_count(parameters)} parameters never reach {goal}: "
        f"{', '.join(largest[:_NAMED])}{more}. They train nothing and cost {format_bytes(_ADAM * items)} of states "
        "with Adam in fp32: use what these modules give, or remove them.",
    )
