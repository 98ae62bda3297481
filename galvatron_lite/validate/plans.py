"""Builds the plan of a published run, stages and strategies, from the degrees and words of its row.

Defaults of what a run does not state: no recomputation; the framework's ZeRO stage; under a pipeline one sample a
micro-batch (or as the framework splits the batch), else the samples of one accumulation step; 1F1B; blocks spread
evenly over the pipeline; experts not sliced (``--expert-tensor-parallel-size 1``, as in Megatron-Core's recipes).

A run that ran did fit its devices. If its plan does not, ``fitting`` changes what the run leaves open, cheapest first:
optimizer states sharded over the replicas (ZeRO-1, with no more traffic), selective recomputation in all blocks, full
recomputation of as few of each stage's first blocks as needed (Megatron-LM's ``--recompute-method block``).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import gcd

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.model.graph import Layer, ModelGraph, OperatorClass, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, Plan, Schedule, Stage, layer_runs
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun

_SCHEDULES = {
    r"zb-?v": Schedule.ZERO_BUBBLE_V, "zb-2p|zb-h2": Schedule.ZERO_BUBBLE_2P, "zb-1p|zb-h1": Schedule.ZERO_BUBBLE_1P,
    "gpipe": Schedule.GPIPE,
}  # fmt: skip


def compute_precision(text: str | None, device: Device, multiplies_tf32: bool = False) -> str:
    """Return the precision of matmuls that a text states, as estimates name it; bf16 by default.

    ``multiplies_tf32``: whether the software multiplies fp32 in TF32 by default.
    """
    word = (text or "bf16").lower()
    if "fp4" in word:
        return "nvfp4"
    if "fp8" in word:
        if "rowwise" in word:
            return "fp8-rowwise"
        return "mxfp8" if "mxfp8" in word else "fp8"
    if "bf16" in word and "fp16" not in word:
        return "bf16"
    if "fp16" in word:
        return "fp16"
    if "tf32" in word or (multiplies_tf32 and "fp32" in word and "bf16" not in word):
        return "tf32" if "tf32" in device.peak else "fp32"
    return "fp32" if "fp32" in word else "bf16"


def recompute_of(text: str | None) -> Recompute:
    """Return the recomputation that a text states; none by default."""
    word = (text or "none").lower()
    if word.startswith("full"):
        return Recompute.FULL
    return Recompute.SELECTIVE if word.startswith("selective") else Recompute.NONE


def schedule_of(text: str | None, virtual: int) -> Schedule:
    """Return the schedule that a text states; by default 1F1B, or interleaved with virtual stages."""
    word = (text or "").lower()
    for words, schedule in _SCHEDULES.items():
        if re.search(words, word):
            return schedule
    return Schedule.INTERLEAVED if "interleaved" in word or virtual > 1 else Schedule.ONE_F_ONE_B


def argument(notes: str, name: str) -> str | None:
    """Return the value of a command-line argument quoted in the notes (``kv-channels=128``)."""
    match = re.search(rf"(?<![\w-]){re.escape(name)}=([^,;\s]+)", notes)
    return match[1] if match else None


def integer_argument(notes: str, name: str) -> int | None:
    """Return the same as an integer; None if it is not one."""
    value = argument(notes, name)
    return int(value) if value and value.isdigit() else None


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step."""

    size: int  # samples of a step
    microbatch: int  # samples of one micro-batch over all replicas
    count: int  # micro-batches


