"""Predictions of published runs take the planner's own path."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import DecoderShape, MoeShape, build_graph
from galvatron_lite.oracle.pricing import cluster_costs, price_row
from galvatron_lite.oracle.request import graph_named
from galvatron_lite.oracle.rows import Method, RowQuestion
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.stacks.catalog import DEFAULT, STACKS, match_stack
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.checks import cluster_of, optimizer_of, stack_of
from galvatron_lite.validate.model import dense_layers, shape_of
from galvatron_lite.validate.plans import plan_of
from galvatron_lite.validate.predict import Predictor, question_of, validate_runs, wanted_points
from galvatron_lite.validate.report import as_data, worst_lines, worst_runs
from galvatron_lite.validate.results import macros, score_families
from galvatron_lite.validate.rows import PublishedRun

from .runs import gpt, predicted, skipped

CALIBRATION = load_calibration()


def graph_of(run: PublishedRun) -> ModelGraph:
    stack = stack_of(run, "bf16", CALIBRATION)
    shape = shape_of(run, stack)
    assert isinstance(shape, DecoderShape)
    return build_graph(shape, kernels=stack.kernels)


def test_it_is_what_evaluate_says_of_a_whole_profile() -> None:
    run = gpt()
    stack, graph, cluster = stack_of(run, "bf16", CALIBRATION), graph_of(run), cluster_of(run, CALIBRATION)
    plan = plan_of(run, graph, stack, "bf16")
    profile = estimate_profile(graph, cluster, precision="bf16", name="g", samples=(2,), stack=stack)
    whole = evaluate(profile, plan).prediction
    assert predicted(run).step_seconds == pytest.approx(whole.step_seconds)
    assert predicted(run).device_memory == whole.peak_memory
    assert wanted_points(graph, plan) < {
        (point.kind, point.tensor, point.sequence_parallel, point.recompute, point.samples) for point in profile.layers
    }


def test_the_reported_time_does_not_enter_the_prediction() -> None:
    run = gpt()
    disguised = gpt(family="vtrain-single", run_id="x", model="llama", source="elsewhere", quality="B", iter_time_s=9.0)
    assert predicted(run) == predicted(disguised)


def test_cached_results_equal_fresh_ones() -> None:
    runs = [gpt(), gpt(tp=1, dp=4), gpt(framework="torchtitan", zero_stage=3), gpt(), gpt(seq_len=512)]
    predictor = Predictor(CALIBRATION)
    together = [predictor.predict(run) for run in runs]
    assert together == [Predictor(CALIBRATION).predict(run) for run in runs]
    assert together[0] == together[3]


def test_models_from_figures() -> None:
    core = STACKS["megatron-core"]
    gated = shape_of(gpt(gated_mlp=True, kv_heads=4), core)
    assert isinstance(gated, DecoderShape)
    assert (gated.positions, gated.norm, gated.biases, gated.kv_heads) == ("rotary", "rmsnorm", False, 4)
    plain = shape_of(gpt(), STACKS["megatron-lm"])
    assert isinstance(plain, DecoderShape)
    assert (plain.positions, plain.dropout, plain.entries) == ("learned", 0.1, 50432)  # 197 x 256
    mixture = shape_of(gpt(arch="decoder moe", gated_mlp=True, n_experts=8, notes="moe-ffn-hidden-size=512"), core)
    assert isinstance(mixture, MoeShape)
    assert (mixture.n_experts, mixture.moe_topk, mixture.moe_ffn) == (8, 2, 512)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": None}, "figures missing: layers"), ({"arch": "decoder (Transformer-XL, memory)"}, "not modelled"),
        ({"hidden": 1000, "heads": 16}, "head size"), ({"gpu": "abacus"}, "no data sheet"),
        ({"trainable": "adapters"}, "trainable parameters"), ({"freeze": "nothing"}, "trainable parameters"),
        ({"gpu": "unknown"}, "GPU not stated"), ({"problem": "layers: 'x'"}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_says_why(changes: dict[str, object], reason: str) -> None:
    assert reason in skipped(gpt(**changes)).reason


def test_rows_of_adapters_are_quicker_and_smaller() -> None:
    whole, adapters = (predicted(gpt(hidden=8192, heads=64, trainable=one)) for one in (None, "lora:r=8"))
    assert adapters.step_seconds < 0.8 * whole.step_seconds
    assert adapters.memory.optimizer + adapters.memory.gradients < 0.1 * whole.memory.optimizer


def test_dense_blocks_before_the_experts() -> None:
    assert [dense_layers(text) for text in ("([0]*3+[1]*12)", "[0]*1+[1]*15", "([1]*8)", None)] == [3, 1, 0, 0]


def test_stacks_by_name_and_what_a_run_says_of_itself() -> None:
    assert match_stack("NeMo/Megatron-Core").name == "megatron-core"
    assert match_stack("Megatron-DeepSpeed (BLOOM)").name == "megatron-deepspeed-bloom"
    assert match_stack("a framework of tomorrow") is DEFAULT
    plain = stack_of(gpt(precision="fp32", optimizer="sgd"), "fp32", CALIBRATION)
    assert (plain.states.parameters, plain.states.gather, plain.states.optimizer_bytes) == ("fp32", "fp32", 4)
    assert [optimizer_of(text, DEFAULT) for text in ("decoupled_adamw", "adam", None, "adamw fused")] == [
        "adamw-loop", DEFAULT.optimizer, DEFAULT.optimizer, "adamw-fused",
    ]  # fmt: skip
    # Whole bf16 parameters beside an fp32 shard of them and two moments: 12 bytes an item are sharded.
    states = stack_of(gpt(framework="torchtitan", zero_stage=3), "bf16", CALIBRATION).states
    assert (states.parameters, states.optimizer_bytes) == ("bf16", 12)
    fused = stack_of(gpt(act_ckpt="selective (norm, act)", notes="cross-entropy-loss-fusion=True"), "bf16", CALIBRATION)
    assert (fused.kernels.selective, fused.kernels.jit_loss, fused.kernels.inplace_loss) == ("norms", True, False)
    assert not stack_of(gpt(flash_attn=False), "bf16", CALIBRATION).kernels.flash_attention


def test_megatron_adds_gradients_up_in_half_precision_under_fp16() -> None:
    # Data groups of 2 exchange 2 bytes an item instead of 4, and keep as many less.
    half, whole = (predicted(gpt(precision=precision)) for precision in ("fp16", "bf16"))
    assert half.time.communication < whole.time.communication
    assert half.memory.gradients == pytest.approx(whole.memory.gradients / 2, rel=1e-6)


def test_reports_of_a_few_runs() -> None:
    runs = [gpt(), gpt(tp=1, dp=4, iter_time_s=0.1, peak_mem_gb=4.0), gpt(arch="abacus")]
    judged = validate_runs(runs, CALIBRATION)
    scores = score_families(judged)
    data = json.loads(json.dumps(as_data(scores, macros(judged), judged, 1)))
    assert data["families"]["made-up"]["skipped"] == {"architecture not modelled": 1}
    needed = {"rows", "scored", "skipped", "time_mape", "time_median", "time_bias", "memory_mape", "memory_bias"}
    assert needed | {"spearman", "regret"} <= data["families"]["made-up"].keys()
    assert len(data["worst"]) == 1
    (worst,) = worst_runs(judged, 1)
    assert "GiB" in " ".join(worst_lines(judged[1]))
    assert worst.scored


def test_asynchronous_tensor_parallelism_hides_gathers_and_scatters() -> None:
    titan = {"framework": "torchtitan FSDP2 torch.compile", "pp": 1, "dp": 1, "tp": 8, "seq_parallel": True}
    waits, hides = predicted(gpt(**titan)), predicted(gpt(**titan, precision="bf16 + AsyncTP"))
    # What is hidden slows compute down by an eighth while it runs; what is gathered is not copied.
    assert hides.time.communication == pytest.approx((0.8 + 0.2 / 8) * waits.time.communication, rel=0.02)
    assert hides.time.other < waits.time.other
    assert hides.time.forward == waits.time.forward


MIB = 2**20


def test_allocated_memory_holds_workspaces_and_nvidia_smi_shows_what_is_reserved() -> None:
    own, smi = predicted(gpt()), predicted(gpt(notes="Mem = nvidia-smi max"))
    assert own.peak_memory == own.device_memory - own.memory.context + 2 * (8 * MIB + 128 * 1024)
    tensors, buffers = own.device_memory - own.memory.context, own.memory.gradients  # Megatron's main gradients
    assert smi.peak_memory == pytest.approx((tensors - buffers) / 0.85 + buffers + own.memory.context, abs=1)
    tight = predicted(gpt(notes="Mem = nvidia-smi max", gpu="V100-SXM2-16GB", micro_batch=16))
    assert tight.peak_memory == max(tight.device_memory, min(tight.peak_memory, tight.capacity))


def test_torchtitan_reports_what_is_reserved() -> None:
    run = gpt(framework="torchtitan FSDP2", pp=1, dp=4, zero_stage=3, global_batch=8)
    own = predicted(run)
    tensors = own.device_memory - own.memory.context
    assert own.peak_memory == pytest.approx(tensors / 0.85 + 2 * (8 * MIB + 128 * 1024), abs=1)


def test_which_devices_a_run_speaks_of() -> None:
    own = predicted(gpt())
    assert predicted(gpt(notes="max allocated on the LAST rank")).peak_memory <= own.peak_memory
    every = predicted(gpt(notes="SUM over all GPUs"))
    assert own.peak_memory < every.peak_memory <= 8 * own.peak_memory


def test_buckets_and_passing_gradients_cost_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes an item of buckets where replicas sum gradients, none on a single replica."""

    def peak(states: dict[str, int], **changes: object) -> int:
        def stack_of(framework: str) -> Stack:
            plain = match_stack("Megatron-LM")
            return replace(plain, states=replace(plain.states, **states))  # type: ignore[arg-type]

        monkeypatch.setattr("galvatron_lite.validate.checks.match_stack", stack_of)
        return predicted(gpt(pp=1, **changes)).memory.gradients

    items = peak({}, dp=4) // 4
    assert peak({"bucket_bytes": 2}, dp=4) == pytest.approx(6 * items, rel=1e-6)
    alone = {"dp": 1, "n_gpus": 2, "global_batch": 8}
    assert peak({"bucket_bytes": 2}, **alone) == peak({}, **alone)


