"""For Megatron-LM: flags of ``pretrain_gpt.py`` and its like (``megatron/training/arguments.py``); NeMo: a YAML file.

Megatron Core's settings of a plan, by the names of its dataclasses (ModelParallelConfig, TransformerConfig,
DistributedDataParallelConfig, OptimizerConfig), for Megatron-LM's flags and Megatron-Bridge's YAML.

``xargs`` takes the file as it is: ``grep -v '^#' megatron.args | xargs torchrun pretrain_gpt.py ...``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import quote

import yaml

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.common import (
    EDGES,
    PICTURES,
    Exported,
    StageCut,
    cuts,
    head,
    kinds,
    lacking,
    main_strategy,
    recomputed,
    unlike,
)
from galvatron_lite.plans.schema import Plan, Schedule

Values = Mapping[str, object]
_RUNS = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


@dataclass(frozen=True, slots=True)
class Megatron:
    """Settings by the part of the configuration that holds them."""

    model: Values  # of TransformerConfig and ModelParallelConfig
    train: Values  # batch sizes
    ddp: Values  # of DistributedDataParallelConfig
    optimizer: Values  # of OptimizerConfig
    precision: str  # ``fp32``, ``bf16`` or ``fp16``
    left_out: tuple[str, ...]  # what they do not say, a line each


def settings_of(plan: Plan) -> Megatron:
    """What Megatron Core is told; settings at their defaults are left out."""
    main = main_strategy(plan)
    model = {**_degrees(plan, main), **_recompute(plan)}
    train = {"micro_batch_size": plan.microbatch // main.batch_degree, "global_batch_size": plan.global_batch}
    optimizer = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0} if main.offloads_states else {}
    left_out = tuple(_left_out(plan, main))
    return Megatron(model, train, _sharding(main), optimizer, plan.precision, left_out)


def layout(stages: tuple[StageCut, ...]) -> str:
    """The layers of every stage in Megatron Core's letters: ``Ettt|ttt|tttL`` (E embedding, t block, L loss)."""
    return "|".join("E" * one.before + "t" * one.blocks + "L" * one.after for one in stages)


def _degrees(plan: Plan, main: Strategy) -> dict[str, object]:
    values: dict[str, object] = {
        "tensor_model_parallel_size": main.tensor,
        "pipeline_model_parallel_size": plan.pipeline,
    }
    if main.tensor > 1:
        values["sequence_parallel"] = main.sequence_parallel
    if len(plan.stages) > 1 and plan.cyclic is None:
        values["pipeline_model_parallel_layout"] = layout(cuts(plan))
    if main.context > 1:
        values |= {"context_parallel_size": main.context, "cp_comm_type": "a2a" if main.ulysses else "p2p"}
    if main.expert > 1:
        values["expert_model_parallel_size"] = main.expert
    if main.expert > 1 and main.expert_tensor:
        values["expert_tensor_parallel_size"] = main.expert_tensor
    return values


def _recompute(plan: Plan) -> dict[str, object]:
    """Full recomputation of all blocks, or of as many in each stage; selective of all."""
    blocks = sum(one.blocks for one in cuts(plan))
    full, selective = (recomputed(plan, which) for which in (Recompute.FULL, Recompute.SELECTIVE))
    if full and full == blocks:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if full:
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": max(_full(plan))}
    return {"recompute_granularity": "selective"} if selective else {}


def _full(plan: Plan) -> list[int]:
    """Blocks of each stage that compute all again."""
    return [
        sum(run.count for run in stage.runs if run.first not in EDGES and run.strategy.recompute is Recompute.FULL)
        for stage in plan.stages
    ]


def _sharding(main: Strategy) -> dict[str, object]:
    """ZeRO-1 is the distributed optimizer; 2 and 3 are Megatron-FSDP."""
    if main.state_shards == 1 or not main.zero_stage:
        return {}
    values: dict[str, object] = {"use_distributed_optimizer": True}
    if main.zero_stage in _SHARDING:
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _SHARDING[main.zero_stage]}
    if main.data > 1:
        values["num_distributed_optimizer_instances"] = main.data
    return values


def _left_out(plan: Plan, main: Strategy) -> Iterator[str]:
    yield from kinds(plan)
    if len(plan.stages) > 1 and plan.cyclic is None and plan.schedule not in _RUNS:
        yield f"schedule {plan.schedule.value}: Megatron runs 1f1b, interleaved where groups have several stages"
    yield from lacking(main, PICTURES)
    if main.offloads_activations:
        yield "activations of all layers in host memory: Megatron keeps those of some there, without recomputation"
    yield from _recompute_left_out(plan)
    yield from unlike(plan, main, ("recompute",))


def _recompute_left_out(plan: Plan) -> Iterator[str]:
    blocks = sum(one.blocks for one in cuts(plan))
    full, selective = (recomputed(plan, which) for which in (Recompute.FULL, Recompute.SELECTIVE))
    if full and full < blocks and len(set(_full(plan))) > 1:
        said = f"{max(_full(plan))} of every stage do here"
        yield f"full recomputation of unlike numbers of blocks by stage ({', '.join(map(str, _full(plan)))}): {said}"
    elif full and full < blocks:
        yield "which blocks of a stage compute all again: here the first ones do"
    if selective and full:
        yield f"selective recomputation of {selective} blocks beside full: Megatron takes one kind"
    elif selective:
        yield "what is computed again selectively: here attention's core, in the plan all but matmuls and attention"
        if selective < blocks:
            yield f"selective recomputation of {selective} of {blocks} blocks: here all do"


TOOL = "megatron"


def exported(plan: Plan) -> Exported:
    """The flags that say how the model is split; those of the model itself are the user's."""
    told = settings_of(plan)
    values = {**told.model, **told.train, **told.ddp, **told.optimizer}
    lines = [line for name, value in values.items() for line in _flag(name, value)]
    lines += [quote(f"--{told.precision}")] if told.precision != "fp32" else []
    text = head(plan, "Megatron-LM", told.left_out) + "".join(f"{line}\n" for line in lines)
    return Exported(TOOL, text, told.left_out)


def _flag(name: str, value: object) -> Iterator[str]:
    """Nothing for a switch that is off."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        yield flag
    elif value is not False:
        yield f"{flag} {quote(str(value))}"
    if name == "optimizer_cpu_offload":
        yield "--use-precision-aware-optimizer"


_PRECISION = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}


def nemo(plan: Plan) -> Exported:
    """NeMo Framework: the YAML file of Megatron-Bridge for a recipe's ``--config-file``, whose settings it overrides.

    The framework's training of language models is Megatron-Bridge (nemo_toolkit 3 holds speech alone); sections and
    keys are those of its ``ConfigContainer``.
    """
    told = settings_of(plan)
    optimizer = {**told.optimizer, **({"use_distributed_optimizer": True} if told.ddp else {})}
    sections = {"model": dict(told.model), "train": dict(told.train), "ddp": dict(told.ddp), "optimizer": optimizer}
    data: dict[str, object] = {name: values for name, values in sections.items() if values}
    if told.precision in _PRECISION:
        data["mixed_precision"] = _PRECISION[told.precision]
    text = head(plan, "NeMo (Megatron-Bridge)", told.left_out) + yaml.safe_dump(data, sort_keys=False)
    return Exported("nemo", text, told.left_out)
