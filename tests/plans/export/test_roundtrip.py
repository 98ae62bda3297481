"""Settings of other software, read again, are the plan they were written from: strategies, stages, step and memory."""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from galvatron_lite import api
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import build_graph
from galvatron_lite.model.shapes.registry import shape_from_data
from galvatron_lite.parallelism.backends import TARGETS
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.peers.plan_files import priced
from galvatron_lite.plans.export.settings import Settings, StageBlocks, World, even_stages, plan_from
from galvatron_lite.plans.export.tools import TOOLS, export, read_settings
from galvatron_lite.plans.io import check_plan, read_plan
from galvatron_lite.plans.schema import BranchPlacement, Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from tests.plans.export.plans import PLANS

LAYERS, DEVICES = 8, 16
SHAPE = {"name": "tiny", "layers": LAYERS, "hidden": 1024, "heads": 16, "vocab": 32000, "seq_len": 4096}


@cache
def profile_for(stack: str, arch: str) -> Profile:
    experts = {"n_experts": 8, "moe_topk": 2, "moe_ffn": 2048} if arch == "moe" else {}
    graph = build_graph(shape_from_data({**SHAPE, "arch": arch, **experts}), precision="bf16")
    return api.find_profile(model=graph, cluster="h100", gpus=DEVICES, stack=stack)


def sampled(tool: str, arch: str, seed: int, count: int) -> Iterator[Plan]:
    """Plans that a tool can be told, as its backend states it."""
    rng, backend = random.Random(f"{tool} {arch} {seed}"), TARGETS[tool]
    profile = profile_for(backend.stack, arch)
    legal_plans = 0
    while legal_plans < count:
        pipeline = rng.choice((1, 1, 2, 4)) if backend.pipelines else 1
        virtual = rng.choice((1, 2)) if pipeline > 1 and Schedule.INTERLEAVED in backend.schedules else 1
        tensor, context = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2))
        left = DEVICES // (pipeline * tensor * context) if tensor * context * pipeline <= DEVICES else 1
        data = rng.choice([each for each in (1, 2, 4, left) if left % each == 0])
        strategy = Strategy(
            data=data, zero=left // data, zero_stage=rng.choice((0, 1, 2, 3)), tensor=tensor, context=context,
            sequence_parallel=tensor > 1 and rng.choice((True, False)), recompute=rng.choice(list(Recompute)),
            expert=rng.choice((1, 2, 4)) if arch == "moe" else 1, expert_tensor=rng.choice((0, 1)),
            ulysses=context > 1 and rng.choice((True, False)), offload=rng.choice((Offload.NONE, Offload.STATES)),
        )  # fmt: skip
        whole = strategy.expert == 1 or strategy.tensor == 1
        strategy = replace(strategy, expert_tensor=0) if whole else strategy
        spread = strategy.expert * (1 if strategy.expert_tensor or tensor == 1 else tensor)
        piped = dict(backend.piped if pipeline > 1 else backend.alone)
        legal = (
            strategy.devices * pipeline == DEVICES and backend.runs(strategy) and strategy.devices % spread == 0
            and (backend.block_rule is None or backend.block_rule(strategy))
            and strategy.zero_stage in piped.get("zero_stage", range(4))
            and (strategy.zero == 1 or strategy.zero_stage > 0)
            and (strategy.zero_stage == 0 or strategy.zero * context > 1)
            and not (strategy.offloads_states and strategy.data > 1)
        )  # fmt: skip
        if not legal:
            continue
        samples, microbatches = rng.choice((1, 2)), rng.choice((4, 8))
        stages = even_stages(World("", DEVICES, LAYERS), pipeline * virtual)
        if pipeline > 1 and stages[0].blocks > 1 and tool in ("megatron", "nemo") and rng.random() < 0.5:
            sizes = [stage.blocks for stage in stages]
            sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] + 1
            stages = tuple(StageBlocks(size, place == 0, place == len(sizes) - 1) for place, size in enumerate(sizes))
        schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
        if virtual == 1 < pipeline and Schedule.GPIPE in backend.schedules:
            schedule = rng.choice((Schedule.ONE_F_ONE_B, Schedule.GPIPE))
        settings = Settings(
            devices=DEVICES, precision="bf16", batch=samples * microbatches * strategy.batch_degree, samples=samples,
            microbatches=microbatches, strategy=strategy, schedule=schedule, virtual=virtual, stages=stages,
        )  # fmt: skip
        legal_plans += 1
        yield priced(check_plan(plan_from(settings, profile.graph)), profile)


