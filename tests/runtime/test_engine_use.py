"""Training under plans equals one process; how a parallel model is used; errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients, full_state_dict, load_full_state_dict
from tests.pool import WorkerPool
from tests.runtime.plans import losses_alone, make_plan
from tests.runtime.training import (
    ADAMW,
    SAMPLES,
    Case,
    Trained,
    assert_same,
    make_batch,
    make_model,
    make_parallel,
    plan_of,
    train,
    train_alone,
    train_plainly,
)
from tests.together import Together, together

DATA, ZERO3, ZERO2 = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(zero=2, zero_stage=2)
TENSOR, SEQUENCE = Strategy(tensor=2), Strategy(tensor=2, sequence_parallel=True)
MIXED = [DATA, DATA, SEQUENCE, ZERO3, DATA]


def by_hand(case: Case) -> Trained:
    """The user's own loop: forward, backward, clip, step."""
    parallel = make_parallel(case)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    gradients: list[dict[str, Tensor]] = []

    def clip(_: nn.Module) -> None:
        gradients.append(full_gradients(parallel))
        parallel.clip_grad_norm(case.max_grad_norm)

    losses = losses_alone(parallel, optimizer, [make_batch()] * 2, clip)
    return Trained(losses, gradients[0], full_state_dict(parallel))


CLIPPED = {
    name: Case(one, max_grad_norm=0.05)
    for name, one in {"data": [DATA] * 5, "zero": [ZERO2] * 5, "mixed": MIXED}.items()
}

trained_by_hand = together(by_hand, CLIPPED)


@pytest.mark.parametrize("name", CLIPPED)
def test_used_like_the_model(trained_by_hand: Together, name: str) -> None:
    for found in trained_by_hand[name]:
        assert_same(found, train_alone(CLIPPED[name]))


def accumulate(strategies: list[Strategy]) -> dict[str, Tensor]:
    """Two backward passes on halves of the batch, the first of them without sums over ranks."""
    parallel = make_parallel(Case(strategies))
    batch, half = make_batch(), SAMPLES // 2
    first, second = ({k: v[i * half : (i + 1) * half] for k, v in batch.items()} for i in range(2))
    with parallel.no_sync():
        (parallel(first) / 2).backward()
    (parallel(second) / 2).backward()
    return full_gradients(parallel)


def test_accumulation_by_the_user(pool: WorkerPool) -> None:
    wanted = train_alone(Case([Strategy()] * 5), steps=0)
    for gradients in pool.run(2, accumulate, strategies=MIXED):
        assert_same(Trained([], gradients, wanted.state), wanted)


OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam-foreach": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-4, "foreach": True}),
    "adafactor-like": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-4, "fused": True}),
}


def losses_with(strategies: list[Strategy], name: str) -> list[float]:
    factory, options = OPTIMIZERS[name]
    parallel = make_parallel(Case(strategies))
    optimizer = parallel.optimizer(factory, **options)
    return [float(parallel.train_step(make_batch(), optimizer)) for _ in range(4)]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_any_optimizer(pool: WorkerPool, name: str) -> None:
    model, (factory, options) = make_model("gpt-tiny"), OPTIMIZERS[name]
    wanted = losses_alone(model, factory(model.parameters(), **options), [make_batch()] * 4)
    for losses in pool.run(2, losses_with, strategies=MIXED, name=name):
        assert losses == pytest.approx(wanted, rel=1e-5)


def reload(strategies: list[Strategy]) -> tuple[float, float]:
    """The loss after loading another model's state, and that model's own loss."""
    other = make_model("gpt-tiny")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    parallel = make_parallel(Case(strategies))
    parallel.load_full_state_dict(other.state_dict())
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=0)
    with torch.no_grad():
        return float(parallel(make_batch())), float(other(**make_batch()))


@pytest.mark.parametrize("strategies", [MIXED, [TENSOR] * 5, [ZERO2] * 5])
def test_state_round_trip(pool: WorkerPool, strategies: list[Strategy]) -> None:
    for ours, wanted in pool.run(2, reload, strategies=strategies):
        assert ours == pytest.approx(wanted, rel=1e-6)


BF16 = {
    f"{name}-{model}": Case(strategies, model, microbatches=2, precision="bf16")
    for name, model, strategies in (
        ("data", "llama-tiny", [DATA] * 5), ("zero", "gpt-tiny", [ZERO3] * 5), ("mixed", "gpt-tiny", MIXED),
        ("sequence", "llama-tiny", [TENSOR, *[SEQUENCE] * 3, TENSOR]),
    )
}  # fmt: skip

trained_in_bf16 = together(train, BF16)


