"""Layers and batches of a plan, and its process groups against the row-major order of ranks; errors."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.activations.layout import ActivationLayout as Layout
from galvatron_lite.runtime.assignment import check_samples, glue_layout, place_layers
from galvatron_lite.runtime.mesh import build_meshes
from tests.pool import JobError, WorkerPool
from tests.runtime.plans import make_plan


def members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


NAMES = ("weights", "batch", "stage", "everyone")


def groups_of(stages: list[list[Strategy]], of: Strategy, names: tuple[str, ...] = NAMES) -> dict[str, object]:
    layers = [[f"layer{s}{i}" for i in range(len(stage))] for s, stage in enumerate(stages)]
    meshes = build_meshes(make_plan(layers, stages, 8), "cpu")
    view = meshes.groups(of)
    found = {name: members(getattr(view, name)) for name in names} | {"gradients": members(view.states.gradients)}
    mesh = None if view.states.mesh is None else view.states.mesh.mesh.tolist()
    return found | {
        "mesh": mesh, "place": (meshes.stage_index, meshes.index_in_stage, view.batch_index, view.weights_index),
        "pipeline": members(meshes.pipeline),
    }  # fmt: skip


def test_stages_take_consecutive_ranks(pool: WorkerPool) -> None:
    wide, split = Strategy(data=2), Strategy(tensor=2)
    found = pool.run(4, groups_of, stages=[[wide, split], [wide, split]], of=split)
    assert [one["weights"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["pipeline"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [one["place"] for one in found] == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 0, 1)]


def test_one_rank_has_no_groups(pool: WorkerPool) -> None:
    (found,) = pool.run(1, groups_of, stages=[[Strategy()]], of=Strategy())
    assert {found[axis] for axis in ("weights", "batch", "gradients", "stage", "mesh", "pipeline")} == {None}


def test_world_of_another_size_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match=r"LaunchError: The plan is for 4 device.*but 2 process.*--gpus 2"):
        pool.run(2, groups_of, stages=[[Strategy(data=4)]], of=Strategy(data=4))


def test_strategy_must_take_the_whole_stage() -> None:
    plan = make_plan([["a", "b"]], [[Strategy(data=2), Strategy(data=1)]], 8)
    with pytest.raises(InputError, match="strategy of b"):
        build_meshes(plan, "cpu")


LAYERS = (
    Layer("before", "before", Role.BEFORE, ("embed",)),
    *(Layer(f"blocks.{i}", "block", Role.BLOCK, (f"blocks.{i}",)) for i in range(4)),
    Layer("after", "after", Role.AFTER, ("head",)),
)
DATA, SEQUENCE = Strategy(data=2), Strategy(tensor=2, sequence_parallel=True)


def test_edges_never_share_tokens() -> None:
    (stage,) = place_layers(make_plan([[layer.name for layer in LAYERS]], [[SEQUENCE] * 6], 8), LAYERS)
    assert stage[0].layout == Layout(copies=2) == glue_layout(stage)
    assert glue_layout(stage[1:5]) == Layout(copies=2)


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]))
def test_the_nearest_batches_are_named(samples: int, microbatches: int, first: int, second: int) -> None:
    plan = make_plan([["a"], ["b"]], [[Strategy(data=first)], [Strategy(data=second)]], samples, microbatches)

    def fits(count: int) -> bool:
        return count % microbatches == 0 and all(count // microbatches % degree == 0 for degree in (first, second))

    if fits(samples):
        check_samples(samples, plan, microbatches)
        return
    above = next(count for count in range(samples, 10 * samples + 100) if fits(count))
    below = next((count for count in range(samples, 0, -1) if fits(count)), None)
    near = f"the nearest: {below} or {above}." if below else f"the nearest: {above}."
    with pytest.raises(InputError, match=near):
        check_samples(samples, plan, microbatches)
