"""The pieces of all ranks cover every whole tensor once a copy, and together are what one process has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from galvatron_lite.runtime.parameters.pieces import held_buffers, held_parameters, held_states
from tests.pool import WorkerPool
from tests.runtime.assembly import assemble, show
from tests.runtime.pictures import Pictures, make_net, make_parallel_net, make_pictures
from tests.runtime.training import Case, make_batch, make_model, make_parallel

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, eps=1e-4),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}
DATA, ZERO3, HYBRID = Strategy(data=4), Strategy(zero=4, zero_stage=3), Strategy(data=2, zero=2, zero_stage=2)
TENSOR, MIXED = Strategy(tensor=4, sequence_parallel=True), Strategy(zero=2, zero_stage=3, tensor=2)
PAIR, ZERO, HALF = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(tensor=2)
CASES = [
    (Case([HYBRID, TENSOR, MIXED, DATA, HYBRID]), "adamw"),
    (Case([ZERO3, HYBRID, MIXED, HYBRID, ZERO3], "llama-tiny"), "adagrad"),
    (Case([PAIR, ZERO, HALF, PAIR, PAIR], cuts=[2], microbatches=2), "nadam"),
]


def cover(cases: Sequence[tuple[Case, str]]) -> None:
    for case, name in cases:
        parallel = make_parallel(case)
        optimizer = parallel.optimizer(OPTIMIZERS[name])
        parallel.train_step(make_batch(), optimizer)
        wholes, counts = assemble(show(held_parameters(parallel)))
        assert_covered(wholes, counts, full_state_dict(parallel), make_model(case.model))
        states, counts = assemble(show(held_states(parallel, optimizer.state)))
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


def test_pieces_of_layers_split_in_any_way(pool: WorkerPool) -> None:
    pool.run(4, cover, cases=CASES)


def cover_pictures() -> None:
    """Kernels are sliced, running statistics of channels too; an uneven share of channels among them."""
    filters, channels = Strategy(filters=3), Strategy(channels=3)
    case = Pictures([filters, channels, filters, channels, filters], norm="batch")
    parallel = make_parallel_net(case)
    optimizer = parallel.optimizer(SGD)
    parallel.train_step(make_pictures(case), optimizer)
    buffers, counts = assemble(show(held_buffers(parallel)))
    running = counts["blocks.1.norm.running_mean"]
    assert running.tolist() == [1] * 8
    state, model = full_state_dict(parallel), make_net(case)
    assert buffers.keys() == {name for name, _ in model.named_buffers()}
    assert all(torch.equal(buffers[name], state[name]) for name in buffers)
    wholes, counts = assemble(show(held_parameters(parallel)))
    assert_covered(wholes, counts, state, model)
    states, counts = assemble(show(held_states(parallel, optimizer.state)))
    assert_states(states, counts, model, make_pictures(case), SGD)


def test_pieces_of_shared_channels(pool: WorkerPool) -> None:
    pool.run(3, cover_pictures)


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


def test_states_with_dimensions_of_one() -> None:
    """Adafactor keeps rows and columns; on one process all are whole."""
    case = Case([Strategy()] * 5)
    parallel = make_parallel(case)
    optimizer = parallel.optimizer(OPTIMIZERS["adafactor"])
    parallel.train_step(make_batch(), optimizer)
    states, counts = assemble(show(held_states(parallel, optimizer.state)))
    assert_states(states, counts, make_model(case.model), make_batch(), OPTIMIZERS["adafactor"])