def batch_of(run: PublishedRun) -> Batch:
    """Return the batch of a run: ``global_batch = dp x micro_batch x count``."""
    replicas, stages = run.dp or 1, run.pp or 1
    if run.grad_accum is not None and run.grad_accum < 1:
        raise SkipError("batch does not divide", f"grad_accum: {run.grad_accum:g} is less than one micro-batch a step.")
    samples, left = run.micro_batch or 1, (run.global_batch or 0) // replicas
    if run.micro_batch is None and stages > 1:
        by_stage = left and left % stages == 0 and match_stack(run.framework).splits_by_stage
        samples = left // stages if by_stage else 1
    elif run.micro_batch is None and run.global_batch:
        samples = max(int(run.global_batch // (replicas * (run.grad_accum or 1))), 1)
    each = replicas * samples
    if run.global_batch is None:
        count = int(run.grad_accum or 1)
        return Batch(each * count, each, count)
    if run.global_batch % each:
        message = f"global_batch: {run.global_batch} is no multiple of dp x micro_batch ({replicas} x {samples})."
        message += " Leave devices that only evaluate out of n_gpus; give spatial if devices share samples."
        raise SkipError("batch does not divide", message)
    return Batch(run.global_batch, each, run.global_batch // each)


def plan_of(run: PublishedRun, graph: ModelGraph, stack: Stack, precision: str) -> Plan:
    """Return the plan of a run.

    Raises:
        SkipError: a plan that cannot be represented.
    """
    batch, devices = batch_of(run), run.n_gpus
    if devices is None:
        raise SkipError("number of GPUs not stated", "Give n_gpus.")
    degrees = (run.dp or 1, run.tp or 1, run.pp or 1, run.cp or 1)
    if degrees[0] * degrees[1] * degrees[2] * degrees[3] != devices:
        product = " x ".join(map(str, degrees))
        remedy = "Give the degree that is missing, such as spatial, or leave dp out."
        raise SkipError(
            "degrees do not multiply to the number of GPUs",
            f"dp x tp x pp x cp: {product}, n_gpus: {devices}. {remedy}",
        )
    if (run.spatial or 1) > 1 or (run.filter or 1) > 1:
        raise SkipError("spatial or filter parallelism")  # image networks: ``predict_shared``
    schedule, virtual = _schedule(run, stack)
    counts = _stage_sizes(run, graph, virtual * degrees[2], stack)
    return Plan(
        version=PLAN_VERSION,
        model=graph.name,
        devices=devices,
        global_batch=batch.size,
        microbatches=batch.count,
        schedule=schedule,
        precision=precision,
        stages=_stages(run, graph, stack, counts),
        virtual_stages=virtual,
    )


def _schedule(run: PublishedRun, stack: Stack) -> tuple[Schedule, int]:
    """Return the schedule and its virtual stages; without a pipeline 1F1B and 1."""
    pipeline = run.pp or 1
    if pipeline == 1:
        return Schedule.ONE_F_ONE_B, 1
    schedule = schedule_of(run.pp_schedule, run.vpp or 1)
    if schedule.virtual_stages is not None:
        return schedule, schedule.virtual_stages
    virtual = run.vpp or stack.virtual_stages or ((run.layers or 1) + 2) // pipeline
    return (schedule, virtual) if virtual > 1 else (Schedule.ONE_F_ONE_B, 1)


def _strategy_of(run: PublishedRun, stack: Stack) -> Strategy:
    replicas, context = run.dp or 1, run.cp or 1
    zero_stage = stack.zero_stage if run.zero_stage is None else run.zero_stage
    if run.zero_group == 1 or replicas * context == 1:
        zero_stage = 0
    elif gathers_once(run, stack):
        zero_stage = 1
    # States are sharded over context ranks, too; the remaining ranks of the group are data ranks.
    group = replicas * context if run.zero_group is None else run.zero_group
    zero = gcd(replicas, max(group // context, 1)) if zero_stage else 1
    return Strategy(
        data=replicas // zero,
        zero=zero,
        zero_stage=zero_stage if zero * context > 1 else 0,
        tensor=run.tp or 1,
        sequence_parallel=bool(run.seq_parallel) and (run.tp or 1) > 1,
        context=context,
        expert=run.ep or (gcd(replicas, run.n_experts or 1) if stack.spreads_experts else 1),
        expert_tensor=integer_argument(run.remarks, "expert-tensor-parallel-size") or stack.expert_tensor,
    )


def gathers_once(run: PublishedRun, stack: Stack) -> bool:
    """Whether sharded parameters stay gathered for a step, which costs the traffic and memory of ZeRO-1."""
    stage = stack.zero_stage if run.zero_stage is None else run.zero_stage
    return stack.gathers_once and stage > 1 and (run.pp or 1) > 1


def _stage_sizes(run: PublishedRun, graph: ModelGraph, stages: int, stack: Stack) -> list[int]:
    """Return the number of blocks of each stage, in model order.

    A run may state the sizes of the first and last stage, and some software balances the work of layers
    (``Stack.splits_by_work``). Otherwise, if blocks do not divide, embedding and head count as a layer each, or the
    head alone (Megatron-LM's ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``), else the first stages get one block more.
    """
    blocks = sum(layer.role is Role.BLOCK for layer in graph.layers)
    remarks = run.remarks
    first, last = (integer_argument(remarks, f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if stack.splits_by_work and stages > 1:
        return by_work(graph, stages)
    if first is not None and last is not None and stages > 2:
        if first + last + stages - 2 > blocks or min(first, last) < 1:
            raise SkipError("more stages than blocks", f"notes: {first} and {last} at the ends, layers: {blocks}.")
        return [first, *even(blocks - first - last, stages - 2), last]
    counted = "counted as a layer" in remarks or "counted as layers" in remarks or "one layer fewer" in remarks
    if stages > 1 and (blocks + 2) % stages == 0 and (counted or blocks % stages):
        each = (blocks + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if blocks % stages and (blocks + 1) % stages == 0:
        each = (blocks + 1) // stages
        return [*[each] * (stages - 1), each - 1]
    if blocks < stages:
        raise SkipError("more stages than blocks", f"pp x vpp: {stages} stages, layers: {blocks}.")
    return even(blocks, stages)


def by_work(graph: ModelGraph, stages: int) -> list[int]:
    """Return the blocks of each stage if a stage is filled until it and the ones before exceed their share of work.

    Work is the FLOPs of matmuls with weights, the head's included (nanotron, ``models/base.py``: ``build_model``).
    """
    works = []
    for layer in graph.layers:
        weighted = (
            operator
            for operator in graph.kind_of(layer).operators
            if operator.kind is OperatorClass.MATMUL and operator.weight_bytes
        )
        works.append(sum(operator.flops for operator in weighted))
    total, done, stage, counts = sum(works), 0, 0, [0] * stages
    for layer, work in zip(graph.layers, works, strict=True):
        counts[stage] += layer.role is Role.BLOCK
        done += work
        stage = min(stage + (done * stages > total * (stage + 1)), stages - 1)
    if min(counts) == 0:
        raise SkipError("more stages than blocks", f"pp: {stages} stages.")
    return counts


def even(blocks: int, stages: int) -> list[int]:
    """Spread blocks evenly over stages; the first stages get one block more if they do not divide."""
    each, remainder = divmod(blocks, stages)
    return [each + (stage < remainder) for stage in range(stages)]


def _stages(run: PublishedRun, graph: ModelGraph, stack: Stack, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return stages of ``counts`` blocks; layers before the blocks join the first stage, layers after them the last."""
    blocks = [index for index, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    strategies = _strategies(run, graph, stack)
    ends = [blocks[total] if total < len(blocks) else blocks[-1] + 1 for total in accumulate(counts)]
    ends[-1] = len(graph.layers)
    starts = [0, *ends[:-1]]
    return tuple(
        Stage(tuple(layer_runs(graph.layers[start:end], strategies[start:end])))
        for start, end in zip(starts, ends, strict=True)
    )


def _strategies(run: PublishedRun, graph: ModelGraph, stack: Stack) -> list[Strategy]:
    """Return the strategy of each layer; only blocks recompute, one of N with ``every Nth layer``."""
    plain, recompute = _strategy_of(run, stack), recompute_of(run.act_ckpt)
    period = re.search(r"every (\d+)(?:st|nd|rd|th)? layer", (run.act_ckpt or "").lower())
    strategies, number = [], 0
    for layer in graph.layers:
        if period:
            recompute = Recompute.NONE if number % int(period[1]) else Recompute.FULL
        is_block = layer.role is Role.BLOCK
        strategies.append(replace(plain, recompute=recompute) if is_block else plain)
        number += is_block
    return strategies


Price = Callable[[Plan], Plan]


def leaves_recompute_open(text: str | None) -> bool:
    """Whether a run does not state its recomputation."""
    word = (text or "unknown").lower()
    return "unknown" in word or "none stated" in word


def fitting(run: PublishedRun, plan: Plan, graph: ModelGraph, price: Price, capacity: int) -> Plan:
    """Return the priced plan with the least change that fits ``capacity`` bytes and that the run leaves open.

    The plan stays as it is if no such change makes it fit.
    """

    def fits(candidate: Plan) -> bool:
        prediction = candidate.prediction
        return prediction is None or prediction.peak_memory <= capacity

    first, is_open = price(plan), leaves_recompute_open(run.act_ckpt)
    if fits(first):
        return first
    if run.zero_stage is None:
        plan = _with_strategies(plan, graph, lambda strategy, _: _with_zero_1(strategy))
        if fits(priced := price(plan)):
            return priced
    if is_open and _can_recompute(graph, Recompute.SELECTIVE):
        plan = recomputing(plan, graph, Recompute.SELECTIVE)
        if fits(priced := price(plan)):
            return priced
    if not is_open or not _can_recompute(graph, Recompute.FULL):
        return first
    blocks = max(sum(layer.role is Role.BLOCK for layer in layers) for layers, _ in _stages_of(plan, graph))
    counts = range(1, blocks + 1)
    fewest = bisect_left(counts, True, key=lambda count: fits(price(recomputing(plan, graph, Recompute.FULL, count))))
    return price(recomputing(plan, graph, Recompute.FULL, counts[fewest])) if fewest < len(counts) else first


def _with_zero_1(strategy: Strategy) -> Strategy:
    if strategy.zero_stage or strategy.data * strategy.context == 1:
        return strategy
    return replace(strategy, data=1, zero=strategy.data, zero_stage=1)


def recomputing(plan: Plan, graph: ModelGraph, choice: Recompute, count: int | None = None) -> Plan:
    """Return the plan with another recomputation in the first ``count`` blocks of every stage (None: in all blocks)."""

    def change(strategy: Strategy, number: int) -> Strategy:
        return replace(strategy, recompute=choice) if count is None or number < count else strategy

    return _with_strategies(plan, graph, change)


def _stages_of(plan: Plan, graph: ModelGraph) -> Iterator[tuple[list[Layer], list[Strategy]]]:
    """Yield the layers and strategies of each stage."""
    layers = iter(graph.layers)
    for stage in plan.stages:
        strategies = [run.strategy for run in stage.runs for _ in range(run.count)]
        yield list(islice(layers, len(strategies))), strategies


def _with_strategies(plan: Plan, graph: ModelGraph, change: Callable[[Strategy, int], Strategy]) -> Plan:
    """Return the plan with the strategies that ``change`` makes of a strategy and the blocks before it in its stage.

    Layers that are no blocks keep their recomputation.
    """
    stages = []
    for layers, strategies in _stages_of(plan, graph):
        changed, number = list[Strategy](), 0
        for layer, strategy in zip(layers, strategies, strict=True):
            is_block, new = layer.role is Role.BLOCK, change(strategy, number)
            changed.append(new if is_block else replace(new, recompute=strategy.recompute))
            number += is_block
        stages.append(Stage(tuple(layer_runs(layers, changed))))
    return replace(plan, stages=tuple(stages))


def _can_recompute(graph: ModelGraph, choice: Recompute) -> bool:
    """Whether all blocks offer a recomputation and keep less with it."""
    kinds = {layer.kind for layer in graph.layers if layer.role is Role.BLOCK}
    kept = [graph.kinds[kind].kept for kind in kinds]
    return bool(kept) and all(choice in each and each[choice].total < each[Recompute.NONE].total for each in kept)