@pytest.mark.parametrize("name", BF16)
def test_bf16_follows_fp32(trained_in_bf16: Together, name: str) -> None:
    wanted = train_alone(BF16[name])
    for found in trained_in_bf16[name]:
        assert found.losses == pytest.approx(wanted.losses, rel=0.02)
        assert all(tensor.dtype == torch.float32 for tensor in [*found.gradients.values(), *found.state.values()])
        for name, gradient in wanted.gradients.items():
            # a gradient that is zero in theory (the keys' bias) is pure rounding noise
            if float(gradient.norm()) > 1e-6:
                assert float((found.gradients[name] - gradient).norm()) < 0.1 * float(gradient.norm()), name


def unlike_models() -> float:
    """Every rank starts from other weights: rank 0's count."""
    torch.manual_seed(torch.distributed.get_rank())
    model = make_model("gpt-tiny")
    with torch.no_grad():
        model.norm.weight.mul_(1.0 + torch.distributed.get_rank())
    parallel = ParallelModel(model, plan_of(Case(MIXED)), discover_layers(model), make_batch(), device="cpu")
    with torch.no_grad():
        return float(parallel(make_batch()))


def test_real_parameters_are_made_equal(pool: WorkerPool) -> None:
    wanted = float(make_model("gpt-tiny")(**make_batch()).detach())
    assert pool.run(2, unlike_models) == pytest.approx([wanted] * 2, rel=1e-5)


def from_meta(strategies: list[Strategy]) -> list[float]:
    with torch.device("meta"):
        model = make_model("gpt-tiny")
    parallel = ParallelModel(
        model, plan_of(Case(strategies)), discover_layers(model), make_batch(), device="cpu", init_fn=own_values, seed=3
    )
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    return [float(parallel.train_step(make_batch(), optimizer)) for _ in range(2)]


def own_values(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def test_meta_models_start_alike_under_every_plan(pool: WorkerPool) -> None:
    (alone,) = pool.run(1, from_meta, strategies=[Strategy()] * 5)
    for strategies in (MIXED, [ZERO3] * 5, [TENSOR] * 5):
        for losses in pool.run(2, from_meta, strategies=strategies):
            assert losses == pytest.approx(alone, rel=1e-5)


LAYER_NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "after"]
OTHERS = {
    "a layer that is none": [*LAYER_NAMES[:3], "layers.7", "after"],
    "a layer left out": LAYER_NAMES[:4],
    "another order": ["before", "blocks.1", "blocks.0", "blocks.2", "after"],
}
SAID = {
    "a layer that is none": "The model has no such layer. Its layers are: before, blocks.0",
    "a layer left out": "It says nothing about the layers after",
    "another order": "the next 1 layer(s) of this one are blocks.0",
    "batch": "multiple of 4 samples; the nearest: 4 or 8",
    "no entry": "no such entry",
    "shape": "another shape",
    "loss": "The step was not taken",
    "evaluation": "outputs(batch)",
    "no example": "give an example batch",
    "pickle": "full_state_dict()",
    "split twice": "go on with what that returned",
}


def said_by(*calls: tuple[str, Callable[[], Any]]) -> dict[str, str]:
    """The message of the error that each wrong use raises."""
    said = {}
    for name, call in calls:
        with pytest.raises((InputError, NonFiniteLossError)) as raised:
            call()
        said[name] = str(raised.value)
    return said


def of_plan(plan: Plan, batch: Any = None) -> ParallelModel:
    model = make_model("gpt-tiny")
    return ParallelModel(model, plan, discover_layers(model), batch, device="cpu")


def wrong_on_one_rank() -> dict[str, str]:
    parallel = make_parallel(Case([Strategy()] * 5, microbatches=4))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    state = full_state_dict(parallel)
    without = {name: value for name, value in state.items() if name != "blocks.0.norm1.weight"}
    odd, plans = {key: value[:6] for key, value in make_batch().items()}, {
        name: make_plan([names], [[Strategy()] * len(names)], SAMPLES) for name, names in OTHERS.items()
    }  # fmt: skip
    said = said_by(
        *((name, partial(of_plan, plan, make_batch())) for name, plan in plans.items()),
        ("batch", lambda: parallel.train_step(odd, optimizer)),
        ("no entry", lambda: load_full_state_dict(parallel, without)),
        ("shape", lambda: load_full_state_dict(parallel, state | {"norm.bias": torch.zeros(1)})),
    )
    with torch.no_grad():
        parallel.module.norm.weight.fill_(math.inf)
    before = full_state_dict(parallel)
    said |= said_by(("loss", lambda: parallel.train_step(make_batch(), optimizer)))
    after = full_state_dict(parallel)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return said


