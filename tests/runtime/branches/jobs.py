"""Tiny models with branches, their plans, and the functions that the tests of branches run on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite import auto_parallelize
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, BranchPlacement, LayerRun, Mode, Plan, Schedule, Stage
from galvatron_lite.runtime.branches.engine import BranchedModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.runtime.training import ADAMW, Trained, train_plainly

SIDE, CHANNELS = 8, 3
ONE = Strategy()
WHOLE = ("text",)
"""Modules with submodules that are one layer."""


def coder(inside: int, outputs: int, levels: int = 1) -> nn.Sequential:
    """A small encoder-decoder with batch norm."""
    down = [nn.Conv2d(CHANNELS, inside, 3, 2, 1), nn.BatchNorm2d(inside), nn.ReLU(inplace=True)]
    same = [layer for _ in range(levels) for layer in (nn.Conv2d(inside, inside, 3, padding=1), nn.Tanh())]
    return nn.Sequential(*down, *same, nn.ConvTranspose2d(inside, outputs, 2, 2))


class Coders(nn.Module):
    """Encoder-decoders on one input with a common loss, which adds their outputs in some ``order``."""

    def __init__(self, count: int = 2, order: Sequence[int] = (0, 1), use: str = "") -> None:
        super().__init__()
        self.coders = nn.ModuleList([coder(4 + 2 * number, 2, number) for number in range(count)])
        self.order, self.use = order, use

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        found = [
            one(pictures.repeat(2, 1, 1, 1))[: len(pictures)] if self.use == "views" else one(pictures)
            for one in self.coders
        ]
        with torch.no_grad():
            weight = found[1].abs().mean().sign() if self.use == "weighed" else 1.0
        losses = [(found[place] - targets).square().mean() / weight for place in self.order]
        if self.use == "weighed":
            assert losses[0] > 0
        if self.use == "twice":
            losses.append((found[0] * found[1].sigmoid()).mean())
        if self.use == "told":
            assert len(found[1]) == found[1].shape[0] == pictures.shape[0]
            assert found[1].dtype is torch.float32
            assert "tensor" in repr(found[1])
            losses.append(losses[0])
        if self.use == "changed":
            found[0] += 1.0
            losses.append(found[0].square().mean())
        if self.use == "reduced":
            losses = [losses[0], losses[1].detach()]
        return torch.stack(losses).sum()


class Towers(nn.Module):
    """Two towers on separate inputs, with a contrastive loss or a loss of pairs."""

    def __init__(self, contrastive: bool = True) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 6))
        self.picture = coder(4, 2)
        self.project = nn.Linear(2 * SIDE * SIDE, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.contrastive = contrastive

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        text = functional.normalize(self.text(words), dim=-1)
        seen = self.project(torch.relu(self.picture(pictures).flatten(1)))
        seen = seen / seen.norm(dim=-1, keepdim=True)
        if not self.contrastive:
            return (self.scale.exp() * (text * seen).sum(-1)).sigmoid().mean()
        scores = self.scale.exp() * text @ seen.t()
        target = torch.arange(scores.shape[0])
        return (functional.cross_entropy(scores, target) + functional.cross_entropy(scores.t(), target)) / 2


class Captions(nn.Module):
    """A tower that begins with flattened pictures, and one that begins with an embedding; a loss of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, 8), nn.GELU(), nn.Linear(8, 6))
        self.words = nn.Embedding(7, 5)
        self.text = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        seen, text = self.picture(pictures), self.text(self.words(words).mean(1))
        return (1 - functional.cosine_similarity(seen, text)).mean()


