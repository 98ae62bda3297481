"""Plans from published degrees: placements are Megatron-LM's, counted by hand."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import DecoderShape, build_graph
from galvatron_lite.plans.schema import Plan, Prediction, Schedule, Stage, TimeBreakdown
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.checks import folds_experts, stack_of
from galvatron_lite.validate.model import named_figures, shape_of
from galvatron_lite.validate.plans import (
    Batch,
    batch_of,
    by_work,
    even,
    fitting,
    leaves_recompute_open,
    plan_of,
    recomputing,
)
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun

from .runs import gpt, predicted


def plan(run: PublishedRun) -> Plan:
    layers = run.layers or 1
    graph = build_graph(DecoderShape(name="g", layers=layers, hidden=64, heads=4, vocab=256, seq_len=32))
    return plan_of(run, graph, match_stack(run.framework), "bf16")


def blocks(run: PublishedRun) -> list[int]:
    """Blocks of each stage: embedding and head not counted."""
    sizes = [sum(part.count for part in stage.runs) for stage in plan(run).stages]
    return [size - (place == 0) - (place == len(sizes) - 1) for place, size in enumerate(sizes)]


def test_degrees_batch_and_schedule() -> None:
    made = plan(gpt())
    assert (made.devices, made.pipeline, made.global_batch, made.microbatches, made.microbatch) == (8, 2, 32, 8, 4)
    assert made.schedule is Schedule.ONE_F_ONE_B
    strategy = made.stages[0].runs[0].strategy
    assert (strategy.data, strategy.tensor, strategy.zero, strategy.devices) == (2, 2, 1, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 4]),
        ({"layers": 30, "pp": 8, "dp": 1, "tp": 1, "grad_accum": 16}, [3, 4, 4, 4, 4, 4, 4, 3]),
        ({"layers": 7}, [4, 3]),  # the head counts as a layer
        ({"layers": 6, "notes": "embedding counted as a layer in PP partition"}, [3, 3]),
        ({"layers": 10, "pp": 4, "dp": 1, "notes": "decoder-first-pipeline-num-layers=2, "
          "decoder-last-pipeline-num-layers=2"}, [2, 3, 3, 2]),
        ({"layers": 9, "pp": 4, "dp": 1}, [3, 2, 2, 2]),
        ({"vpp": 2, "pp_schedule": "interleaved-1f1b"}, [2, 2, 2, 2]),
        ({"layers": 14, "vpp": 4, "pp_schedule": "interleaved-1f1b"}, [1, 2, 2, 2, 2, 2, 2, 1]),
    ],
)  # fmt: skip
def test_blocks_of_each_stage(changes: dict[str, object], expected: list[int]) -> None:
    assert blocks(gpt(**changes)) == expected


def test_stages_of_equal_work() -> None:
    # A block's matmuls have 4 * 2048^2 + 3 * 2048 * 8192 = 2^26 weights, the head's 2048 * 131072 = 2^28: four blocks.
    # Of 20 blocks' worth the first of two stages goes on until it holds more than 10.
    shape = DecoderShape(
        name="g", layers=16, hidden=2048, heads=32, ffn_hidden=8192, gated_mlp=True, vocab=131072, seq_len=64,
        tied_embeddings=False, biases=False,
    )  # fmt: skip
    assert by_work(build_graph(shape), 2) == [11, 5]
    assert blocks(gpt(framework="nanotron", layers=10, pp=4, dp=1)) == [3, 3, 2, 2]


@given(st.integers(1, 200), st.integers(1, 32))
def test_an_even_spread_differs_by_one_at_most(count: int, stages: int) -> None:
    sizes = even(count, stages)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("stage", "group", "expected"),
    [(0, None, (2, 1, 0)), (1, None, (1, 2, 1)), (3, None, (1, 2, 3)), (3, 1, (2, 1, 0))],
)
def test_zero_shards_the_replicas_its_group_holds(stage: int, group: int | None, expected: tuple[int, ...]) -> None:
    made = plan(gpt(zero_stage=stage, zero_group=group))
    strategy = made.stages[0].runs[0].strategy
    assert (strategy.data, strategy.zero, strategy.zero_stage) == expected


@pytest.mark.parametrize(("group", "expected"), [(None, (1, 2)), (4, (1, 2)), (2, (2, 1)), (1, (2, 1))])
def test_context_ranks_share_states_first(group: int | None, expected: tuple[int, int]) -> None:
    made = plan(gpt(zero_stage=3, zero_group=group, cp=2, tp=1))
    strategy = made.stages[0].runs[0].strategy
    assert (strategy.data, strategy.zero) == expected
    assert strategy.zero_stage == (0 if group == 1 else 3)


@pytest.mark.parametrize(("framework", "expected"), [("torchtitan", 2), ("Meta internal 4D", 4)])
def test_virtual_stages_that_are_not_stated(framework: str, expected: int) -> None:
    made = plan(gpt(framework=framework, pp_schedule="interleaved-1f1b (custom)", vpp=None, layers=6))
    assert (made.virtual_stages, made.pipeline, made.schedule) == (expected, 2, Schedule.INTERLEAVED)


def test_a_pipeline_of_sharded_stages_gathers_once_a_step() -> None:
    made = plan(gpt(framework="torchtitan", zero_stage=3))
    assert made.stages[0].runs[0].strategy.zero_stage == 1
    flat = plan(gpt(framework="torchtitan", zero_stage=3, pp=1, dp=4, global_batch=64))
    assert flat.stages[0].runs[0].strategy.zero_stage == 3


def test_every_second_layer_is_recomputed_where_it_says_so() -> None:
    made = plan(gpt(act_ckpt="selective (every 2nd layer)", pp=1, dp=4, global_batch=64))
    choices = [part.strategy.recompute for part in made.stages[0].runs for _ in range(part.count)]
    assert choices.count(Recompute.FULL) == 4
    assert choices[0] is choices[-1] is Recompute.NONE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": 16}, "degrees do not multiply"),
        ({"global_batch": 33}, "batch does not divide"),
        ({"grad_accum": 0.125}, "batch does not divide"),
        ({"layers": 3, "pp": 8, "dp": 1, "tp": 1}, "more stages than blocks"),
        ({"spatial": 4}, "spatial"),
        ({"n_gpus": None}, "number of GPUs"),
    ],
)
def test_what_cannot_be_represented_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(SkipError, match=reason):
        plan(gpt(**changes))


def test_batches_that_are_not_stated() -> None:
    assert batch_of(gpt(micro_batch=None)) == Batch(32, 2, 16)
    assert batch_of(gpt(micro_batch=None, pp=1)) == Batch(32, 4, 8)
    assert batch_of(gpt(global_batch=None, grad_accum=None)) == Batch(4, 4, 1)


def test_torchtitan_splits_a_batch_into_as_many_parts_as_pipeline_ranks() -> None:
    # torchtitan/config_manager.py, pipeline_parallel_microbatches; 2 ranks, 16 samples a replica.
    titan = "torchtitan FSDP2 torch.compile"
    assert batch_of(gpt(framework=titan, micro_batch=None)) == Batch(32, 16, 2)
    assert batch_of(gpt(framework=titan, micro_batch=4)) == Batch(32, 8, 4)
    assert batch_of(gpt(framework=titan, micro_batch=None, pp=1)) == Batch(32, 4, 8)


MIXTURE = {"arch": "moe", "gated_mlp": True, "tied_embeddings": False, "seq_len": 64, "ffn_hidden": None,
           "framework": "NeMo AutoModel FSDP2", "tp": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "billions"),
    [
        ({"model": "qwen3-235b-a22b", "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "vocab": 151936,
          "n_experts": 128, "moe_topk": 8, "moe_ffn": 1536}, 235.1),
        ({"model": "qwen3-30b-a3b", "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "vocab": 151936,
          "n_experts": 128, "moe_topk": 8, "moe_ffn": 768}, 30.5),
        ({"model": "gpt-oss-120b", "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "vocab": 201088,
          "n_experts": 128, "moe_topk": 4, "moe_ffn": 2880}, 116.8),
        ({"model": "gpt-oss-20b", "layers": 24, "hidden": 2880, "heads": 64, "kv_heads": 8, "vocab": 201088,
          "n_experts": 32, "moe_topk": 4, "moe_ffn": 2880}, 20.9),
        ({"model": "deepseek-v3", "arch": "moe-mla", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": None,
          "vocab": 129280, "n_experts": 256, "moe_topk": 8, "moe_ffn": 2048}, 671.0),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_public_model(changes: dict[str, object], billions: float) -> None:
    run = gpt(**(MIXTURE | changes))
    graph = build_graph(shape_of(run, match_stack(run.framework)))
    items = sum(graph.kind_of(layer).parameters.total for layer in graph.layers)
    assert items == pytest.approx(billions * 1e9, rel=0.002)


def test_unknown_model_names_give_no_sizes() -> None:
    assert named_figures("llama3-8b") == named_figures(None) == {}


CALIBRATION = load_calibration()


def stack(run: PublishedRun) -> Stack:
    return stack_of(run, "bf16", CALIBRATION)


def test_megatron_hides_the_traffic_of_sharded_parameters_only() -> None:
    plain, sharded = stack(gpt(zero_stage=1)), stack(gpt(zero_stage=3))
    assert plain.constants.hidden["zero"] < 0.5 < sharded.constants.hidden["zero"]
    assert plain.name != sharded.name  # prices are remembered by name


def test_softmax_is_fused_where_nvidias_bert_is_scripted() -> None:
    """``torch.jit.script`` in run_pretraining.py, not in run_squad.py, which Lambda runs, too."""
    bert = partial(gpt, arch="encoder", framework="PyTorch")
    assert stack(bert()).kernels.fused_softmax
    for eager in (bert(notes="SQuAD fine-tune; fine-tuning"), bert(arch="encoder-decoder"),
                  bert(framework="NVIDIA DeepLearningExamples PyTorch (Lambda runs)")):  # fmt: skip
        assert not stack(eager).kernels.fused_softmax


def test_compiled_runs_fuse_chains_in_any_software() -> None:
    assert stack(gpt(framework="PyTorch DDP (torch.compile)")).kernels.compiled
    assert not stack(gpt(framework="PyTorch DDP")).kernels.compiled


def test_dispatchers_and_hidden_exchanges_are_read_from_words() -> None:
    plain, deep = stack(gpt()), stack(gpt(notes="dispatcher DeepEP; 1F1B A2A overlap"))
    assert (plain.kernels.unique_dispatch, deep.kernels.unique_dispatch) == (False, True)
    assert plain.constants.hidden.get("expert", 0.0) < 0.5 < deep.constants.hidden["expert"]
    assert len({plain.name, deep.name, stack(gpt(zero_stage=3)).name}) == 3


BIG = {"layers": 24, "hidden": 4096, "heads": 32, "ffn_hidden": 16384, "gpu": "V100-SXM2-16GB"}


def planned(run: PublishedRun) -> tuple[Plan, DecoderShape]:
    stack = match_stack(run.framework)
    shape = shape_of(run, stack)
    assert isinstance(shape, DecoderShape)
    plan = plan_of(run, build_graph(shape, kernels=stack.kernels), stack, "bf16")
    return plan, shape


@pytest.mark.parametrize(
    ("said", "left_open"),
    [(None, True), ("unknown", True), ("none (per recipe; none stated)", True), ("none", False), ("full", False),
     ("selective (config default)", False)],
)  # fmt: skip
def test_settings_that_a_run_leaves_open(said: str | None, left_open: bool) -> None:
    assert leaves_recompute_open(said) is left_open


def test_what_a_run_says_is_not_changed() -> None:
    told = predicted(gpt(**BIG, micro_batch=8, zero_stage=0, act_ckpt="none"))
    assert told.device_memory > told.capacity
    fits = predicted(gpt(act_ckpt=None, zero_stage=None))
    assert fits == predicted(gpt(act_ckpt="none", zero_stage=0))


def test_states_are_shared_before_anything_runs_again() -> None:
    small = {**BIG, "layers": 14, "micro_batch": 4, "act_ckpt": None}
    whole, shared = (predicted(gpt(**small, zero_stage=stage)) for stage in (0, None))
    assert whole.memory.activations < shared.memory.activations
    assert shared.memory.optimizer == pytest.approx(whole.memory.optimizer / 2, rel=0.1)
    assert shared.step_seconds < whole.step_seconds


def test_no_more_blocks_run_again_than_it_takes() -> None:
    """Against trying every number of blocks, with a price that counts them."""
    run = gpt(act_ckpt=None, zero_stage=0)
    plan, shape = planned(run)
    graph = build_graph(shape, kernels=match_stack(run.framework).kernels)
    for capacity in range(-1, 9):
        tried: list[int] = []

        def price(candidate: Plan, tried: list[int] = tried) -> Plan:
            full = [full_blocks(stage) for stage in candidate.stages]
            tried.append(max(full))
            return with_peak(candidate, 8 - 2 * max(full))

        chosen = fitting(run, plan, graph, price, capacity)
        needed = max(-((capacity - 8) // 2), 0)
        blocks = max(full_blocks(stage) for stage in chosen.stages)
        assert blocks == (needed if needed <= 4 else 0)
        assert len(tried) <= 6


def full_blocks(stage: Stage) -> int:
    return sum(run.count for run in stage.runs if run.strategy.recompute is Recompute.FULL)


def with_peak(plan: Plan, peak: int) -> Plan:
    return replace(plan, prediction=Prediction(1.0, TimeBreakdown(), 1.0, 1.0, 0.5, peak))


def test_only_the_first_blocks_of_each_stage_run_again() -> None:
    plan, shape = planned(gpt())
    changed = recomputing(plan, build_graph(shape, kernels=match_stack("Megatron-LM").kernels), Recompute.FULL, 3)
    assert [full_blocks(stage) for stage in changed.stages] == [3, 3]
    assert [sum(run.count for run in stage.runs) for stage in changed.stages] == [5, 5]
    # The embedding stands before the blocks of the first stage and never runs again.
    assert changed.stages[0].runs[0].strategy.recompute is Recompute.NONE
    assert changed.stages[1].runs[0].strategy.recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("changes", "folded"),
    [
        ({"tp": 2, "ep": 4}, False),
        ({"tp": 2, "ep": 4, "notes": "special args: expert-tensor-parallel-size=1"}, True),
        ({"tp": 2, "ep": 8}, True),  # each expert has one device only
        ({"tp": 1, "ep": 4}, False),
    ],
)
def test_experts_are_whole_where_stated_or_where_nothing_else_is_left(changes: dict[str, object], folded: bool) -> None:
    assert folds_experts(gpt(n_gpus=16, pp=2, n_experts=8, **changes)) is folded


@pytest.mark.parametrize(("framework", "stated", "degree"), [
    ("NeMo AutoModel FSDP2", None, 4), ("NeMo AutoModel FSDP2", 2, 2), ("Megatron-Bridge", None, 1),
])  # fmt: skip
def test_experts_are_spread_over_all_replicas_where_the_software_does_so(
    framework: str, stated: int | None, degree: int
) -> None:
    """AutoModel's recipes for gpt-oss have ``ep_size`` 64 of 64 GPUs and 8 of 8, its table has none."""
    run = gpt(framework=framework, n_experts=12, ep=stated, n_gpus=8, dp=8, tp=1, pp=1)
    assert plan(run).stages[0].runs[0].strategy.expert == degree
