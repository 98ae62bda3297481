"""Custom autograd functions, and weights computed from others, train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import TraceError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from tests.pool import WorkerPool
from tests.runtime.plans import losses_alone, split_model
from tests.together import Together, together

SAMPLES, TOKENS, HIDDEN, VOCAB = 4, 8, 16, 32
EDGES = Strategy(data=2)
PLANS = {
    "tensor": [EDGES, *[Strategy(tensor=2)] * 2, EDGES],
    "tokens": [EDGES, *[Strategy(tensor=2, sequence_parallel=True)] * 2, EDGES],
    "context": [EDGES, *[Strategy(context=2)] * 2, EDGES],
    "zero": [Strategy(zero=2, zero_stage=3)] * 4,
}


class Centred(torch.autograd.Function):
    """Subtracts the mean over the tokens: a share of them alone gives something else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return (hidden - hidden.mean(1, keepdim=True)) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient - gradient.mean(1, keepdim=True)) * ctx.scale, None


@torch.library.custom_op("tests::centred", mutates_args=())
def centred(hidden: Tensor, scale: float) -> Tensor:
    return (hidden - hidden.mean(1, keepdim=True)) * scale


@centred.register_fake
def _(hidden: Tensor, scale: float) -> Tensor:
    return torch.empty_like(hidden)


