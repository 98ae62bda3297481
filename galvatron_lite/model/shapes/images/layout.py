"""Graphs of image networks as other software runs them: channels last, fused norms, recomputed partitions.

cuDNN has such kernels for 16 bits channels last (CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION; "cuDNN Developer Guide",
cudnnBatchNormalizationForwardTrainingEx), which NVIDIA's MXNet, PaddlePaddle and OneFlow use; XLA makes them for any
precision. Normalisation alone passes three times over a picture in forward and five times in backward; a fused ReLU
adds none, and a fused addition reads the shortcut in forward and writes its gradient in backward.

torchgpipe checkpoints a partition of its pipeline, not the layers in it (Kim et al. 2020, arXiv:2004.09910, section 3):
it keeps only the input of the partition for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import (
    Layer,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorClass,
    Recompute,
    Role,
    Sharding,
    TensorSplit,
)
from galvatron_lite.model.shapes.tape import Tape, assemble


def channels_last(graph: ModelGraph) -> ModelGraph:
    """Return the graph with convolutions that read and write pictures channels last (NHWC)."""

    def with_channels_last(kind: LayerKind) -> LayerKind:
        operators = (replace(op, channels_last=op.kind is OperatorClass.CONVOLUTION) for op in kind.operators)
        return replace(kind, operators=tuple(operators))

    return replace(graph, kinds={name: with_channels_last(kind) for name, kind in graph.kinds.items()})


def fused_norms(graph: ModelGraph) -> ModelGraph:
    """Return the graph with ReLU and additions fused into the norms before them; what it keeps does not change."""
    return replace(graph, kinds={name: _with_fused_norms(kind) for name, kind in graph.kinds.items()})


def _with_fused_norms(kind: LayerKind) -> LayerKind:
    operators: list[Operator] = list(kind.operators[:1])
    for before, operator in pairwise(kind.operators):
        if _is_memory(operator, "add") and _is_memory(before, "norm"):
            passed = operator.moved // 3  # bytes of the shortcut, read in forward, and of its gradient
            backward_moved = operator.backward_moved + passed
            operators.append(replace(operator, moved=passed, backward_moved=backward_moved, count=0))
        elif not (_is_memory(operator, "relu") and (_is_memory(before, "norm") or _is_memory(before, "add"))):
            operators.append(operator)
    return replace(kind, operators=tuple(operators))


def _is_memory(operator: Operator, name: str) -> bool:
    """Whether an operator is memory-bound and has a name, apart from its number."""
    return operator.kind is OperatorClass.MEMORY and operator.name.rstrip("0123456789").rsplit(".", 1)[-1] == name


def partitioned(graph: ModelGraph, balance: Sequence[int]) -> ModelGraph:
    """Join the layers of each partition to one block; the layers before the blocks join the first.

    Args:
        graph: a chain of layers.
        balance: layers of each partition; the last layer (the head) counts in the last partition and stays apart.

    Raises:
        InputError: layers do not add up, or a partition has none.
    """
    if sum(balance) != len(graph.layers) or min(balance) < 1 or balance[-1] < 2:
        raise InputError("balance", list(balance), f"Give layers a partition that add up to {len(graph.layers)}.")
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    ends = list(accumulate(balance))
    ends[-1] -= 1
    starts = [0, *ends[:-1]]
    joined, blocks, where = list[LayerKind](), list[Layer](), {graph.layers[-1].name: "after"}
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        joined.append(_joined(f"partition{index}", kinds[start:end]))
        blocks.append(Layer(f"partitions.{index}", joined[-1].name, Role.BLOCK))
        where |= {layer.name: blocks[-1].name for layer in graph.layers[start:end]}
    tape = Tape(1)
    before = tape.kind("before", (tape.enter(kinds[0].input_bytes, Sharding.NONE, grad=False),), kinds[0].dims)
    all_kinds = [before, *joined, kinds[-1]]
    assembled = assemble(graph.name, all_kinds, blocks, sequence=graph.sequence, precision=graph.precision)
    tensors = []  # from one partition to others
    for tensor in graph.tensors:
        producer = where[tensor.producer]
        readers = [name for name in dict.fromkeys(where[reader] for reader in tensor.readers) if name != producer]
        tensors.append(replace(tensor, producer=producer, readers=tuple(readers)))
    return replace(assembled, tensors=tuple(tensor for tensor in tensors if tensor.readers))


def _joined(name: str, kinds: Sequence[LayerKind]) -> LayerKind:
    """Consecutive layers as one; recomputed, it keeps the input of the first."""
    before = [0, *accumulate(kind.kept[Recompute.NONE].total for kind in kinds)]
    kept = before[-1]

    def beyond(figure: str) -> TensorSplit:
        """Bytes at the worst moment of any layer, with all that earlier layers keep, beyond what all layers keep."""
        moments = (
            held + kind.kept[Recompute.NONE].total + getattr(kind, figure).total
            for held, kind in zip(before, kinds, strict=False)
        )
        return TensorSplit(whole=max(0, max(moments) - kept))

    return LayerKind(
        name=name,
        parameters=TensorSplit(whole=sum(kind.parameters.total for kind in kinds)),
        operators=tuple(operator for kind in kinds for operator in kind.operators),
        kept={Recompute.NONE: TensorSplit(whole=kept), Recompute.FULL: TensorSplit(whole=kinds[0].input_bytes)},
        working=beyond("working"),
        forward_working=beyond("forward_working"),
        input_bytes=kinds[0].input_bytes,
        output_bytes=kinds[-1].output_bytes,
        dims=kinds[0].dims,
        buffer_bytes=sum(kind.buffer_bytes for kind in kinds),
        tensor_reason=kinds[0].tensor_reason,
    )
