"""What is trained: a model as layers, with everything the planner needs to know of each.

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
    """What is thrown away in forward and computed again in backward."""

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
    """A figure in three parts by how tensor parallelism of degree t divides it."""

    tensor: Flops = 0  # the part that is divided by t
    sequence: Flops = 0  # the part that is divided by t where sequence parallelism is on
    whole: Flops = 0  # the part that every device holds or does in full

    def at(self, degree: Whole, sequence_parallel: Flag) -> Real:
        """The figure on one device under tensor parallelism of this degree; an array where there are several."""
        shared = where(sequence_parallel, self.sequence / degree, self.sequence)
        return self.tensor / degree + shared + self.whole

    @property
    def total(self) -> int:
        """The figure on one device that holds the whole layer."""
        return self.tensor + self.sequence + self.whole


@dataclass(frozen=True, slots=True)
class Operator(Strict):
    """One kind of call inside a layer."""

    name: Name  # where it comes from, for people (``attention.qkv``, ``mlp.act``)
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
    # whether selective recompute runs it again; where no operator of a layer says so, all memory-bound ones are
    again: bool = False
    precision: str = ""  # it computes in, where that is not the graph's (``fp8`` matmuls among bf16 activations)
    channels_last: bool = False  # of a convolution: whether a pixel's channels lie side by side in memory (NHWC)
    # items that are summed over all pixels before the operator's result is known (sums and squares of a batch
    # normalisation's channels, a mean over the picture)
    statistics: Flops = 0
    frozen: bool = False  # its weights get no gradient
    reads: Count = 0  # of a matmul with weights: number of the tensor that it multiplies, in its layer; 0: not known


@dataclass(frozen=True, slots=True)
class SplitDims(Strict):
    """Extents along which a layer can be split; 0 where it has no such extent."""

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
    """Tensors of one size with which regions of a tensor group begin or end, and collectives of them in one pass."""

    bytes: Size  # of a sample, all devices' shares together
    shared: bool = False  # under sequence parallelism; else without
    begins: Count = 0  # gathers in forward, of shared tokens
    ends: Count = 0  # sums in forward, which scatter shared tokens
    returns: Count = 0  # sums of gradients where regions begin, which scatter shared tokens
    resumes: Count = 0  # gathers of gradients where regions end, of shared tokens
    regathers: Count = 0  # gathers in backward of what begins, where a share of it was kept


@dataclass(frozen=True, slots=True)
class Routing(Strict):
    """How the tokens of a mixture go to its experts."""

    choices: Size = 0  # experts that a token visits; 0: not known
    unique: bool = (
        False  # whether a rank and a node are sent one copy of a token, however many of its experts they hold
    )
    groups: Size = 1  # groups that experts form, and of how many of them a token visits experts at most
    chosen_groups: Size = 1
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
    # the largest tensor-parallel degree the layer's structure allows; a degree is legal where it divides this number.
    # 1: tensor parallelism is not offered
    tensor_degrees: Samples = 1
    tensor_reason: str = ""  # why tensor parallelism is limited or not offered; empty where nothing is to be said
    # all-gathers plus reduce-scatters (or as many all-reduces with half the pairs) of the boundary tensor that tensor
    # parallelism costs in one forward pass: 4 for a transformer block (two gather/scatter pairs)
    tensor_collectives: Count = 0
    # whether the layer outside its sharded regions works token by token, so that sequence parallelism may be used
    sequence_parallel: bool = False
    # bytes per sample of an output that is gathered over the tensor group after a column-split last matmul (the
    # logits of an LM head), but where the loss is computed on its shares; 0 where nothing is
    gathered_output_bytes: Size = 0
    # bytes per sample that each device of a tensor group gives of a loss on shares of that output, in one gather of
    # forward; 0 where the loss needs it whole
    loss_bytes: Size = 0
    # bytes per sample that backward of such a loss works with less than that of one on whole logits, the shares of
    # all devices together: it needs no logarithms of likelihoods beside the logits
    spared_bytes: Size = 0
    # how many regions whose first matmul is split by columns begin in one forward pass: each gathers the input under
    # sequence parallelism, and in backward sums (and scatters) its gradient. None: half of ``tensor_collectives``
    tensor_gathers: Count | None = None
    # how many regions whose last matmul is split by rows end: each sums (and scatters, under sequence parallelism)
    # the output, and in backward gathers its gradient under sequence parallelism. None: half of
    # ``tensor_collectives``
    tensor_scatters: Count | None = None
    # all-gathers of the input in one backward pass under sequence parallelism beyond those, where only a shard of
    # gathered inputs is kept and nothing is recomputed
    regathers: Count = 0
    regathers_recomputed: Count = 0  # the same where the layer is recomputed
    # all of these collectives, where the counts above do not tell: adapters begin and end with narrow tensors, and of
    # what is frozen not every gradient is summed or gathered. Empty: they do
    boundaries: tuple[TensorBoundary, ...] = ()
    # the part of ``parameters`` that belongs to experts, which expert parallelism divides; of ``parameters.tensor``
    # where tensor parallelism is offered
    expert_parameters: Size = 0
    # bytes per sample of the copies of tokens that go to experts in one forward pass; as many come back, and the same
    # goes both ways in backward
    dispatched_bytes: Size = 0
    routing: Routing = Routing()  # how tokens go to experts
    # why the layer's code does not run on shares of ``filters`` or ``channels``, by name; empty where it does
    channel_reasons: dict[str, str] = field(default_factory=dict)
    context_reason: str = ""  # why the layer's code does not run on shares of the tokens; empty where it does
    expert_reason: str = ""  # why the experts of a mixture cannot be spread; empty where nothing is to be said
    frozen: TensorSplit = TensorSplit()  # the part of ``parameters`` that gets no gradient
    frozen_experts: Size = 0  # the part of ``expert_parameters`` that gets none

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
        """Parameter items without those of experts that a token does not visit."""
        choices, experts = self.routing.choices, self.dims.experts
        idle = self.expert_parameters * (experts - choices) // experts if choices and experts else 0
        return self.parameters.total - idle

    def with_copy(self, items: int, frozen: int = 0) -> LayerKind:
        """The kind with its own copy of so many shared parameters, which tensor parallelism splits as the owner's.

        Args:
            items: of the copy.
            frozen: those among them that get no gradient.
        """
        if items == 0:
            return self
        copied = replace(self.parameters, tensor=self.parameters.tensor + items)
        return replace(self, parameters=copied, frozen=replace(self.frozen, tensor=self.frozen.tensor + frozen))


@dataclass(frozen=True, slots=True)
class Layer(Strict):
    """A submodule, or several that run together, that the planner treats as one unit."""

    name: Name  # unique name, the module path for a block (``model.layers.0``), ``before`` or ``after`` else
    kind: Name  # key into ``ModelGraph.kinds``
    role: Role  # where it stands
    modules: tuple[str, ...] = ()  # paths of the modules it is made of, in the order they run


@dataclass(frozen=True, slots=True)
class Tie(Strict):
    """Parameters that two layers share (embedding and head)."""

    first: Name  # name of the layer that owns them
    second: Name  # name of the layer that uses them too; its kind's ``parameters`` do not count them
    parameters: Size  # items shared; 0: the two only have the same strategy
    frozen: Size = 0  # those among them that get no gradient


@dataclass(frozen=True, slots=True)
class Passed(Strict):
    """A tensor that goes from the layer that makes it to the layers that read it."""

    producer: Name  # name of the layer that makes it
    readers: tuple[Name, ...]  # names of layers, in the order they run; all run after the producer
    size: Size  # bytes per sample
    # whether autograd keeps it for readers other than the next layer, and their kinds do not count it: it is part of
    # what the producer keeps, and of a copy where a pipeline stage reads it and did not make it
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class DeadParameters(Strict):
    """Parameters of a module that never reach an output, or the loss where one was given."""

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
        tensors: what goes from layer to layer, by producer; empty means a chain: the next layer alone reads what a
            layer gives (its kind's ``output_bytes``).
        ties: shared parameters.
        source: where the graph comes from (``traced``, ``shapes``), for people.
        notes: what the reader should know (blocks without tensor parallelism and why).
        whole: why the layers cannot be on several pipeline stages; empty where they can.
        dead: parameters that train nothing.
        undivided: why several micro-batches train something else than one; empty where they do not.
        compares: what chooses what it runs by a number made of all samples; empty where nothing does.
        trains: of a closed form, which parameters train: what ``--trainable`` says, then the patterns of ``--freeze``;
            empty where all do.
        least_samples: the fewest samples that the model runs on in training (batch norm over rows needs two).
        folded: what a block takes or returns with samples times something else along dim 0, or samples along another
            dim, so that all layers must have the same samples; empty where there is nothing.
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
        """Parameter items that one token is multiplied by: of a mixture those of the experts it visits; a table that is
        looked up (before the blocks) counts none."""
        return sum(self.kinds[layer.kind].active_parameters for layer in self.layers if layer.role is not Role.BEFORE)

    @property
    def trainable(self) -> int:
        """Those of them that get a gradient."""
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
        place = {layer.name: number for number, layer in enumerate(self.layers)}
        pairs = {(tensor.producer, reader) for tensor in self.tensors for reader in tensor.readers}
        return tuple(sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]])))

    def crossing(self, cut: int) -> int:
        """Bytes per sample of all tensors made before layer ``cut`` (a place) and read by it or after it."""
        if not self.tensors:
            return self.kinds[self.layers[cut - 1].kind].output_bytes if 0 < cut < len(self.layers) else 0
        return self.crossings()[cut]

    def crossings(self) -> tuple[int, ...]:
        """``crossing`` of every place, 0 to the number of layers."""
        if not self.tensors:
            return tuple(self.crossing(cut) for cut in range(len(self.layers) + 1))
        place = {layer.name: number for number, layer in enumerate(self.layers)}
        steps = [0] * (len(self.layers) + 1)
        for tensor in self.tensors:
            steps[place[tensor.producer] + 1] += tensor.size
            steps[max(place[reader] for reader in tensor.readers) + 1] -= tensor.size
        return tuple(accumulate(steps))

    def exchanges(self, inside: range) -> tuple[tuple[int, int, int], ...]:
        """Pairs of places of a stage's layers between which tensors go, and the bytes per sample that do.

        Inside the stage a tensor goes straight from the layer that makes it to each layer that reads it. Tensors made
        before the stage come in as its first layer has them, and those read after it leave as its last layer has them.
        What goes between the same two layers goes together.
        """
        if not self.tensors:
            return tuple((left, right, self.crossing(right)) for left, right in pairwise(inside))
        place = {layer.name: number for number, layer in enumerate(self.layers)}
        sizes: dict[tuple[int, int], int] = {}
        for tensor in self.tensors:
            producer, read = place[tensor.producer], [place[reader] for reader in tensor.readers]
            ends = {min(reader, inside.stop - 1) for reader in read if reader >= inside.start}
            start = max(producer, inside.start)
            for end in ends if producer < inside.stop and tensor.size else ():
                if start < end:
                    sizes[start, end] = sizes.get((start, end), 0) + tensor.size
        return tuple((*pair, size) for pair, size in sorted(sizes.items()))

    def borrowed(self, inside: range) -> int:
        """Bytes per sample that a stage of the layers at ``inside`` keeps as copies of tensors made before it."""
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
"""Bytes that a trainable parameter item costs with Adam in fp32: itself, its gradient and two moments."""
_NAMED = 4  # modules that a note names at most


def dead_note(dead: Collection[DeadParameters], parameters: int, goal: str) -> tuple[str, ...]:
    """A line on dead parameters, where there are some: how many, which, what they cost, what to do."""
    if not dead:
        return ()
    items = sum(one.items for one in dead)
    largest = [one.path for one in sorted(dead, key=lambda one: -one.items)]
    more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
    return (
        f"{format_count(items)} of {format_count(parameters)} parameters never reach {goal}: "
        f"{', '.join(largest[:_NAMED])}{more}. They train nothing and cost {format_bytes(_ADAM * items)} of states "
        "with Adam in fp32: use what these modules give, or remove them.",
    )
