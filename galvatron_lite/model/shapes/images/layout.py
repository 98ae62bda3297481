"""Graphs as software runs them: pictures channels last, fused norms, partitions recomputed as one.

cuDNN has such kernels for 16 bits channels last (CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION; "cuDNN Developer Guide",
cudnnBatchNormalizationForwardTrainingEx), which NVIDIA's MXNet, PaddlePaddle and OneFlow use; XLA makes them for any
precision. Of three passes over a picture in forward and five in backward, as normalisation alone has them,
none is added by ReLU; the addition reads the shortcut, and backward writes its gradient.

torchgpipe checkpoints a partition of its pipeline, not the layers in it (Kim et al. 2020, arXiv:2004.09910, section 3):
of every micro-batch only what enters the partition is kept.
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
    TensorSplit,
)
from galvatron_lite.model.shapes.records import Division
from galvatron_lite.model.shapes.tape import Tape, assemble


def channels_last(graph: ModelGraph) -> ModelGraph:
    """The same graph, every convolution of which reads and writes pictures channels last (NHWC)."""

    def turned(kind: LayerKind) -> LayerKind:
        operators = (replace(one, channels_last=one.kind is OperatorClass.CONVOLUTION) for one in kind.operators)
        return replace(kind, operators=tuple(operators))

    return replace(graph, kinds={name: turned(kind) for name, kind in graph.kinds.items()})


def fused_norms(graph: ModelGraph) -> ModelGraph:
    """The same graph; what it keeps is left as it is."""
    return replace(graph, kinds={name: _fused(kind) for name, kind in graph.kinds.items()})


def _fused(kind: LayerKind) -> LayerKind:
    operators: list[Operator] = list(kind.operators[:1])
    for before, one in pairwise(kind.operators):
        if _is(one, "add") and _is(before, "norm"):
            # One pass of three in forward; in backward gradients are added up where the shortcut begins, and it has
            # its own to be written
            item = one.moved // 3
            operators.append(replace(one, moved=item, backward_moved=one.backward_moved + item, count=0))
        elif not (_is(one, "relu") and (_is(before, "norm") or _is(before, "add"))):
            operators.append(one)
    return replace(kind, operators=tuple(operators))


def _is(one: Operator, name: str) -> bool:
    return one.kind is OperatorClass.MEMORY and one.name.rstrip("0123456789").rsplit(".", 1)[-1] == name


def partitioned(graph: ModelGraph, balance: Sequence[int]) -> ModelGraph:
    """The same network with one block a partition; what stands before the blocks joins the first.

    Args:
        graph: a chain of layers.
        balance: layers of each partition; the last layer (the head) is one of the last partition's and stays apart.
    """
    if sum(balance) != len(graph.layers) or min(balance) < 1 or balance[-1] < 2:
        raise InputError("balance", list(balance), f"Give layers a partition that add up to {len(graph.layers)}.")
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    ends = list(accumulate(balance))
    ends[-1] -= 1
    starts = [0, *ends[:-1]]
    joined, blocks, where = list[LayerKind](), list[Layer](), {graph.layers[-1].name: "after"}
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        joined.append(_joined(f"partition{place}", kinds[start:end]))
        blocks.append(Layer(f"partitions.{place}", joined[-1].name, Role.BLOCK))
        where |= {layer.name: blocks[-1].name for layer in graph.layers[start:end]}
    tape = Tape(1)
    before = tape.kind("before", (tape.enter(kinds[0].input_bytes, Division.WHOLE, grad=False),), kinds[0].dims)
    all_kinds = [before, *joined, kinds[-1]]
    assembled = assemble(graph.name, all_kinds, blocks, sequence=graph.sequence, precision=graph.precision)
    tensors = []  # that go from one partition to others
    for tensor in graph.tensors:
        producer = where[tensor.producer]
        readers = [name for name in dict.fromkeys(where[reader] for reader in tensor.readers) if name != producer]
        tensors.append(replace(tensor, producer=producer, readers=tuple(readers)))
    return replace(assembled, tensors=tuple(tensor for tensor in tensors if tensor.readers))


def _joined(name: str, kinds: Sequence[LayerKind]) -> LayerKind:
    """Layers one after the other as one; recomputed, it keeps what enters the first."""
    before = [0, *accumulate(kind.kept[Recompute.NONE].total for kind in kinds)]
    kept = before[-1]

    def beyond(figure: str) -> TensorSplit:
        """Bytes at the worst moment of any layer, all before it kept, beyond what all keep."""
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
