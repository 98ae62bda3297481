"""What hooks must not be fooled by, and values of tensors that decide what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace.run import check_folded, sample_arguments
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.auto_jobs import measuring_briefly
from tests.pool import WorkerPool
from tests.runtime.plans import split_model
from tests.runtime.untouched import difference, trained_plainly

SAMPLES = TOKENS = 8
WIDTH = 6
DATA, WHOLE = Strategy(data=2), Strategy(tensor=2)


class Block(nn.Module):
    """Takes a mask (per sample), places (per token; as many as samples), and a table that every block hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor, table: Tensor | None, mask: Tensor, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if table is None:
            table = mask.float() * 2.0
        mixed = torch.tanh(self.linear(hidden)) * mask[:, None, None] + tables[0][:, None] * tables[1]
        return hidden + mixed * table[:, None, None], table


class Model(nn.Module):
    """Two containers of blocks with code between them that mixes the samples' order of magnitude."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        mask = (scale > 0.3).float()
        tables = (torch.linspace(0, 1, TOKENS, device=values.device), torch.ones(1, device=values.device))
        hidden, table = self.embed(values), None
        for block in self.first:
            hidden, table = block(hidden, table, mask, tables=tables)
        hidden = hidden * scale[:, None, None]
        table = None
        for block in self.second:
            hidden, table = block(hidden, table, mask, tables=tables)
        assert table is not None
        return (self.head(hidden).squeeze(-1).mean(1) * scale * table).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator), torch.rand(SAMPLES, generator=generator)


def gradients(strategies: list[Strategy]) -> tuple[float, dict[str, Tensor]]:
    blocks = ["first.0", "first.1", "second.0", "second.1"]
    # in tensor groups all ranks do the whole layer
    whole = dict.fromkeys(("before", *blocks, "after"), TensorPlan(max_degree=2))
    parallel = split_model(Model(), batch(), strategies, blocks=blocks, tensor_plans=whole)
    loss = parallel(batch())
    loss.backward()
    return float(loss.detach()), full_gradients(parallel)


PLANS = {
    "rows shared in the middle": [WHOLE, DATA, WHOLE, DATA, WHOLE, WHOLE],
    "rows whole in the middle": [DATA, WHOLE, WHOLE, DATA, WHOLE, DATA],
    "whole containers unlike": [DATA, WHOLE, WHOLE, WHOLE, WHOLE, DATA],
}


@pytest.mark.parametrize("name", list(PLANS))
def test_gradients_equal_one_process(pool: WorkerPool, name: str) -> None:
    model = Model()
    wanted = model(*batch())
    wanted.backward()
    for loss, found in pool.run(2, gradients, strategies=PLANS[name]):
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(found[parameter_name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_arguments_with_samples_are_found() -> None:
    found = sample_arguments(Model(), ["first.0", "first.1"], batch())
    assert found["first.0"] == {".0.0": 1, ".0.2": 1, ".1.tables.0": 0, ".1.tables.1": 0, ".2.0": 1, ".2.1": 1}
    assert found["first.1"][".0.1"]


class Folded(nn.Module):
    """Hands its block biases of (samples times heads, tokens), as models with ALiBi do."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks, self.end = nn.Linear(4, 4), nn.ModuleList([Biased(), Biased()]), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.ones(x.shape[0] * 2, x.shape[1])
        hidden = self.start(x)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return self.end(hidden).mean()


class Biased(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + bias.view(x.shape[0], 2, -1).sum(1)[..., None]


def test_samples_folded_into_another_dim_are_refused_where_they_would_move() -> None:
    found = sample_arguments(Folded(), ["blocks.0"], torch.zeros(4, 3, 4))
    assert found == {"blocks.0": {".0.0": 1, ".0.1": 2, ".2": 1}}
    with pytest.raises(InputError, match=r"Argument 1 of blocks\.0"):
        check_folded(found)
    check_folded(sample_arguments(Model(), ["first.0", "first.1"], batch()))
    assert trace(Folded(), torch.zeros(4, 3, 4)).folded == "argument 1 of blocks.0"
    assert trace(Model(), batch()).folded == ""


class Views(nn.Module):
    """Two views of each sample go through the blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x).repeat(2, 1, 1)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean()


def test_several_rows_a_sample_leave_tokens_together() -> None:
    kinds = trace(Views(), torch.zeros(4, 3, 4)).kinds.values()
    assert all("blocks.0 takes several rows a sample" in kind.context_reason for kind in kinds)
    assert not any(kind.context_reason for kind in trace(Folded(), torch.zeros(4, 3, 4)).kinds.values())


def test_blocks_of_both_containers_are_found() -> None:
    layers = discover_layers(Model(), batch(), blocks=["first.0", "first.1", "second.0", "second.1"])
    assert [layer.role for layer in layers] == [Role.BEFORE, *[Role.BLOCK] * 4, Role.AFTER]


def random_draws(seed_by_rank: bool) -> list[float]:
    from tests.runtime.training import Case, make_parallel

    rank = torch.distributed.get_rank()
    torch.manual_seed(rank if seed_by_rank else 0)
    make_parallel(Case([WHOLE] * 5))
    return torch.rand(3).tolist()


def test_ranks_that_share_matmuls_draw_the_same_numbers(pool: WorkerPool) -> None:
    first, second = pool.run(2, random_draws, seed_by_rank=True)
    assert first == second


ROWS, HIDDEN = 8, 16


class Experts(nn.Module):
    """A mixture as people write it: each expert runs on the tokens that chose it, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN)) for _ in range(6)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2, -1)
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                output.index_add_(0, rows, expert(hidden[rows]) * weights[rows, places, None])
        shares = nn.functional.one_hot(chosen, 6).float().mean((0, 1))
        self.balance = (shares * self.gate(hidden).softmax(-1).mean(0)).sum()
        return hidden + output