def test_inputs_are_gathered_again_only_where_they_would_not_fit_otherwise() -> None:
    run = gpt(framework="nanotron", tp=8, dp=1, pp=1, seq_parallel=True, grad_accum=1, seq_len=16384)
    small, large = (predicted(replace(run, micro_batch=batch, global_batch=batch)) for batch in (40, 48))
    # 8 layers keep two gathered inputs of 2 bytes an item each, the head one; 7/8 of them for other devices' sake.
    spared = (8 * 2 + 1) * 2 * 1024 * 16384 * 7 // 8
    assert small.device_memory <= small.capacity
    assert large.device_memory <= large.capacity < large.device_memory + 48 * spared
    assert large.memory.activations == pytest.approx(1.2 * small.memory.activations - 48 * spared, rel=1e-3)


RUN = PublishedRun(
    family="made-up", run_id="made-up-1", framework="Chainer/ChainerMN", model="resnet50", arch="cnn", image_size=224,
    gpu="V100-SXM2-16GB", gpus_per_node=4, intra_link="NVLink2", inter_net="2x InfiniBand EDR 100Gb (ABCI)",
    inter_node_gbps=200, n_gpus=16, dp=4, tp=1, pp=1, cp=1, micro_batch=64, global_batch=256, grad_accum=1,
    act_ckpt="none", precision="fp32", flash_attn=False, spatial=4, quality="A",
)  # fmt: skip


