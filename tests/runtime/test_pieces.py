"""Process groups, and the pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.mesh import build_meshes
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from galvatron_lite.runtime.parameters.pieces import held_buffers, held_parameters, held_states
from tests.pool import JobError, WorkerPool
from tests.runtime.assembly import assemble, show
from tests.runtime.pictures import Pictures, make_net, make_parallel_net, make_pictures
from tests.runtime.plans import make_plan
from tests.runtime.training import Case, make_batch, make_model, make_parallel


def members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


NAMES = ("data", "zero", "tensor", "batch", "stage", "everyone")


def groups_of(stages: list[list[Strategy]], of: Strategy, names: tuple[str, ...] = NAMES) -> dict[str, object]:
    layers = [[f"layer{s}{i}" for i in range(len(stage))] for s, stage in enumerate(stages)]
    meshes = build_meshes(make_plan(layers, stages, 8), "cpu")
    view = meshes.groups(of)
    found = {axis: members(getattr(view, axis)) for axis in names}
    mesh = None if view.zero_mesh is None else view.zero_mesh.mesh.tolist()
    return found | {
        "mesh": mesh, "place": (meshes.stage_index, meshes.index_in_stage, view.batch_index, view.tensor_index),
        "pipeline": members(meshes.pipeline),
    }  # fmt: skip


AXES = ("data", "zero", "context", "tensor", "batch", "gradients", "depth", "height", "width", "slices")
EIGHT: dict[str, tuple[list[Strategy], dict[str, object]]] = {
    "three axes": (
        [Strategy(data=2, zero=2, zero_stage=3, tensor=2)],
        {"data": [1, 5], "zero": [5, 7], "tensor": [4, 5], "batch": [1, 3, 5, 7], "gradients": [1, 3, 5, 7],
         "mesh": [[1, 3], [5, 7]], "place": (0, 5, 2, 1)},
    ),
    "pixels inside samples": (
        [Strategy(data=2, zero_stage=3, height=2, width=2), Strategy(data=4, filters=2)],
        {"data": [1, 5], "zero": [4, 5, 6, 7], "batch": [1, 5], "gradients": list(range(8)), "height": [5, 7],
         "width": [4, 5], "mesh": [[0, 1, 2, 3], [4, 5, 6, 7]], "place": (0, 5, 1, 0)},
    ),
    "channels of neighbours": (
        [Strategy(data=2, zero=2, zero_stage=2, channels=2)],
        {"data": [1, 5], "zero": [5, 7], "batch": [1, 3, 5, 7], "gradients": [1, 3, 5, 7], "slices": [4, 5],
         "mesh": [[1, 3], [5, 7]], "place": (0, 5, 2, 0)},
    ),
    "tokens share states": (
        [Strategy(data=2, context=2, tensor=2, zero_stage=3),
         Strategy(data=2, context=2, tensor=2, zero_stage=3, ulysses=True)],
        {"data": [1, 5], "zero": [5, 7], "context": [5, 7], "tensor": [4, 5], "batch": [1, 5],
         "gradients": [1, 3, 5, 7], "mesh": [[1, 3], [5, 7]], "place": (0, 5, 1, 1)},
    ),
}  # fmt: skip
"""Layers' strategies on eight ranks, and the groups that rank 5 is in."""


def groups_by_case() -> dict[str, dict[str, object]]:
    names = (*AXES, "stage", "everyone")
    return {name: groups_of([stage], of=stage[0], names=names) for name, (stage, _) in EIGHT.items()}


def test_groups_of_eight_ranks(pool: WorkerPool) -> None:
    found = pool.run(8, groups_by_case)[5]
    everyone = {"stage": list(range(8)), "everyone": list(range(8)), "pipeline": None}
    for name, (_, wanted) in EIGHT.items():
        assert found[name] == dict.fromkeys(AXES) | everyone | wanted, name