class Deciding(nn.Module):
    """Blocks, and code between them that reads values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.enter = nn.Linear(4, HIDDEN)
        blocks = (
            Experts() if kind in ("experts", "balanced") else nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
            for _ in range(4)
        )
        self.blocks = nn.ModuleList(blocks)
        self.leave = nn.Linear(HIDDEN, 1)

    def forward(self, features: Tensor, depths: Tensor) -> Tensor:
        hidden = self.enter(features)
        for block in self.blocks[: int(depths.max()) if self.kind == "depth" else 4]:
            if self.kind == "numbers":
                scales = [1 + depth / 10 for depth in depths.tolist()]
                hidden = hidden * torch.tensor(scales)[:, None] + float(hidden.detach().numpy().size > 0)
            hidden = block(hidden) if self.kind != "branch" or hidden.abs().sum() > 0 else 2 * hidden
        balance = sum(block.balance for block in self.blocks) if self.kind == "balanced" else 0.0
        if self.kind == "inner":  # torch.func.grad runs on no recorder's watch
            balance = torch.func.grad(lambda scale: (scale * hidden).square().mean())(torch.ones(()))
        return self.leave(hidden).square().mean() + balance


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.tensor([3, 2, 3, 1, 3, 2, 1, 3])


def trained(kind: str, folder: str, **options: Any) -> str:
    batch, model = make_batch(), Deciding(kind)
    with measuring_briefly(max_samples=1):
        parallel = auto_parallelize(model, batch, folder=Path(folder), **options)
    return difference(parallel, batch, trained_plainly(Deciding(kind), batch))


@pytest.mark.parametrize("kind", ["depth", "numbers", "experts", "branch", "inner"])
def test_auto_parallelize_trains_them(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(2, trained, kind=kind, folder=str(tmp_path)) == [""] * 2


def test_under_every_pin_that_needs_no_graph(pool: WorkerPool, tmp_path: Path) -> None:
    """On four ranks, some of which run no sample through some experts."""
    pins = {"fix": {"zero": 1, "recompute": "full", "microbatches": 2}}
    assert pool.run(4, trained, kind="experts", folder=str(tmp_path), **pins) == [""] * 4


def refused(kind: str, **options: Any) -> str:
    try:
        auto_parallelize(Deciding(kind), make_batch(), **options)
    except InputError as error:
        return str(error)
    return ""


def test_what_needs_the_graph_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(2, refused, kind="experts", fix={"pp": 2}):
        assert "--fix pipeline: 2 cannot be used." in said
        assert "It trains with dp=2" in said


@pytest.mark.parametrize("options", [{}, {"fix": {"dp": 1, "microbatches": 1}}])
def test_a_loss_of_the_batch_as_a_whole_is_refused_by_one_message(pool: WorkerPool, options: dict[str, Any]) -> None:
    """Experts of a list, and a loss that balances them over all tokens: no plan of two ranks trains it."""
    for said in pool.run(2, refused, kind="balanced", **options):
        assert "On 2 devices no plan trains like one process" in said
        assert "model.zoo.moe.Experts" in said
        assert "--fix" not in said


def test_no_stages_where_values_of_layers_decide(pool: WorkerPool) -> None:
    assert "reads values of what" in trace(Deciding("branch"), make_batch()).whole
    assert not trace(Deciding("plain"), make_batch()).whole
    for said in pool.run(2, in_stages):
        assert "reads values of it to decide what runs" in said


def in_stages() -> str:
    try:
        split_model(Deciding("branch"), make_batch(), Strategy(), [3])
    except InputError as error:
        return str(error)
    return ""


def hooked() -> nn.Module:
    """A model whose modules have hooks that change what they take and return, and that keep what they return."""
    model = Deciding("plain")
    for module in (model.enter, *model.blocks, model.leave):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        module.register_forward_hook(lambda module, _, output: setattr(module, "kept", output) or output * 3)
    model(*make_batch())
    return model


def in_hooked_stages(cuts: list[int], **options: Any) -> str:
    expected = trained_plainly(hooked(), make_batch())
    parallel = split_model(hooked(), make_batch(), Strategy(), cuts, microbatches=2, **options)
    return difference(parallel, make_batch(), expected)


@pytest.mark.parametrize("cuts", [[1], [3]])
def test_hooks_at_the_ends_of_stages_run_once(pool: WorkerPool, cuts: list[int]) -> None:
    assert pool.run(2, in_hooked_stages, cuts=cuts) == [""] * 2


class TimeFirst(nn.Module):
    """Its blocks take tokens along dim 0 and samples along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x).transpose(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.end(hidden).mean()


def test_samples_along_another_dim_are_refused_where_they_would_move() -> None:
    found = sample_arguments(TimeFirst(), ["blocks.0"], torch.zeros(4, 3, 4))
    with pytest.raises(InputError, match=r"Argument 0 of blocks\.0 has samples elsewhere"):
        check_folded(found)
    assert trace(TimeFirst(), torch.zeros(4, 3, 4)).folded == "argument 0 of blocks.0"