class Heads(nn.Module):
    """A trunk and heads with separate losses; one head returns its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3, padding=1), nn.Tanh())
        self.first = nn.Conv2d(4, 2, 3, padding=1)
        self.second = Judge()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.last = nn.Linear(2, 1)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        hidden = self.trunk(pictures)
        loss = self.weight[0] * functional.mse_loss(self.first(hidden), targets)
        seen, judged = self.second(hidden, targets, self.weight)
        return loss + judged + self.last(seen).square().mean()


class Judge(nn.Module):
    """Returns a tensor with samples, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Sigmoid())

    def forward(self, hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = self.body(hidden) * weight[1]
        return made.mean(dim=(2, 3)), (made - targets).abs().mean()


class Chains(nn.Module):
    """A trunk and two chains of modules, with code between the modules that also reads the input and its shape."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.trunk = nn.Linear(6, 6)
        self.up = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 10)])
        self.down = nn.ModuleList([nn.Linear(14, 3), nn.Linear(10, 3)])

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(values))
        first = torch.cat([torch.relu(self.up[0](hidden)), values], dim=1)
        second = torch.tanh(self.up[1](hidden)).view(values.shape[0], -1)
        second = second.detach() if self.detached else second
        return (self.down[0](first) * self.down[1](second)).square().mean()


@dataclass(frozen=True)
class Case:
    """A model with branches and its plan."""

    model: str  # name of the class
    branches: Mapping[str, tuple[Sequence[str], int, int, Strategy]]  # roots, first device, devices, strategy
    trunk: Strategy
    world: int  # number of processes
    samples: int = 4  # of the global batch
    microbatches: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the class
    max_grad_norm: float | None = None
    precision: str = "fp32"


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    made: nn.Module = globals()[case.model](**case.arguments)
    return made


def make_batch(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "Coders": {"pictures": (CHANNELS, SIDE, SIDE), "targets": (2, SIDE, SIDE)},
        "Towers": {"words": (5,), "pictures": (CHANNELS, SIDE, SIDE)},
        "Heads": {"pictures": (CHANNELS, SIDE, SIDE), "targets": (2, SIDE, SIDE)},
        "Chains": {"values": (6,)},
    }
    if case.model == "Captions":
        words = torch.randint(7, (case.samples, 3), generator=generator)
        return {"pictures": torch.randn(case.samples, CHANNELS, SIDE, SIDE, generator=generator), "words": words}
    return {name: torch.randn(case.samples, *shape, generator=generator) for name, shape in shapes[case.model].items()}


def layers_of(case: Case, model: nn.Module) -> tuple[Layer, ...]:
    """A block for every leaf module with parameters, between an empty layer before and one after."""
    leaves = [
        name
        for name, module in model.named_modules()
        if name in WHOLE
        or (next(module.parameters(recurse=False), None) is not None and name.split(".")[0] not in WHOLE)
    ]
    blocks = [Layer(name, name, Role.BLOCK, (name,)) for name in leaves if name]
    return (Layer("before", "before", Role.BEFORE), *blocks, Layer("after", "after", Role.AFTER))


def make_plan(case: Case, layers: Sequence[Layer]) -> Plan:
    rest, branches = list(layers), []
    for name, (roots, first, devices, strategy) in case.branches.items():
        own = [layer for layer in rest if any(f"{layer.name}.".startswith(f"{root}.") for root in roots)]
        rest = [layer for layer in rest if layer not in own]
        branches.append(BranchPlacement(name, tuple(roots), first, devices, _runs(own, strategy)))
    stage = Stage(_runs(rest, case.trunk))
    return Plan(
        PLAN_VERSION, "test", case.world, case.samples, case.microbatches, Schedule.ONE_F_ONE_B, case.precision,
        (stage,), branches=tuple(branches),
    )  # fmt: skip


def _runs(layers: Sequence[Layer], strategy: Strategy) -> tuple[LayerRun, ...]:
    return tuple(LayerRun(layer.name, layer.name, 1, strategy) for layer in layers)


BRANCHES = ("segmentation", "reconstruction")


def perception() -> tuple[nn.Module, dict[str, Tensor]]:
    """The small perception network, and a batch of two."""
    torch.manual_seed(2)
    model = build("perception-mini")
    return model, model.example_batch(2)


def perception_plan(trunk: Strategy = ONE, mode: Mode = Mode.TRAINING, samples: int = 2) -> Plan:
    """A plan with each network on a separate device."""
    case = Case("", {name: ((name,), number, 1, ONE) for number, name in enumerate(BRANCHES)}, trunk, 2, samples)
    return replace(make_plan(case, discover_layers(*perception())), mode=mode)


def train_perception(steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    model, batch = perception()
    parallel: Any = auto_parallelize(model, batch, plan=perception_plan(), device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return losses, parallel.full_state_dict()


def infer_perception(trunk: Strategy) -> Any:
    model, batch = perception()
    made: Any = auto_parallelize(model, batch, plan=perception_plan(trunk), mode="inference", device="cpu")
    pictures = batch["pictures"]
    return [made(pictures), made(pictures=pictures), made({"pictures": pictures}), made((pictures,))]


def used(case: Case) -> tuple[float, ...]:
    """The loss and gradient norm of a step, and the loss in evaluation mode from a call and from ``outputs``."""
    parallel, batch = make_branched(case), make_batch(case)
    loss = parallel(**batch)
    loss.backward()
    norm = parallel.clip_grad_norm(1.0)
    parallel.eval()
    with torch.no_grad():
        return float(loss), float(norm), float(parallel(**batch)), float(parallel.outputs(**batch))


def one_rank_is_late(case: Case, patience: float) -> str:
    """The error of the first rank when the other rank, whose branch it waits for, does nothing."""
    parallel = make_branched(case, timeout=patience)
    if dist.get_rank() == 1:
        time.sleep(4 * patience)
        return ""
    try:
        parallel.backward_step(make_batch(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def wrong_model(case: Case) -> str:
    """The error of a model whose branches cannot be apart."""
    try:
        parallel = make_branched(case)
        parallel.backward_step(make_batch(case))
    except ValueError as error:
        return str(error)
    return "nothing happened"


class Dropping(nn.Module):
    """Two branches, one with dropout, and a trunk with dropout after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
        self.second = nn.Linear(6, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        joined = self.first(values) + self.second(values)
        return self.last(torch.nn.functional.dropout(joined, 0.5)).square().mean()


def train_dropping(steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the parameters of the trunk on this rank."""
    torch.manual_seed(dist.get_rank())
    case = Case("Dropping", {"a": (("first",), 0, 1, ONE), "b": (("second",), 1, 1, ONE)}, ONE, 2)
    model, batch = Dropping(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    layers = layers_of(case, model)
    parallel = BranchedModel(model, make_plan(case, layers), layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return losses, {name: value.detach() for name, value in parallel.module.last.named_parameters()}


def initial_state(case: Case) -> dict[str, Tensor]:
    """The initial state of a model that was built on the meta device."""
    with torch.device("meta"):
        model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(
        model, make_plan(case, layers), layers, make_batch(case), device="cpu", init_fn=fill, seed=7
    ).full_state_dict()  # fmt: skip


def fill(module: nn.Module) -> None:
    """Initialize parameters of modules without ``reset_parameters``."""
    for name, tensor in module.named_parameters(recurse=False):
        if name in ("weight", "scale") and tensor.dim() < 2 and not hasattr(module, "reset_parameters"):
            torch.nn.init.uniform_(tensor)


def in_bf16(case: Case) -> list[float]:
    """Losses of some steps."""
    parallel = make_branched(case)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    return [float(parallel.train_step(make_batch(case), optimizer)) for _ in range(3)]


def make_branched(case: Case, **options: Any) -> BranchedModel:
    model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(model, make_plan(case, layers), layers, make_batch(case), device="cpu", **options)


def train(case: Case, steps: int = 2) -> Trained:
    """The gradients of the first step, the losses of all steps, and the state after the last."""
    parallel = make_branched(case, max_grad_norm=case.max_grad_norm)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch = make_batch(case)
    state = parallel.full_state_dict()
    parallel.backward_step(batch)
    gradients = full_gradients(parallel)
    optimizer.zero_grad()
    parallel.load_full_state_dict(state)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, parallel.full_state_dict())


def train_each(cases: Mapping[str, Case]) -> dict[str, Trained]:
    """Train several cases one after another in the same processes."""
    return {name: train(case) for name, case in cases.items()}


def train_alone(case: Case, steps: int = 2) -> Trained:
    """Train in one process with plain torch."""
    return train_plainly(make_model(case), make_batch(case), case.max_grad_norm, steps)