def test_stages_take_consecutive_ranks(pool: WorkerPool) -> None:
    wide, split = Strategy(data=2), Strategy(tensor=2)
    found = pool.run(4, groups_of, stages=[[wide, split], [wide, split]], of=split)
    assert [one["tensor"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["pipeline"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [one["place"] for one in found] == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 0, 1)]


def test_one_rank_has_no_groups(pool: WorkerPool) -> None:
    (found,) = pool.run(1, groups_of, stages=[[Strategy()]], of=Strategy())
    assert {found[axis] for axis in ("data", "zero", "tensor", "batch", "stage", "pipeline")} == {None}


def test_world_of_another_size_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match=r"LaunchError: The plan is for 4 device.*but 2 process.*--gpus 2"):
        pool.run(2, groups_of, stages=[[Strategy(data=4)]], of=Strategy(data=4))


def test_strategy_must_take_the_whole_stage() -> None:
    plan = make_plan([["a", "b"]], [[Strategy(data=2), Strategy(data=1)]], 8)
    with pytest.raises(InputError, match="strategy of b"):
        build_meshes(plan, "cpu")


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, eps=1e-4),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


def cover(cases: Sequence[tuple[Case, str]]) -> None:
    for case, name in cases:
        parallel = make_parallel(case)
        optimizer = parallel.optimizer(OPTIMIZERS[name])
        parallel.train_step(make_batch(), optimizer)
        wholes, counts = assemble(show(held_parameters(parallel)))
        assert_covered(wholes, counts, full_state_dict(parallel), make_model(case.model))
        states, counts = assemble(show(held_states(parallel, optimizer)))
        assert_states(states, counts, make_model(case.model), make_batch(), OPTIMIZERS[name])


def assert_covered(
    wholes: dict[str, Tensor], counts: dict[str, Tensor], state: dict[str, Tensor], model: nn.Module
) -> None:
    """Every parameter under its first name, each of its items as often as any other."""
    assert sorted(wholes) == sorted(name for name, _ in model.named_parameters())
    for name, whole in wholes.items():
        assert torch.equal(whole, state[name]), name
        assert counts[name].min() == counts[name].max() > 0, name


def assert_states(
    states: dict[str, Tensor], counts: dict[str, Tensor], model: nn.Module, batch: Any, factory: Any
) -> None:
    """As plain torch has them after a step."""
    optimizer = factory(model.parameters())
    loss = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss.backward()
    optimizer.step()
    wanted = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    assert states.keys() == wanted.keys()
    for name, value in wanted.items():
        assert counts[name].min() == counts[name].max() > 0, name
        difference = float((states[name] - value).double().norm())
        assert difference <= max(1e-5 * float(value.double().norm()), 1e-8), (name, difference)


def train_stages() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    case = Pictures([Strategy(data=1)] * 5, norm="batch", cuts=[3], chain=True)
    parallel = make_parallel_net(case)
    parallel.train_step(make_pictures(case), parallel.optimizer(SGD))
    return full_state_dict(parallel), assemble(show(held_buffers(parallel)))[0]


def test_buffers_are_those_of_the_stage_that_has_them(pool: WorkerPool) -> None:
    case = Pictures([Strategy(data=1)] * 5, norm="batch", chain=True)
    model = make_net(case)
    model(*make_pictures(case))
    for state, buffers in pool.run(2, train_stages):
        for name, wanted in model.named_buffers():
            torch.testing.assert_close(buffers[name], wanted)
            torch.testing.assert_close(state[name], wanted)


def test_parts_of_states_with_extents_of_one() -> None:
    """Adafactor keeps rows and columns; on one process all are whole."""
    case = Case([Strategy()] * 5)
    parallel = make_parallel(case)
    optimizer = parallel.optimizer(OPTIMIZERS["adafactor"])
    parallel.train_step(make_batch(), optimizer)
    states, counts = assemble(show(held_states(parallel, optimizer)))
    assert_states(states, counts, make_model(case.model), make_batch(), OPTIMIZERS["adafactor"])
