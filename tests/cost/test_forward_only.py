"""Plans that run forward alone, and the shipped measured profile against the plans that were run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.api import plan
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.forward_only import for_inference, live_bytes
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Passed, Recompute, Role
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Mode, Plan, Prediction, Schedule, Stage
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import LayerPoint, OriginKind, Profile
from galvatron_lite.profiler.store import read_profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.result import plan_of
from tests.factories import make_cluster, make_kind, make_profile


def of_one_stage(profile: Profile, strategy: Strategy, devices: int, batch: int, mode: Mode) -> Plan:
    """A plan without a pipeline, all layers alike."""
    layers = len(profile.graph.layers)
    made = plan_of(
        profile.graph,
        devices=devices,
        global_batch=batch,
        microbatches=1,
        cuts=(0, layers),
        strategies=[strategy] * layers,
    )
    return replace(made, mode=mode)


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(data=4), Strategy(zero=4, zero_stage=3), Strategy(tensor=4)])
def test_a_forward_pass_takes_what_training_spends_in_forward(strategy: Strategy) -> None:
    """Of a GPT on a data sheet's cluster: compute and communication of forward, and nothing else."""
    graph = load_model("gpt2", sequence=None, precision="bf16")
    profile = estimate_profile(graph, load_cluster("a100-80gb", 4), precision="bf16", name="gpt2")
    both, alone = LayerPricer(profile), LayerPricer(for_inference(profile))
    for layer in graph.layers:
        if graph.kind_of(layer).tensor_degrees % strategy.tensor:
            continue
        training = both.price(layer.kind, strategy, 8, 1)
        running = alone.price(layer.kind, strategy, 8, 1)
        assert running.forward == training.forward
        # Gathers of ZeRO-1 and 2 after the update are no part of it, those of forward are.
        assert running.forward_exposed == pytest.approx(training.forward_exposed, abs=1e-12)
        assert running.backward == running.recompute == running.backward_exposed == running.step_exposed == 0.0
        assert running.update == running.step_host == 0.0
        assert running.states == running.gradients == running.formed_gradients == running.passing_gradients == 0
        assert running.reduce_buffer == running.full_gradients == running.kept == running.optimizer_working == 0
        assert running.parameters == training.parameters


def test_time_and_memory_by_hand() -> None:
    """Two layers on one device: seconds add up; the peak is all parameters and the larger of the layers at work."""
    kinds = [make_kind("before", 100, boundary=40), make_kind("block", 300, boundary=40)]
    graph = ModelGraph(
        "test",
        (Layer("a", "before", Role.BEFORE), Layer("b", "block", Role.BLOCK)),
        {kind.name: kind for kind in kinds},
        8,
        "fp32",
    )
    points = [
        LayerPoint("before", 1, 1, False, Recompute.NONE, 2.0, 5.0, 70, 90, 80),
        LayerPoint("block", 1, 1, False, Recompute.NONE, 3.0, 7.0, 700, 900, 800),
    ]
    profile = make_profile(graph, points, make_cluster(1))
    found = evaluate(profile, of_one_stage(profile, Strategy(), 1, 1, Mode.INFERENCE))
    assert found.prediction.step_seconds == pytest.approx(5.0 + profile.overhead.step)
    assert found.stages[0].memory.parameters == 4 * 400
    assert found.stages[0].memory.gradients == found.stages[0].memory.optimizer == 0
    assert found.prediction.peak_memory == 4 * 400 + 800 + 40


def test_tensors_that_skip_layers_stay_until_they_are_read() -> None:
    """a -> b -> c, a -> c, and d, whose output is a result: held while later layers run."""
    kinds = {name: make_kind(name, 10, boundary=8) for name in ("ka", "kb", "kc", "kd")}
    layers = tuple(Layer(name, f"k{name}", Role.BLOCK) for name in ("d", "a", "b", "c"))
    tensors = (Passed("a", ("b", "c"), 8), Passed("b", ("c",), 8))
    graph = ModelGraph("test", layers, kinds, 8, "fp32", tensors)
    assert live_bytes(graph) == {"kd": 8, "ka": 8 + 8, "kb": 8 + 8, "kc": 16 + 8}


