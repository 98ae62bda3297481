"""Plans of Hetu-Galvatron as ours, and back."""

import json
from dataclasses import replace

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.peers.hetu.plan import DataType, HetuStrategy, from_plan, read_hetu_plan, to_plan, write_hetu_plan
from galvatron_lite.peers.hetu.profile import to_profile
from galvatron_lite.plans.schema import Schedule
from tests.studies.hetu.cases import FOUND, found


@pytest.mark.parametrize("place", range(len(FOUND)))
def test_files_come_back_as_they_were(place: int) -> None:
    plan = FOUND[place].hetu_plan()
    written = write_hetu_plan(plan)
    assert {key: written[key] for key in FOUND[place].plan} == FOUND[place].plan
    assert read_hetu_plan(json.loads(json.dumps(written)), "file") == plan


@pytest.mark.parametrize("place", range(len(FOUND)))
def test_our_plan_says_the_same(place: int) -> None:
    theirs = FOUND[place].hetu_plan()
    ours = to_plan(theirs)
    assert (ours.devices, ours.pipeline, ours.microbatches) == (theirs.devices, theirs.pipeline, theirs.chunks)
    assert sum(run.count for stage in ours.stages for run in stage.runs) == len(theirs.layers) + 2
    back = from_plan(ours)
    assert back.division == theirs.division
    for one, other in zip((*back.layers, back.edges), (*theirs.layers, theirs.edges), strict=True):
        # a single replica has nothing to shard
        assert one == (replace(other, kind=DataType.DDP) if other.data == 1 else other)


def test_what_each_key_means() -> None:
    data = {
        "pp_deg": 2, "tp_sizes_enc": "2,4,1,2", "dp_types_enc": "1,0,0,0", "use_sp": "0,1,0,1",
        "checkpoint": "1,0,0,1", "world_size": 8, "global_bsz": 32, "chunks": 4, "pp_division": "1,3",
        "pipeline_type": "gpipe", "default_dp_type": "zero2", "vtp": 2, "vsp": 0, "embed_sdp": 1,
    }  # fmt: skip
    plan = to_plan(read_hetu_plan(data, "file"))
    assert plan.schedule is Schedule.GPIPE
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    edge = Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True)
    assert strategies == [
        edge, replace(edge, recompute=Recompute.FULL), Strategy(context=4, ulysses=True),
        Strategy(zero=4, zero_stage=1),
        Strategy(zero=2, zero_stage=1, context=2, ulysses=True, recompute=Recompute.FULL), edge,
    ]  # fmt: skip
    assert [run.first for run in plan.stages[1].runs] == ["layers.1", "layers.2", "layers.3", "head"]


def test_a_single_microbatch_shards_gradients_too() -> None:
    data = {"pp_deg": 1, "tp_sizes_enc": "1", "default_dp_type": "zero2", "world_size": 4, "global_bsz": 8, "chunks": 1}
    assert to_plan(read_hetu_plan(data, "file")).stages[0].runs[0].strategy == Strategy(zero=4, zero_stage=2)


def test_one_strategy_by_flags() -> None:
    flags = {
        "pp_deg": 2, "num_layers": 5, "global_tp_deg": 2, "sdp": 1, "global_checkpoint": 1, "vocab_tp": 4,
        "global_train_batch_size": 16, "chunks": 2, "world_size": 8, "default_dp_type": "ddp",
    }  # fmt: skip
    plan = read_hetu_plan(flags, "file")
    assert plan.layers == (HetuStrategy(2, 1, 2, DataType.ZERO3, True),) * 5
    assert plan.edges == HetuStrategy(4, 1, 1, DataType.DDP)
    assert plan.division == (2, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tp_sizes_enc": "2,x"}, "tp_sizes_enc"),
        ({"use_sp": "1"}, "use_sp"),
        ({"tp_sizes_enc": "3,1"}, "layer 0"),
        ({"pp_division": "2,3"}, "pp_division"),
        ({"default_dp_type": "fsdp"}, "default_dp_type"),
        ({"pipeline_type": "zb"}, "pipeline_type"),
        ({"global_bsz": "many"}, "global_bsz"),
        ({"cp_sizes_enc": "2,2"}, "cp_sizes_enc"),
        ({"vtp": 16}, "vtp"),
    ],
)
def test_an_error_names_the_key(change: dict[str, object], named: str) -> None:
    data = {"pp_deg": 1, "tp_sizes_enc": "2,1", "world_size": 4, "global_bsz": 8, "chunks": 1} | change
    with pytest.raises(InputError, match=f"plan.json, {named}"):
        read_hetu_plan(data, "plan.json")


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(data=2, zero=2, zero_stage=3),
        Strategy(zero=2, zero_stage=3, context=2),
        Strategy(context=2, ulysses=True, tensor=2),
        Strategy(zero=4, zero_stage=2, recompute=Recompute.SELECTIVE),
    ],
)
def test_what_their_files_cannot_say_is_named(strategy: Strategy) -> None:
    data = {"pp_deg": 1, "tp_sizes_enc": "1,1", "vtp": 2, "world_size": 4, "global_bsz": 8, "chunks": 1}
    plan = to_plan(read_hetu_plan(data, "file"))
    stage = plan.stages[0]
    changed = tuple(replace(run, strategy=strategy) if run.first == "layers.0" else run for run in stage.runs)
    with pytest.raises(InputError, match=r"strategy of layers\.0"):
        from_plan(replace(plan, stages=(replace(stage, runs=changed),)))


def test_a_profile_of_another_model_is_refused() -> None:
    _, model, hardware = found("bert-large")
    with pytest.raises(InputError, match="has 24 between"):
        to_plan(found("llama2-7b")[0].hetu_plan(), to_profile(model, hardware))
