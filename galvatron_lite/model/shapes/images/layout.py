"""Graphs as software runs them: pictures channels last, fused norms, partitions recomputed as one.

cuDNN has such kernels for 16 bits channels last (CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION; "cuDNN Developer Guide",
cudnnBatchNormalizationForwardTrainingEx), which NVIDIA's MXNet, PaddlePaddle and OneFlow use; XLA makes them for any
precision. Of three passes over a picture in forward and five in backward, as normalisation alone has them,
none is added by ReLU; the addition reads the shortcut, and backward writes its gradient.

torchgpipe checkpoints a partition of its pipeline, not the layers in it (Kim et al. 2020, arXiv:2004.09910, section 3):
of every micro-batch only what enters the partition is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import (
    Layer,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorClass,
    Passed,
    Recompute,
    Role,
    TensorSplit,
)
from galvatron_lite.model.shapes.records import Division
from galvatron_lite.model.shapes.tape import Tape, assemble


def channels_last(graph: ModelGraph) -> ModelGraph:
    """The same graph, every convolution of which reads and writes pictures channels last (NHWC)."""
    return replace(
        graph,
        kinds={
            name: replace(kind, operators=tuple(map(_turned, kind.operators))) for name, kind in graph.kinds.items()
        },
    )


def _turned(one: Operator) -> Operator:
    return replace(one, channels_last=True) if one.kind is OperatorClass.CONVOLUTION else one


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
    joined = [
        _joined(f"partition{place}", kinds[start:end])
        for place, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    blocks = [Layer(f"partitions.{place}", kind.name, Role.BLOCK) for place, kind in enumerate(joined)]
    tape = Tape(1)
    before = tape.kind("before", (tape.enter(kinds[0].input_bytes, Division.WHOLE, grad=False),), kinds[0].dims)
    all_kinds = [before, *joined, kinds[-1]]
    assembled = assemble(graph.name, all_kinds, blocks, sequence=graph.sequence, precision=graph.precision)
    where = {
        layer.name: block.name
        for block, start, end in zip(blocks, starts, ends, strict=True)
        for layer in graph.layers[start:end]
    } | {graph.layers[-1].name: "after"}
    return replace(assembled, tensors=_between(graph.tensors, where))


def _between(tensors: Sequence[Passed], where: Mapping[str, str]) -> tuple[Passed, ...]:
    """The tensors that go from one partition to others; ``where``: the partition of each layer."""
    moved = (
        replace(tensor, producer=where[tensor.producer], readers=tuple(dict.fromkeys(where[r] for r in tensor.readers)))
        for tensor in tensors
    )
    outside = (replace(t, readers=tuple(name for name in t.readers if name != t.producer)) for t in moved)
    return tuple(tensor for tensor in outside if tensor.readers)


def _joined(name: str, kinds: Sequence[LayerKind]) -> LayerKind:
    """Layers one after the other as one; recomputed, it keeps what enters the first."""
    kept = sum(kind.kept[Recompute.NONE].total for kind in kinds)
    return LayerKind(
        name=name,
        parameters=TensorSplit(whole=sum(kind.parameters.total for kind in kinds)),
        operators=tuple(operator for kind in kinds for operator in kind.operators),
        kept={Recompute.NONE: TensorSplit(whole=kept), Recompute.FULL: TensorSplit(whole=kinds[0].input_bytes)},
        working=TensorSplit(whole=_beyond(kept, kinds, [kind.working.total for kind in kinds])),
        forward_working=TensorSplit(whole=_beyond(kept, kinds, [kind.forward_working.total for kind in kinds])),
        input_bytes=kinds[0].input_bytes,
        output_bytes=kinds[-1].output_bytes,
        dims=kinds[0].dims,
        buffer_bytes=sum(kind.buffer_bytes for kind in kinds),
        tensor_reason=kinds[0].tensor_reason,
    )


def _beyond(kept: int, kinds: Sequence[LayerKind], live: Sequence[int]) -> int:
    """Bytes at the worst moment of any layer, all before it kept, beyond what all keep."""
    prefixes = accumulate(kind.kept[Recompute.NONE].total for kind in kinds)
    return max(0, max(prefix + more for prefix, more in zip(prefixes, live, strict=True)) - kept)