@pytest.mark.parametrize("arch", ["decoder", "moe"])
@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_what_is_written_is_read_and_priced_the_same(tool: str, arch: str, tmp_path: Path) -> None:
    profile = profile_for(TARGETS[tool].stack, arch)
    for number, plan in enumerate(sampled(tool, arch, 0, 10)):
        text = export(plan, tool, strict=True).text
        file = tmp_path / f"{number}"
        file.write_text(text)
        again = api.evaluate(file, model=profile.graph, cluster="h100", gpus=DEVICES, target=tool)
        assert replace(again, provenance=None) == replace(plan, provenance=None), text
        assert not any("not looked at" in line or "priced as" in line for line in again.provenance.notes)


OWN = {
    "megatron": """
        TP=2
        MODEL_ARGS=(--num-layers 8 --hidden-size 1024 --use-mcore-models --seq-length 4096)
        PARALLEL=(
            --tensor-model-parallel-size $TP  # within a node
            --pipeline-model-parallel-size=2
            --num-layers-per-virtual-pipeline-stage 2
            --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --bf16
            --recompute-activations --micro-batch-size 1 --global-batch-size 32
        )
        torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL[@]} --lr 1e-4""",
    "nemo": """
        trainer: {devices: 8, num_nodes: 2, max_steps: 10}
        model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2,
          sequence_parallel: true, micro_batch_size: 1, global_batch_size: 32, recompute_granularity: selective,
          optim: {name: adam, use_distributed_optimizer: true}}""",
    "torchtitan": """
        [training]
        local_batch_size = 8
        seq_len = 4096
        [parallelism]
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "Interleaved1F1B"
        pipeline_parallel_first_stage_less_layers = 0
        pipeline_parallel_last_stage_less_layers = 0
        tensor_parallel_degree = 2
        [activation_checkpoint]
        mode = "selective"
        [profiling]
        enable_profiling = true""",
    "deepspeed": """{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "overlap_comm": true, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "wall_clock_breakdown": false}""",
    "accelerate": """
        # in the script: batch_size=2
        distributed_type: FSDP
        fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_activation_checkpointing: true,
          fsdp_use_orig_params: true, fsdp_backward_prefetch: BACKWARD_PRE}
        mixed_precision: bf16
        num_processes: 16
        rdzv_backend: static""",
}
"""Files as users have them, with fields that no plan has."""
MEANT = {
    "megatron": ("zero1x4 tensor2+sp selective", 4, 8, "hidden_size"),
    "nemo": ("zero1x4 tensor2+sp selective", 4, 8, "trainer.max_steps"),
    "torchtitan": ("zero1x4 tensor2+sp selective", 4, 8, "profiling.enable_profiling"),
    "deepspeed": ("zero3x16 offload-states", 1, 2, "optimizer.type"),
    "accelerate": ("zero2x16 recompute", 1, 1, "fsdp_config.fsdp_backward_prefetch"),
}
"""Of each the strategy of blocks, stages, micro-batches, and a field that is not looked at."""


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_file_of_its_user_is_read_and_what_is_not_looked_at_is_named(tool: str, tmp_path: Path) -> None:
    file, graph = tmp_path / "settings", profile_for("", "decoder").graph
    file.write_text(textwrap.dedent(OWN[tool]))
    plan = api.evaluate(file, model=graph, cluster="h100", gpus=DEVICES, batch=32, target=tool)
    strategy, stages, microbatches, ignored = MEANT[tool]
    blocks = [run.strategy for stage in plan.stages for run in stage.runs if run.first.startswith("layers")]
    assert {str(one) for one in blocks} == {strategy}
    notes = " ".join(plan.provenance.notes)
    assert (len(plan.stages), plan.devices) == (stages, DEVICES)
    assert plan.microbatches == microbatches or plan.global_batch == 32
    assert "read: " in notes
    assert ignored in notes.partition("not looked at: ")[2]


