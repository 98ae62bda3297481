"""A network's graph where batch normalisation, the addition of a shortcut and ReLU are one kernel.

cuDNN has such kernels for 16 bits channels last (CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION; "cuDNN Developer Guide",
cudnnBatchNormalizationForwardTrainingEx), which NVIDIA's MXNet, PaddlePaddle and OneFlow use; XLA makes them for any
precision. Of three passes over a picture in forward and five in backward, as normalisation alone has them,
none is added by ReLU; the addition reads the shortcut, and backward writes its gradient.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass


def fused_norms(graph: ModelGraph) -> ModelGraph:
    """The same graph; what it keeps is left as it is."""
    return replace(graph, kinds={name: _fused(kind) for name, kind in graph.kinds.items()})


def _fused(kind: LayerKind) -> LayerKind:
    found: list[Operator] = list(kind.operators[:1])
    for before, one in pairwise(kind.operators):
        if _is(one, "add") and _is(before, "norm"):
            found.append(_shortcut(one))
        elif not (_is(one, "relu") and (_is(before, "norm") or _is(before, "add"))):
            found.append(one)
    return replace(kind, operators=tuple(found))


def _is(one: Operator, name: str) -> bool:
    return one.kind is OperatorClass.MEMORY and one.name.rstrip("0123456789").rsplit(".", 1)[-1] == name


def _shortcut(one: Operator) -> Operator:
    """One pass of three in forward; in backward gradients are added up where the shortcut begins, and it has its own
    to be written."""
    item = one.moved // 3
    return replace(one, moved=item, backward_moved=one.backward_moved + item, count=0)
