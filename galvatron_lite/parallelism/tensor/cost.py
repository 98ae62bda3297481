"""Tensor parallelism: devices share the matmuls of each sample, with sequence parallelism also the tokens between.

Source of the communication counts: Korthikanti et al. 2022 (arXiv:2205.05198), section 4: per transformer block and
pass two all-reduces, or with sequence parallelism two all-gathers and two reduce-scatters, of the hidden state.

A region begins with a column-split matmul and ends with a row-split matmul. A head has only a beginning, an embedding
only an end. Costs of the beginning (f of section 4.2.1) and of the end (its conjugate g):

                 forward, plain   backward, plain   forward, sequence   backward, sequence
    beginning    nothing          all-reduce        all-gather          reduce-scatter
    end          all-reduce       nothing           reduce-scatter      all-gather

If only a share of the gathered input is saved (section 4.2.2), it is gathered again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from galvatron_lite.arrays import Flag, Real, Whole, is_option, largest, never, opposite, up, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, Recompute, TensorBoundary, TensorSplit
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    SWITCH,
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    degree_in,
    drop_unused,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, group_along
from galvatron_lite.parallelism.strategy import Strategy

NAME = "tensor"
ASYNC = "tensor-async"
"""Cause of collectives that the matmul of weight gradients can hide: those of the input's gradient. Other software
hides a share of them (``StackConstants.hidden``); our runtime waits for them."""


@dataclass(frozen=True, slots=True)
class TensorDimension(Dimension):
    """Devices that share the matmuls of each sample."""

    name: str = "tensor"
    degree: str = "tensor"

    axes = (MeshAxis("tensor", Part.MATMULS),)
    runs = ("tensor", "sequence_parallel")
    purposes = (Purpose.ACTIVATIONS,)
    causes = (ASYNC,)
    fields = (
        StrategyField("tensor", "tensor", ("tp",), "tensor-parallel degree", splits=True),
        StrategyField("sequence_parallel", "sequence", ("sp", "sequence_parallel"), "on or off, beside tensor", SWITCH,
                      remedy="Give on or off."),
    )  # fmt: skip
    forbids = MappingProxyType(
        {"tensor": ("tensor",), "tp": ("tensor",), "sequence": ("sequence",), "sp": ("sequence",)}
    )
    parts = MappingProxyType({"tensor": ("tensor",), "sequence": ("sequence_parallel",)})
    examples = "tensor2, tensor2+sp"

    def word(self, strategy: Strategy) -> str:
        """``tensor2+sp``."""
        return f"tensor{strategy.tensor}" + "+sp" * strategy.sequence_parallel if strategy.tensor > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        words = f"matmuls shared by {strategy.tensor}" + ", tokens between them too" * strategy.sequence_parallel
        return words if strategy.tensor > 1 else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        shared = word.endswith("+sp")
        degree = degree_in(word.removesuffix("+sp"), "tensor")
        if degree is None:
            return None
        return {"tensor": degree, "sequence_parallel": True} if shared else {"tensor": degree}

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        used = ("tensor", strategy.tensor > 1), ("sequence parallelism", strategy.sequence_parallel)
        return {name for name, uses in used if uses}

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:
        """See ``Dimension.shrunk``."""
        return [{"sequence_parallel": strategy.sequence_parallel and smaller.tensor > 1}]

    def layout(self, strategy: Strategy) -> dict[str, int]:
        """See ``Dimension.layout``."""
        return {"sequence": strategy.tensor} if strategy.sequence_parallel else {}

    def fault(self, strategy: Strategy) -> tuple[str, str] | None:
        """Shares of tokens without slices."""
        legal = strategy.tensor > 1 or not strategy.sequence_parallel
        return None if legal else ("sequence_parallel", "It needs a tensor degree above 1.")

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or the divisors of ``devices`` that the structure allows, without and with sequence parallelism."""
        legal = [degree for degree in divisors(devices)[1:] if kind.tensor_degrees % degree == 0]
        shared = [degree for degree in legal if kind.sequence_parallel and kind.dims.sequence % degree == 0]
        choices = [*((degree, False) for degree in (1, *legal)), *((degree, True) for degree in shared)]
        return [{"tensor": degree, "sequence_parallel": sequence} for degree, sequence in choices]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Within a node: its collectives block each layer twice a pass."""
        return room.fits_node(chosen["tensor"])

    def reason(self, kind: LayerKind) -> str:
        """The limit that ``capture`` found in the structure."""
        return f"tensor: {kind.name}: {kind.tensor_reason}" if kind.tensor_reason else ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """A slice of the parameters, and the collectives at region boundaries in both passes.

        Must run before the other dimensions, which shard the slices.
        """
        degree, split = strategy.tensor, strategy.tensor > 1
        if never(split):
            return work
        shared = strategy.sequence_parallel & split
        group = group_along(strategy, "tensor")
        samples = work.samples / strategy.token_degree
        regathers = shared & is_option(strategy.recompute, Recompute.NONE)
        # kinds count shards as saved and transient memory, not the inputs of regions that are gathered for columns
        gathered = up(where(regathers, int(kind.regathers > 0) * kind.input_bytes * samples * (1 - 1 / degree), 0.0))
        activations = drop_unused(
            *_at_regions(kind, strategy, samples, group), *_at_loss(kind, strategy, samples, group)
        )
        # parameters used on shares of tokens (norms) have partial gradients
        partial = (kind.parameters.whole - kind.frozen.whole) * context.reduce_item_bytes
        count = shared * int(partial > 0)
        summed = Communication(Collective.ALL_REDUCE, partial, group, Moment.STEP, False, count, self.name)
        working, forward = kind.working, kind.forward_working
        return replace(
            work.with_parameters(
                where(split, kind.parameters.at(degree, shared), work.parameters),
                where(split, kind.frozen.at(degree, shared), work.frozen_items),
            ).with_communications(*activations, summed),
            tensor=degree,
            sequence_parallel=shared,
            microbatch_overhead=work.microbatch_overhead + self._waiting(activations, context),
            edge_bytes=work.edge_bytes + _full_logits(kind.kept[Recompute.NONE], kind, strategy, samples),
            edge_working=(
                _full_logits(working, kind, strategy, samples, kind.spared_bytes) + gathered,
                _full_logits(forward, kind, strategy, samples) + gathered,
            ),
        )

    def _waiting(self, communications: Sequence[Communication], context: DimensionContext) -> Real:
        """Host seconds of blocking collectives beside their transfers."""
        fixed, per_byte = (context.host.get(name, 0.0) for name in (self.name, f"{self.name}_per_byte"))
        if not fixed and not per_byte:
            return copying(communications, context)
        waiting = sum(
            communication.count * (fixed + per_byte * communication.size)
            for communication in communications
            if not communication.overlaps
        )
        return waiting + copying(communications, context)


def _at_regions(kind: LayerKind, strategy: Either, samples: Real, group: RankGroup) -> Iterator[Communication]:
    """The collectives at the boundaries of regions (see the module), and those that gather inputs again.

    Shares of tokens are sent to experts without a gather; ``expert`` prices their exchange.
    """
    split = strategy.tensor > 1
    shared, plain = strategy.sequence_parallel & split, opposite(strategy.sequence_parallel) & split
    at_experts = (shared & (strategy.expert > 1)) * int(kind.expert_parameters > 0)
    recomputes = opposite(is_option(strategy.recompute, Recompute.NONE))
    for boundary in boundaries(kind):
        size, used = boundary.bytes * samples, shared if boundary.shared else plain
        gathered = size * gathered_share(kind)
        reduction = Collective.REDUCE_SCATTER if boundary.shared else Collective.ALL_REDUCE
        fewer = at_experts * int(boundary.bytes in (kind.input_bytes, kind.output_bytes))
        begins, ends, returns, resumes = (
            used * largest(count - fewer, 0)
            for count in (boundary.begins, boundary.ends, boundary.returns, boundary.resumes)
        )
        regathers = boundary.regathers * where(recomputes, int(kind.regathers_recomputed > 0), int(kind.regathers > 0))
        calls: tuple[tuple[Moment, Collective, Real, Whole, str], ...] = (
            (Moment.FORWARD, Collective.ALL_GATHER, gathered, begins, NAME),
            (Moment.FORWARD, reduction, size, ends, NAME),
            (Moment.BACKWARD, Collective.ALL_GATHER, gathered, resumes, NAME),
            (Moment.BACKWARD, reduction, size, returns, ASYNC),
            (Moment.BACKWARD, Collective.ALL_GATHER, gathered, used * regathers, ASYNC),
        )
        for moment, collective, bytes_, count, cause in calls:
            yield Communication(collective, bytes_, group, moment, False, count, cause)


def _at_loss(kind: LayerKind, strategy: Either, samples: Real, group: RankGroup) -> Iterator[Communication]:
    """The collectives of logits and of a loss on shares of them (``parallelism.vocabulary``), all in forward.

    Logits are gathered (their gradient is only sliced), or the loss gathers figures of each token. A loss inside the
    layer all-reduces three fp32 figures of each token: the greatest logit, the target's logit and the sum of
    exponentials (Megatron-Core's ``vocab_parallel_cross_entropy``).
    """
    split, stays = strategy.tensor > 1, _stays_split(kind, strategy)
    begins, ends = regions(kind)
    inside = kind.dims.vocab > 0 and not kind.gathered_output_bytes and begins > 0 and not ends
    logits, figures = kind.gathered_output_bytes, kind.loss_bytes
    for collective, size, count in (
        (Collective.ALL_GATHER, logits * samples, (split & opposite(stays)) * int(logits > 0)),
        (Collective.ALL_GATHER, figures * samples * group.size, (split & stays) * int(figures > 0)),
        (Collective.ALL_REDUCE, 4 * kind.dims.sequence * samples, split * 3 * inside),
    ):
        yield Communication(collective, size, group, Moment.FORWARD, False, count, NAME)


def _full_logits(bytes_: TensorSplit, kind: LayerKind, strategy: Either, samples: Real, spared: int = 0) -> Whole:
    """Bytes of full logits beyond those of shares, if tokens are shared and logits gathered.

    ``bytes_``: of a sample; ``spared``: what a loss on shares saves of them, in all shares together.
    """
    if kind.loss_bytes == 0:
        return 0
    size = bytes_.tensor * samples
    gathered = (strategy.tensor > 1) & opposite(_stays_split(kind, strategy))
    return up(where(gathered, size - (size - spared * samples) / strategy.tensor, 0.0))


def copying(communications: Sequence[Communication], context: DimensionContext) -> Real:
    """Return the seconds that copying of gathered or scattered tensors takes (``HostOverhead.gathered_per_byte``)."""
    per_byte = context.host.get("gathered_per_byte", 0.0)
    if not per_byte:
        return 0.0
    return per_byte * sum(
        communication.count * communication.size
        for communication in communications
        if communication.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )


def regions(kind: LayerKind) -> tuple[int, int]:
    """Return how many regions begin and how many end in a forward pass."""
    half = kind.tensor_collectives // 2
    begins = half if kind.tensor_gathers is None else kind.tensor_gathers
    return begins, half if kind.tensor_scatters is None else kind.tensor_scatters


def gathered_share(kind: LayerKind) -> float:
    """Return the bytes that sequence parallelism gathers, over the bytes of the tensor.

    Inputs and output gradients of fp8 matmuls are cast before they are gathered (TransformerEngine,
    ``gather_along_first_dim`` of quantized inputs; torchao's ``Float8ColwiseParallel``), unless scales are rowwise.
    Reductions are not cast.
    """
    return 0.5 if any(operator.precision == "fp8" for operator in kind.operators) else 1.0


def boundaries(kind: LayerKind) -> tuple[TensorBoundary, ...]:
    """Return the tensors with which regions begin and end, and how often each is communicated.

    A kind without boundaries has regions that begin with the layer's input and end with its output. If it does not
    count regions either, both are the output, or the input if the output is gathered.
    """
    if kind.boundaries:
        return kind.boundaries
    entering, leaving = kind.input_bytes, kind.output_bytes
    if kind.tensor_gathers is None and kind.tensor_scatters is None:
        entering = leaving = kind.input_bytes if kind.gathered_output_bytes else kind.output_bytes
    begins, ends = regions(kind)
    again = max(kind.regathers, kind.regathers_recomputed)
    plain = TensorBoundary(leaving, ends=ends, returns=begins)
    shared = TensorBoundary(leaving, True, begins, ends, begins, ends, again)
    if entering == leaving:
        return plain, shared
    inward = (replace(boundary, bytes=entering, ends=0, resumes=0) for boundary in (plain, shared))
    return *inward, replace(plain, returns=0), replace(shared, begins=0, returns=0, regathers=0)


def _stays_split(kind: LayerKind, strategy: Either) -> Flag:
    """Whether logits stay shares of the vocabulary: not if context ranks share tokens too."""
    return (strategy.context == 1) & (kind.loss_bytes > 0)