def wrong_on_two_ranks() -> tuple[dict[str, str], list[int]]:
    """And how often the state of one rank says that it holds shares, where it does."""
    staged = make_parallel(Case([Strategy()] * 5, cuts=[3])).eval()
    said = said_by(
        ("evaluation", lambda: staged(make_batch())),
        ("no example", lambda: of_plan(plan_of(Case([TENSOR] * 5)))),
        ("pickle", lambda: torch.save(staged, BytesIO())),
        ("split twice", lambda: auto_parallelize(staged.module, make_batch())),
    )
    counts = []
    for strategies in ([DATA] * 5, [TENSOR] * 5, [ZERO3] * 5):
        parallel = make_parallel(Case(strategies))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert parallel.state_dict()
        counts.append(len([one for one in told if "parallel.save(folder)" in str(one.message)]))
    return said, counts


def test_wrong_uses_are_refused_and_change_nothing(pool: WorkerPool) -> None:
    said = pool.run(1, wrong_on_one_rank)[0]
    for more, counts in pool.run(2, wrong_on_two_ranks):
        said |= more
        assert counts == [0, 1, 1]
    assert said.keys() == SAID.keys()
    for name, words in SAID.items():
        assert words in said[name], name


FULL, SELECTIVE = Strategy(data=2, recompute=Recompute.FULL), Strategy(data=2, recompute=Recompute.SELECTIVE)
UNLIKE = {
    "all": [DATA, DATA, TENSOR, ZERO3, DATA],
    "sequence": [TENSOR, SEQUENCE, SEQUENCE, SEQUENCE, TENSOR],
    "sequence-data": [DATA, SEQUENCE, DATA, SEQUENCE, DATA],
    "zero-tensor": [ZERO3, TENSOR, ZERO2, SEQUENCE, ZERO3],
    "edges-tensor": [TENSOR, ZERO3, FULL, DATA, TENSOR],
}


HYBRID = Strategy(data=2, zero=2, zero_stage=2)
FOUR = [
    HYBRID, Strategy(tensor=4, sequence_parallel=True), Strategy(data=2, tensor=2, sequence_parallel=True),
    Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True), HYBRID,
]  # fmt: skip
EDGES = {"data-tensor": (DATA, TENSOR), "tensor-data": (TENSOR, DATA), "zero3-tensor": (ZERO3, TENSOR)}
CASES = {
    **{name: Case(strategies) for name, strategies in UNLIKE.items()},
    "four": Case(FOUR, microbatches=2, max_grad_norm=0.05),
    **{
        f"edges-{name}": Case([a, DATA, SEQUENCE, DATA, b], "llama-tiny", microbatches=2, max_grad_norm=0.05)
        for name, (a, b) in EDGES.items()
    },
    "one process": Case([Strategy()] * 5, microbatches=2),
    "pipeline, clipped": Case([DATA, ZERO3, SEQUENCE, DATA, DATA], microbatches=2, cuts=[2], max_grad_norm=0.05),
}

trained = together(train, CASES)


@pytest.mark.parametrize("name", list(CASES))
def test_plans_train_like_one_process(trained: Together, name: str) -> None:
    """A strategy for each layer; clipping over the true norm; edges of one stage that lie unlike (which sampled plans
    never do); a pipeline with tied embeddings.
    """
    wanted = train_alone(CASES[name])
    assert len(trained[name]) == CASES[name].world
    for found in trained[name]:
        assert_same(found, wanted)


class Chain(nn.Module):
    """Layers in float64 whose loss is a mean over labels other than -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return nn.functional.cross_entropy(hidden, labels)


def train_in_float64(stages: int) -> None:
    """Two micro-batches of unlike weights, with clipping, under a plan and in one process."""
    names = ["before", "blocks.0", "blocks.1", "blocks.2", "after"]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    batch = {"hidden": hidden, "labels": torch.tensor([0, 1, 2, 3, 4, -100, -100, 5])}
    alone = Chain()
    wanted = train_plainly(alone, batch, 0.05, 2)
    if stages == 1:
        plan = make_plan([names], [[DATA] * 5], 8, 2)
    else:
        plan = make_plan([names[:2], names[2:]], [[Strategy()] * 2, [Strategy()] * 3], 8, 2)
    parallel = auto_parallelize(Chain(), batch, plan=plan, device="cpu")
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    losses = [parallel.train_step(batch, optimizer, max_grad_norm=0.05) for _ in range(2)]
    with torch.no_grad():
        losses.append(parallel(batch))
        wanted.losses.append(alone(**batch))
    wanted_losses = torch.tensor(wanted.losses, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(losses), wanted_losses, rtol=1e-14, atol=0)
    torch.testing.assert_close(full_state_dict(parallel), wanted.state, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("stages", [1, 2])
def test_models_in_float64_train_in_float64(pool: WorkerPool, stages: int) -> None:
    """Losses, norms and weights of shares, too."""
    pool.run(2, train_in_float64, stages=stages)


class Term(nn.Linear):
    """A layer that returns a term of the loss, too."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return hidden + super().forward(hidden).tanh(), hidden.square().mean()


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Term(6, 6) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            hidden, term = block(hidden)
            total = total + term
        return hidden.square().mean() + total