def test_a_plan_for_inference_needs_less_and_recomputes_nothing() -> None:
    graph = load_model("gpt2", sequence=None, precision="bf16")
    profile = estimate_profile(graph, load_cluster("a100-80gb", 2), precision="bf16", name="gpt2")
    plans = [
        find_plan(profile, devices=2, global_batch=8, budget=6 * 10**9, runners_up=0, mode=mode)
        for mode in (Mode.TRAINING, Mode.INFERENCE)
    ]
    training, running = plans
    assert [one.mode for one in plans] == [Mode.TRAINING, Mode.INFERENCE]
    assert running.prediction.peak_memory < training.prediction.peak_memory
    assert running.prediction.step_seconds < training.prediction.step_seconds / 2
    assert {run.strategy.recompute for stage in running.stages for run in stage.runs} == {Recompute.NONE}
    again = evaluate(profile, running)
    assert again.prediction == running.prediction


def test_inference_is_chosen_by_name() -> None:
    found = plan(model="gpt2", cluster="a100-80gb", gpus=2, batch=4, mode="inference")
    assert found.mode is Mode.INFERENCE
    assert plan(model="gpt2", cluster="a100-80gb", gpus=2, batch=4).mode is Mode.TRAINING
    with pytest.raises(InputError, match="inference"):
        plan(model="gpt2", cluster="a100-80gb", gpus=2, batch=4, mode="serving")


PROFILE = Path(__file__).parents[2] / "profiles" / "CPU-AMD-EPYC-x2-5bce98" / "quickstart-profile.yaml"
FULL = Recompute.FULL
DATA, TENSOR, ALONE = Strategy(data=2), Strategy(tensor=2), Strategy()
ZERO2, ZERO3 = Strategy(zero=2, zero_stage=2), Strategy(zero=2, zero_stage=3)

# Stages, micro-batches, strategies of the blocks (the last repeats), measured ms a step, measured peak MiB.
RAN = (
    (1, 1, (DATA,), 394, 176.4),
    (1, 4, (DATA,), 392, 100.4),
    (1, 1, (Strategy(data=2, recompute=FULL),), 470, 101.2),
    (1, 1, (ZERO2,), 431, 158.5),
    (1, 1, (ZERO3,), 459, 137.0),
    (1, 2, (Strategy(zero=2, zero_stage=3, recompute=FULL),), 657, 63.5),
    (1, 1, (TENSOR,), 481, 172.2),
    (1, 2, (Strategy(tensor=2, sequence_parallel=True),), 582, 100.9),
    (2, 2, (ALONE,), 564, 143.0),
    (2, 8, (ALONE,), 477, 64.8),
    (2, 4, (Strategy(recompute=FULL),), 621, 53.2),
    (1, 2, (ZERO3, ZERO3, TENSOR, TENSOR, DATA), 510, 106.9),
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile(PROFILE)


def plan_that_ran(profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...]) -> Plan:
    names = [layer.name for layer in profile.graph.layers]
    edge = Strategy(
        data=blocks[-1].data, zero=blocks[-1].zero, zero_stage=blocks[-1].zero_stage, tensor=blocks[-1].tensor
    )
    inner = [blocks[min(index, len(blocks) - 1)] for index in range(len(names) - 2)]
    runs = [LayerRun(name, name, 1, one) for name, one in zip(names, [edge, *inner, edge], strict=True)]
    half = len(inner) // stages + 1
    parts = [runs] if stages == 1 else [runs[:half], runs[half:]]
    made = tuple(Stage(tuple(part)) for part in parts)
    return Plan(PLAN_VERSION, "gpt", 2, 16, microbatches, Schedule.ONE_F_ONE_B, "fp32", made)


def predicted(profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...]) -> Prediction:
    prediction = evaluate(profile, plan_that_ran(profile, stages, microbatches, blocks)).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize(("stages", "microbatches", "blocks", "milliseconds", "mebibytes"), RAN)
def test_a_measured_profile_predicts_the_plans_that_were_run(
    profile: Profile, stages: int, microbatches: int, blocks: tuple[Strategy, ...], milliseconds: int, mebibytes: float
) -> None:
    prediction = predicted(profile, stages, microbatches, blocks)
    assert prediction.step_seconds * 1e3 == pytest.approx(milliseconds, rel=0.091)
    assert prediction.peak_memory / 2**20 == pytest.approx(mebibytes, rel=0.041)


def test_the_profile_is_measured(profile: Profile) -> None:
    assert profile.origin.kind is OriginKind.MEASURED