@pytest.mark.parametrize(("spatial", "filters", "kind"), [(4, 1, Method.DATA_SPATIAL), (1, 4, Method.DATA_FILTER)])
def test_predictions_agree_with_the_oracle(spatial: int, filters: int, kind: Method) -> None:
    """Only the cluster is put together from the row's words, not from a file."""
    found = predicted(replace(RUN, spatial=spatial, filter=filters))
    machine = cluster_costs(graph_named("resnet50", "fp32"), "abci", 16, "fp32", 64, match_stack(RUN.framework))
    row = price_row(machine, RowQuestion(kind, 16, 64, 256))
    assert found.step_seconds == pytest.approx(row.iteration, rel=0.05)
    assert found.time.total == pytest.approx(found.step_seconds)


def test_shared_pixels_take_less_memory_and_filters_do_not() -> None:
    whole = predicted(replace(RUN, spatial=1, n_gpus=4)).device_memory
    assert predicted(RUN).device_memory < whole / 2
    assert predicted(replace(RUN, spatial=1, filter=4)).device_memory == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"n_gpus": 4, "dp": 1, "global_batch": 64}, Method.SPATIAL),
        ({"n_gpus": 4, "dp": 1, "global_batch": 64, "spatial": 1, "filter": 4}, Method.FILTER),
    ],
)
def test_a_single_group_has_no_neighbours(changes: dict[str, int], kind: Method) -> None:
    question = question_of(replace(RUN, **changes))  # type: ignore[arg-type]
    assert (question.kind, question.batch, question.width) == (kind, 64, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter": 2}, "pixels and filters shared at once"),
        ({"n_gpus": 18}, "degrees do not multiply to the number of GPUs"),
        ({"pp": 2}, "degrees do not multiply to the number of GPUs"),
        ({"global_batch": 250}, "batch does not divide"),
        ({"grad_accum": 2}, "batch does not divide"),
        ({"model": "vit_base_patch16_224", "arch": "vit"}, "spatial or filter parallelism"),
    ],
)
def test_what_is_not_priced(changes: dict[str, int], reason: str) -> None:
    assert skipped(replace(RUN, **changes)).reason == reason  # type: ignore[arg-type]
