"""Recomputation: activations that forward discards are computed again in backward (Chen et al. 2016).

Communication of the operators that run again is repeated:

- Full: all communication of forward.
- Selective, attention's core runs again (Korthikanti et al. 2022, section 5): the ring of context parallelism, which is
  inside the core; no collective of tensor parallelism.
- Selective, matmuls with weights run again (torchtitan's per-operator policy, which keeps reduce-scatters): gathers of
  their inputs, and the ring (or Ulysses' all-to-alls) unless the core is kept.
- Selective, all but matmuls and attention runs again (PyTorch's per-operator policy): all communication of forward but
  the ring, whose kernel is kept, and the sums that end regions of tensor parallelism (``recompute.sums``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from galvatron_lite.arrays import Whole, is_option, largest, never, where
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute
from galvatron_lite.parallelism.base import (
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    drop_unused,
)
from galvatron_lite.parallelism.context.cost import ULYSSES
from galvatron_lite.parallelism.ranks import Either
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.cost import copying, regions


@dataclass(frozen=True, slots=True)
class RecomputeDimension(Dimension):
    """What forward discards and backward computes again."""

    name: str = "recompute"

    runs = ("recompute",)
    fields = (
        StrategyField("recompute", "recompute", ("ckpt", "checkpointing", "ac"), "none, selective or full",
                      {**{choice.value: choice for choice in Recompute}, "off": Recompute.NONE, "on": Recompute.FULL}),
    )  # fmt: skip
    forbids = MappingProxyType({"recompute": ("recompute",), "ckpt": ("recompute",)})
    examples = "recompute, selective"

    def word(self, strategy: Strategy) -> str:
        """``recompute``, ``selective``."""
        return {Recompute.NONE: "", Recompute.FULL: "recompute", Recompute.SELECTIVE: "selective"}[strategy.recompute]

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        again = {Recompute.FULL: "computed again in backward"}
        again[Recompute.SELECTIVE] = "what is cheap is computed again in backward"
        return again.get(strategy.recompute, "")

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        mode = {"recompute": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(word)
        return None if mode is None else {"recompute": mode}

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        again = strategy.recompute
        return set() if again is Recompute.NONE else {f"{again.value} recomputation"}

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """The choices that ``capture`` could run."""
        return [{"recompute": choice} for choice in Recompute if choice in kind.kept]

    def reason(self, kind: LayerKind) -> str:
        """The choices that cannot run."""
        missing = [choice.value for choice in Recompute if choice not in kind.kept]
        return f"recompute: {kind.name} offers no {' or '.join(missing)} recomputation" if missing else ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Forward's communication so far is repeated in backward; recomputed compute is in the points of a profile.

        Must run after the dimensions that communicate inside forward (tensor, context, expert), and before those that
        communicate around it (ZeRO: parameters are still gathered when forward runs again).
        """
        full = is_option(strategy.recompute, Recompute.FULL)
        selective = is_option(strategy.recompute, Recompute.SELECTIVE)
        if never(full | selective):
            return work
        selective_count = _selective(kind)
        again = drop_unused(
            *(
                replace(
                    communication,
                    moment=Moment.BACKWARD,
                    count=where(full, communication.count, where(selective, selective_count(communication), 0)),
                )
                for communication in work.communications
                if communication.moment is Moment.FORWARD
            )
        )
        overhead = work.microbatch_overhead + copying(again, context)
        return replace(work.with_communications(*again), recompute=strategy.recompute, microbatch_overhead=overhead)


def _selective(kind: LayerKind) -> Callable[[Communication], Whole]:
    """Return how often selective recomputation repeats a communication of forward; see the module."""
    recomputed = [operator for operator in kind.operators if operator.again]
    core = any(_is_core(operator) for operator in recomputed)
    if any(operator.kind is OperatorClass.MATMUL and operator.weight_bytes for operator in recomputed):
        around_core = ("context", ULYSSES)
        return lambda call: (
            call.count * (core if call.cause in around_core else call.collective is Collective.ALL_GATHER)
        )
    if core:
        return lambda call: call.count * _is_ring(call)
    rows = regions(kind)[1]
    return lambda call: largest(call.count - rows, 0) if _is_sum(call) else call.count * (not _is_ring(call))


def _is_sum(communication: Communication) -> bool:
    sums = communication.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    return sums and communication.cause == "tensor"


def _is_core(operator: Operator) -> bool:
    """Whether an operator is in attention's core: the fused kernel, or a matmul of two activations."""
    plain = operator.kind is OperatorClass.MATMUL and operator.weight_bytes == 0
    return plain or operator.kind is OperatorClass.ATTENTION


def _is_ring(communication: Communication) -> bool:
    return communication.collective is Collective.SEND_RECV and communication.cause == "context"