@pytest.mark.parametrize(
    ("tool", "text", "named"),
    [
        ("megatron", "--tensor-model-parallel-size $TP --micro-batch-size 1 --global-batch-size 32", "tensor_model"),
        ("megatron", "--micro-batch-size 1 --global-batch-size 32 --fp8-format hybrid", "fp8_format: 'hybrid'"),
        ("megatron", "--micro-batch-size 1 --global-batch-size 32 --num-layers 80", "num_layers: 80"),
        ("megatron", "--micro-batch-size 1 --global-batch-size 40", "batch"),
        ("megatron", "--recompute-granularity selective --recompute-modules mlp --global-batch-size 32", "modules"),
        ("megatron", "--tensor-model-parallel-size 3 --global-batch-size 32", "degrees"),
        ("nemo", "model: [1]", "batch"),
        ("deepspeed", '{"train_batch_size": "auto"}', "train_batch_size: 'auto'"),
        ("deepspeed", '{"train_batch_size": 32, "zero_optimization": {"offload_param": {"device": "cpu"}}}', "param"),
        ("torchtitan", "--parallelism.context_parallel_degree many", "context_parallel_degree: 'many'"),
        ("accelerate", "distributed_type: MEGATRON_LM", "distributed_type"),
    ],
)  # fmt: skip
def test_what_cannot_be_priced_is_named(tool: str, text: str, named: str, tmp_path: Path) -> None:
    file, profile = tmp_path / "settings", profile_for("", "decoder")
    file.write_text(text)
    with pytest.raises((InputError, FileFormatError), match=named):
        read_settings(file, tool, profile.graph, DEVICES)


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "nemo"])
@pytest.mark.parametrize("text", ["a: &a\n  b: *a\n", "a: [1,\n", f"{'[' * 100}{']' * 100}\n"])
def test_invalid_files_are_refused(tool: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"settings\.yaml, line"):
        read_settings(path, tool, profile_for("", "decoder").graph, DEVICES)


EVIL = "gpt\n--load /evil --trust-remote\ndeepspeed_config: {deepspeed_config_file: /evil}\r\u2028x"


@pytest.mark.parametrize("place", [("model",), ("stages", 0, "runs", 0, "first"), ("precision",)])
@pytest.mark.parametrize("value", [EVIL, "a" * 301, "\x1b[2J"])
def test_a_name_is_one_printable_line(tmp_path: Path, place: tuple[str | int, ...], value: str) -> None:
    data = part = json.loads(json.dumps(to_data(PLANS["mixed"])))
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=str(place[-1])):
        read_plan(tmp_path / "plan.json")


def named(plan: Plan, name: str) -> Plan:
    """The plan with a name wherever it has one."""
    run = replace(plan.stages[0].runs[1], first=name)
    stage = replace(plan.stages[0], runs=(plan.stages[0].runs[0], run, *plan.stages[0].runs[2:]))
    branch = BranchPlacement(name, (name,), 0, plan.devices, (run,))
    return replace(plan, model=name, stages=(stage,), branches=(branch,))


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_plan_made_in_python_writes_no_line_of_its_names(tool: str) -> None:
    evil, plain = (export(named(PLANS["mixed"], name), tool).text for name in (EVIL, "gpt"))
    without = [[line for line in text.splitlines() if not line.startswith("#")] for text in (evil, plain)]
    assert without[0] == without[1]
    assert yaml.safe_load(evil) == yaml.safe_load(plain) or tool in ("megatron", "torchtitan")


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_unknown_precisions_are_refused(tool: str) -> None:
    with pytest.raises(InputError, match="precision"):
        export(replace(PLANS["data"], precision=EVIL), tool)