def losses_of_terms() -> tuple[list[float], float]:
    """Where the layers share the samples and the code around them does not; and in one process."""
    plan = make_plan([["before", "blocks.0", "blocks.1", "blocks.2", "after"]], [[TENSOR, *[DATA] * 3, TENSOR]], 8, 1)
    hidden = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    parallel = auto_parallelize(Terms(), hidden, plan=plan, device="cpu")
    with torch.no_grad():
        losses = [float(parallel(hidden)), float(parallel.outputs(hidden)), float(Terms()(hidden))]
    losses.append(float(parallel(hidden).detach()))
    return losses, losses.pop(2)


def test_terms_that_layers_return_are_means_over_all_samples(pool: WorkerPool) -> None:
    for losses, wanted in pool.run(2, losses_of_terms):
        assert losses == pytest.approx([wanted] * 3, rel=1e-6)


def names_of_parameters() -> list[set[str]]:
    interleaved = Case([Strategy()] * 5, cuts=[1, 2, 4], schedule=Schedule.INTERLEAVED, virtual=2, microbatches=2)
    cases = Case([DATA] * 5), Case([TENSOR] * 5), Case([ZERO3] * 5), Case([Strategy()] * 5, cuts=[3]), interleaved
    return [{name for name, _ in make_parallel(case).named_parameters()} for case in cases]


def test_parameters_have_the_names_of_the_users_model(pool: WorkerPool) -> None:
    """Loops select parameters by name: for rates of their own, or to freeze them. Copies of one have one name."""
    expected = {name for name, _ in make_model("gpt-tiny").named_parameters()}
    for names in zip(*pool.run(2, names_of_parameters), strict=True):
        assert set().union(*names) == expected


def after_evaluation() -> list[dict[str, float]]:
    """Loss and largest change of a frozen parameter, by strategy, when an evaluation pass comes first."""
    results = []
    for strategy in (ZERO2, ZERO3):
        parallel, batch = make_parallel(Case([strategy] * 5)), make_batch()
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        evaluate = partial(_evaluated, parallel, batch)
        before = evaluate()
        state = {name: value * 0.5 for name, value in parallel.full_state_dict().items()}
        parallel.load_full_state_dict(state)
        loaded, model = evaluate(), make_model("gpt-tiny").eval()
        model.load_state_dict(state)
        for name, parameter in parallel.named_parameters():
            parameter.requires_grad_(not name.startswith("norm"))
        trained = float(parallel.train_step(batch, optimizer))
        changes = (
            (parallel.full_state_dict()[name] - state[name]).abs().max() for name in ("norm.weight", "norm.bias")
        )
        with torch.no_grad():
            expected = float(model(**batch))
        results.append(
            {
                "before": before,
                "loaded": loaded,
                "trained": trained,
                "expected": expected,
                "frozen": float(max(changes)),
            }
        )
    return results


def _evaluated(parallel: ParallelModel, batch: dict[str, Tensor]) -> float:
    parallel.eval()
    with torch.no_grad():
        loss = float(parallel(batch))
    parallel.train()
    return loss


def test_what_is_loaded_or_frozen_after_an_evaluation_counts(pool: WorkerPool) -> None:
    for seen in pool.run(2, after_evaluation)[0]:
        assert seen["before"] != pytest.approx(seen["expected"], rel=1e-3)
        assert [seen["loaded"], seen["trained"]] == pytest.approx([seen["expected"]] * 2, rel=1e-5)
        assert seen["frozen"] == 0


def one_block_steps() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The full states, before and after a step of an optimizer of the first block, which one stage has."""
    parallel, batch = make_parallel(Case([Strategy()] * 5, cuts=[3])), make_batch()
    before = parallel.full_state_dict()
    block = [parameter for name, parameter in parallel.named_parameters() if name.startswith("blocks.0.")]
    optimizer = torch.optim.SGD(parallel.param_groups(block), lr=0.1)
    parallel(batch).backward()
    optimizer.step()
    return before, parallel.full_state_dict()


def test_an_optimizer_may_have_parameters_of_one_stage(pool: WorkerPool) -> None:
    before, after = pool.run(2, one_block_steps)[0]
    model = make_model("gpt-tiny")
    model.load_state_dict(before)
    model(**make_batch()).backward()
    torch.optim.SGD([p for name, p in model.named_parameters() if name.startswith("blocks.0.")], lr=0.1).step()
    expected = model.state_dict()
    assert {name for name in after if torch.equal(after[name], before[name])} == {
        name for name in after if not name.startswith("blocks.0.")
    }
    for name, value in after.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
