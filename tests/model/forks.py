"""Small models of which parts do not depend on each other, and some that only look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Unit(nn.Sequential):
    """A convolution and what follows it."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.ReLU(inplace=True))


class EncoderDecoder(nn.Module):
    """Down and up again, with a skip; its modules are plain attributes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.low = Unit(3, width), Unit(width, 2 * width), Unit(2 * width, 2 * width)
        self.last, self.out = Unit(3 * width, width), nn.Conv2d(width, 1, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.low(self.second(self.pool(fine)))
        return torch.sigmoid(self.out(self.last(torch.cat([self.grow(coarse), fine], 1))))


class Pair(nn.Module):
    """Two encoder-decoders that see the same picture."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = EncoderDecoder(4), EncoderDecoder(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Between(nn.Module):
    """Something before and after the two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pair, self.tail = nn.Conv2d(3, 3, 1), Pair(), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.cat(self.pair(self.stem(x)), 1))


class Heads(nn.Module):
    """A trunk whose end several heads read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.body = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.kind = nn.Linear(16, 7)
        self.box = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        trunk = self.body(self.embed(x))
        return {"kind": self.kind(trunk), "box": self.box(trunk)}


class Cameras(nn.Module):
    """One encoder a camera, or one for all; what they see is fused."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.places = (0, 0, 0) if shared else (0, 1, 2)
        self.encoders = nn.ModuleList(
            nn.Sequential(Unit(3, 4), Unit(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for _ in set(self.places)
        )
        self.fuse = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, pictures: Tensor) -> Tensor:
        seen = [self.encoders[place](pictures[:, camera]) for camera, place in enumerate(self.places)]
        return self.fuse(torch.cat(seen, 1))


class Tower(nn.Module):
    """Words to one vector; a parameter of its own beside its modules'."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, 16), nn.LayerNorm(16)
        self.place = nn.Parameter(torch.zeros(1, 1, 16))
        self.blocks = nn.ModuleList(Residual(16) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


class Towers(nn.Module):
    """Two towers and a projection of each; ``tied``: code of the model reads one tower's table for the other's words"""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.query, self.item = Tower(50), Tower(60)
        self.from_query, self.from_item = nn.Linear(16, 8), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.tied = tied

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        score = self.from_query(self.query(query)) @ self.from_item(self.item(item)).T
        return score * self.scale * (self.query.embed.weight.sum() if self.tied else 1)


class Behind(nn.Module):
    """The second tower reads words that the first one chose: no gradient, and a dependence all the same."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.words, self.second = Tower(50), nn.Linear(16, 50), Tower(50)
        self.how = how

    def forward(self, words: Tensor) -> Tensor:
        scores = self.words(self.first(words))
        chosen = {
            "argmax": lambda: scores.argmax(-1, keepdim=True),
            "detach": lambda: scores.detach().abs().long()[:, :3] % 50,
            "decided": lambda: words if bool((scores > 0).all()) else words + 1,
            "apart": lambda: words,
        }[self.how]()
        return scores.mean() + self.second(chosen).mean()


class Given(nn.Module):
    """Gives what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Handing(nn.Module):
    """Two towers that see one picture and begin by handing it on as it is, or as a view."""

    def __init__(self, *first: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(make() for make in first), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
            for width in (16, 12)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], -1)


class Inception(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.one = Unit(inner, 4)
        self.two = nn.Sequential(Unit(inner, 4), Unit(4, 4))
        self.three = nn.Sequential(Unit(inner, 4), Unit(4, 4), Unit(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x), self.three(x)], 1)


class Inceptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Unit(3, 8), nn.Linear(12, 3)
        self.mix1, self.mix2, self.mix3 = Inception(8), Inception(12), Inception(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix3(self.mix2(self.mix1(self.stem(x)))).mean((2, 3)))


def picture() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def words() -> Tensor:
    return torch.randint(50, (2, 3))


MODELS: dict[str, Callable[[], Made]] = {
    "pair": lambda: (Pair(), picture()),
    "between": lambda: (Between(), picture()),
    "heads": lambda: (Heads(), torch.randn(2, 5)),
    "cameras": lambda: (Cameras(False), torch.randn(2, 3, 3, 8, 8)),
    "one encoder": lambda: (Cameras(True), torch.randn(2, 3, 3, 8, 8)),
    "towers": lambda: (Towers(), (words(), words())),
    "tied towers": lambda: (Towers(tied=True), (words(), words())),
    "argmax": lambda: (Behind("argmax"), words()),
    "detach": lambda: (Behind("detach"), words()),
    "decided": lambda: (Behind("decided"), words()),
    "apart": lambda: (Behind("apart"), words()),
    "inceptions": lambda: (Inceptions(), picture()),
    "flatten": lambda: (Handing(nn.Flatten), torch.randn(2, 2, 4)),
    "identity": lambda: (Handing(nn.Identity), torch.randn(2, 8)),
    "given": lambda: (Handing(Given), torch.randn(2, 8)),
    "dropout": lambda: (Handing(nn.Dropout).eval(), torch.randn(2, 8)),
    "twice": lambda: (Handing(nn.Flatten, nn.Identity), torch.randn(2, 2, 4)),
    "in place": lambda: (Handing(nn.Identity, lambda: nn.ReLU(inplace=True)), torch.randn(2, 8)),
}


def loss_of(output: Any, _: Any = None) -> Tensor:
    """Squares of all that a model gives."""
    tensors = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return sum((tensor.square().mean() for tensor in tensors), torch.zeros(()))