centred.register_autograd(
    lambda ctx, gradient: ((gradient - gradient.mean(1, keepdim=True)) * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)
WAYS = {"function": Centred.apply, "operator": centred}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.way = way

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        heads = [
            part(normed).unflatten(2, (-1, HIDDEN // 2)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return WAYS[self.way](hidden, 0.9) if self.way else hidden


class Model(nn.Module):
    def __init__(self, inside: str, between: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.between = between

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = WAYS[self.between](hidden, 1.1) if self.between else hidden
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def largest_error(model: nn.Module, batch: Any, strategies: list[Strategy], cuts: Sequence[int] = ()) -> float:
    """Of a parameter after two steps under a plan, relative to its tensor's largest entry."""
    alone = copy.deepcopy(model)
    parallel = split_model(model, batch, strategies, cuts)
    sharded = parallel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4)
    losses_alone(alone, optimizer, [batch] * 2)
    for _ in range(2):
        parallel.train_step(batch, sharded)
    state = parallel.full_state_dict()
    pairs = [(state[name], value) for name, value in alone.state_dict().items()]
    return max(float((one - value).abs().max() / value.abs().max()) for one, value in pairs if value.numel())


def error_under(plan: str, inside: str, between: str) -> float:
    torch.manual_seed(0)
    model = Model(inside, between)
    tokens = torch.randint(0, VOCAB, (2, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return largest_error(model, {"tokens": tokens[0], "labels": tokens[1]}, PLANS[plan])


def errors_under(case: str) -> dict[str, float]:
    """Of a function or operator between layers, and inside of them where the plan is offered for such a block."""
    between = {f"between, {way}": error_under(case, "", way) for way in WAYS}
    return between | ({} if case == "tokens" else {f"inside, {way}": error_under(case, way, "") for way in WAYS})


found = together(errors_under, {plan: plan for plan in PLANS}, lambda _: 2)


@pytest.mark.parametrize("plan", PLANS)
def test_they_see_what_one_process_sees(found: Together, plan: str) -> None:
    for errors in found[plan]:
        assert {where: error for where, error in errors.items() if error > 1e-4} == {}


ROWS, WIDTH = 4, 8


class Filtered(nn.Module):
    """A linear layer behind a filter of complex numbers, in the frequencies of each sample."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.filter = linear, nn.Parameter(0.1 * torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.fft.irfft(torch.fft.rfft(hidden) * self.filter, WIDTH))
        return out


class Tempered(nn.Module):
    """A linear layer times a trained scalar, with a frozen scalar, and a parameter without items, added."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) * self.scale + self.shift + self.nothing.sum()
        return out


class Positions(nn.Module):
    """Gives a part of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.values[: hidden.dim() - 1]


class Placed(nn.Module):
    """A linear layer of consecutive columns, behind what another module gives of its parameter."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.positions = linear, Positions()
        linear.weight.data = linear.weight.data.t().contiguous().t()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden + self.positions(hidden))
        return out


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "complex": Filtered,
    "scalar": Tempered,
    "view": Placed,
}
SPLITS: dict[str, tuple[list[Strategy], list[int]]] = {
    "data": ([Strategy(data=2)] * 4, []),
    "zero3": ([Strategy(zero=2, zero_stage=3)] * 4, []),
    "zero2": ([Strategy(zero=2, zero_stage=2, recompute=Recompute.SELECTIVE)] * 4, []),
    "pipeline": ([Strategy()] * 4, [2]),
}


class ParametrizedBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = (KINDS[kind](nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Parametrized(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ParametrizedBlock(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.embed(values)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def errors_of_kinds(plan: str) -> dict[str, float]:
    found, (strategies, cuts) = {}, SPLITS[plan]
    for kind in KINDS:
        torch.manual_seed(0)
        model, batch = Parametrized(kind), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        found[kind] = largest_error(model, batch, strategies, cuts)
    return found


@pytest.mark.parametrize("plan", SPLITS)
def test_they_train_as_in_one_process(pool: WorkerPool, plan: str) -> None:
    for errors in pool.run(2, errors_of_kinds, plan=plan):
        assert {kind: error for kind, error in errors.items() if not error < 1e-4} == {}


class Skipping(nn.Module):
    """What the first block gives is read by the second, and by code between the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        skip = self.blocks[0](self.embed(values))
        hidden = self.blocks[2](self.blocks[1](skip))
        return self.head(self.blocks[3](hidden + skip)).square().mean()


class Listed(nn.Module):
    """Code between layers reads parameters of a list, which comes behind the blocks and never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head, self.scales = nn.Linear(WIDTH, 1), nn.ParameterList([*torch.ones(2, WIDTH)])

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.embed(values)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            hidden = block(hidden) * scale
        return self.head(hidden).square().mean() + self.scales[0].square().mean()


class ConditionedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(torch.tanh(self.up(hidden * condition)))
        return out


class Conditioned(nn.Module):
    """Each token of a block is scaled by something of its sample that another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.condition = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        hidden, condition = self.embed(values[..., None]), self.condition(values)[:, None]
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.head(hidden).square().mean()


BETWEEN: dict[type[nn.Module], tuple[list[Strategy], list[int]]] = {
    Skipping: ([*[Strategy(data=2)] * 5, Strategy(tensor=2)], [3]),
    Listed: ([*[Strategy(data=2)] * 3, Strategy(tensor=2)], []),
    Conditioned: ([EDGES, Strategy(tensor=2, sequence_parallel=True), Strategy(tensor=2), EDGES], []),
}


def error_between(model: type[nn.Module]) -> float:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return largest_error(model(), batch, *BETWEEN[model])


@pytest.mark.parametrize("model", BETWEEN)
def test_gradients_of_what_code_between_layers_reads(pool: WorkerPool, model: type[nn.Module]) -> None:
    world = 2 * (len(BETWEEN[model][1]) + 1)
    assert max(pool.run(world, error_between, model=model)) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("scalar", "view")])
def test_tensor_parallelism_is_not_offered(kind: str) -> None:
    torch.manual_seed(0)
    graph = trace(Parametrized(kind), torch.randn(ROWS, WIDTH))
    assert {graph.kinds[layer.kind].tensor_degrees for layer in graph.layers[1:-1]} == {1}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", [weight_norm, spectral_norm])
def test_hooks_of_old_are_refused(old: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(old(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))
    with pytest.raises(TraceError, match="parametrizations"):
        trace(model, torch.randn(ROWS, WIDTH))
