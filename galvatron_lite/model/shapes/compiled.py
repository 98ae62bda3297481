"""What a compiler (torch.compile, XLA) makes of a layer's calls: fewer kernels, fewer bytes, fewer kept tensors.

Runs of neighbouring element-wise and row-wise calls become one kernel that reads what enters the run and writes what
leaves it. What such a kernel can make again from tensors that are kept anyway is not kept, unless a matmul or attention
needs it in backward: then it would have to be written again. This is what the minimum cut of torch.compile's
partitioner finds in a chain of cheap calls (``min_cut_rematerialization_partition``, with
``ban_recompute_materialized_backward``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from galvatron_lite.model.shapes.calls import ShapeCall, Value
from galvatron_lite.model.shapes.keeping import Record


def compile_records(records: Sequence[Record], inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Record]:
    """The calls as a compiler runs them."""
    lean = _without_rebuilt(records, inputs)
    needed = _readers(lean)
    done: list[Record] = []
    start = 0
    for fusible, run in groupby(lean, key=lambda record: record[0].fusible):
        part = list(run)
        stop = start + len(part)
        done += _fused(part, needed, (start, stop), {value.key for value in outputs}) if fusible else part
        start = stop
    return done


def _without_rebuilt(records: Sequence[Record], inputs: Sequence[Value]) -> list[Record]:
    """Drop saved tensors that a fusible call can make again, from tensors that are saved, where only such read them."""
    saved = {value.key for call, _ in records for value in call.saved} | {value.key for value in inputs}
    wanted = {value.key for call, _ in records if not call.fusible for value in call.saved}
    again: set[int] = set()
    for call, _ in records:
        sources = {value.key for value in call.inputs if value.grad}
        if call.fusible and call.output.key not in sources | wanted and sources <= saved:
            again.add(call.output.key)
    return [(_rebuilding(call, again), operator) for call, operator in records]


def _rebuilding(call: ShapeCall, again: set[int]) -> ShapeCall:
    return replace(call, saved=tuple(value for value in call.saved if value.key not in again))


def _readers(records: Sequence[Record]) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for index, (call, _) in enumerate(records):
        for value in (*call.inputs, *call.saved):
            readers.setdefault(value.key, []).append(index)
    return readers


def _fused(
    run: Sequence[Record], readers: dict[int, list[int]], span: tuple[int, int], outputs: set[int]
) -> list[Record]:
    """The run's calls, their cost in one operator: what enters is read and what leaves is written, once.

    Backward reads the gradients of what leaves and what is saved, and writes the gradients of what enters.
    """
    made = {call.output.key: call.output for call, _ in run}
    enters = {v.key: v for call, _ in run for v in call.inputs if v.key not in made}
    saved = {v.key: v for call, _ in run for v in call.saved}
    leaves = [
        v for key, v in made.items()
        if key in outputs or key in saved or any(not span[0] <= index < span[1] for index in readers.get(key, ()))
    ]  # fmt: skip
    new_saved = [v for key, v in saved.items() if key not in enters and key not in made]
    moved = sum(v.bytes for v in (*enters.values(), *leaves, *new_saved))
    backward = sum(v.bytes for v in (*(v for v in (*leaves, *enters.values()) if v.grad), *saved.values()))
    operators = [operator for _, operator in run]
    widest = max(operators, key=lambda operator: operator.moved)
    total = replace(
        widest,
        name="+".join(dict.fromkeys(operator.name for operator in operators)),
        moved=min(moved, sum(operator.moved for operator in operators)),
        backward_moved=min(backward, sum(operator.backward_moved for operator in operators)),
        weight_bytes=sum(operator.weight_bytes for operator in operators),
        statistics=sum(operator.statistics for operator in operators),
        count=1,
    )
    silent = replace(total, name="", moved=0, backward_moved=0, weight_bytes=0, statistics=0, count=0)
    return [(run[0][0], total), *((call, silent) for call, _ in run[1:])]
