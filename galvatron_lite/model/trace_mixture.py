"""What a layer's mixtures of experts hold and send, for expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from torch import nn

from galvatron_lite.model.trace_figures import CallFigures
from galvatron_lite.parallelism.expert.find import Mixture, find_mixtures


@dataclass(frozen=True, slots=True)
class MixtureFigures:
    """Mixtures of one layer; 0 where it has none whose experts can be spread."""

    experts: int = 0  # every divisor of it divides the experts of each mixture
    parameters: int = 0  # items of all experts
    dispatched_bytes: int = 0  # per sample, see ``LayerKind``
    reason: str = ""  # why experts cannot be spread


def mixture_figures(block: nn.Module, calls: Sequence[CallFigures]) -> MixtureFigures:
    """Figures of a block's mixtures.

    Args:
        block: on any device.
        calls: what it called, for one sample.
    """
    found = find_mixtures(block)
    reasons = [mixture.reason for mixture in found if mixture.reason]
    if not found or reasons:
        return MixtureFigures(reason="; ".join(reasons))
    parameters = [block.get_submodule(one.path).get_parameter(name) for one in found for name in one.parameters]
    return MixtureFigures(
        gcd(*(mixture.experts for mixture in found)),
        sum(parameter.numel() for parameter in parameters),
        sum(_sent(block, mixture, calls) for mixture in found),
    )


def _sent(block: nn.Module, mixture: Mixture, calls: Sequence[CallFigures]) -> int:
    """Bytes of the rows that a mixture's first matmul takes."""
    matmuls = (c for c in calls if c.path == mixture.path and c.groups > 1 and not c.backward)
    first = next(matmuls, None)
    if first is None:
        return 0
    rows = first.flops // (2 * prod(first.shape[1:]))
    weight = block.get_submodule(mixture.path).get_parameter(mixture.parameters[0])
    return rows * first.shape[1] * weight.element_size()
