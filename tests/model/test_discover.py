from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import TraceError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer, Role
from tests.model.models import FAMILIES, LAYERS, Mixer, Plain, hugging_face, plain

BLOCKS = {
    "gpt": "blocks", "llama": "blocks", "hf-gpt2": "transformer.h", "hf-llama": "model.layers",
    "hf-qwen2": "model.layers", "hf-bert": "bert.encoder.layer", "hf-vit": "vit.layers", "plain": "body",
}  # fmt: skip


def names(layers: tuple[Layer, ...], role: Role = Role.BLOCK) -> list[str]:
    return [layer.name for layer in layers if layer.role is role]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_every_family_are_found(family: str) -> None:
    model, batch = FAMILIES[family]()
    for layers in (discover_layers(model), discover_layers(model, batch)):
        assert names(layers) == [f"{BLOCKS[family]}.{place}" for place in range(LAYERS)]
        assert {layer.kind for layer in layers[1:-1]} == {"block"}
        assert (layers[0].role, layers[-1].role) == (Role.BEFORE, Role.AFTER)
        held = {path for layer in layers for path in layer.modules}
        inside = {n for n, _ in model.named_parameters() if any(n.startswith(path + ".") for path in held)}
        assert {n for n, _ in model.named_parameters()} - inside <= {"scale"}


def test_running_order_decides_what_is_before() -> None:
    """Transformers registers the rotary table after the blocks and runs it before them."""
    model, batch = hugging_face("Llama")
    assert discover_layers(model, batch)[0].modules == ("model.embed_tokens", "model.rotary_emb")
    assert discover_layers(model, batch)[-1].modules == ("model.norm", "lm_head")
    assert discover_layers(model)[-1].modules == ("model.norm", "model.rotary_emb", "lm_head")


def test_experts_inside_blocks_are_no_blocks() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8))}) for _ in range(2)
            )
        }
    )
    assert names(discover_layers(model)) == ["layers.0", "layers.1"]


class Held(nn.Module):
    """Towers in a dict, a block whose forward never runs, and levels that only hold what the model's forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for name in "ab"})
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in "ab"})
        self.levels, self.other = nn.ModuleList(nn.Module() for _ in range(2)), TwoLinears()
        for level in self.levels:
            level.blocks, level.extra = nn.ModuleList(TwoLinears() for _ in range(2)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other.one(self.towers["a"](x) + self.towers["b"](x))
        for level in self.levels:
            for block in level.blocks:
                x = block(x)
            x = level.extra(x)
        loss: Tensor = self.heads["a"](x).mean() + self.heads["b"](x).mean()
        return loss


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.one(x)))


def test_modules_that_never_run_only_hold_those_that_do() -> None:
    layers = trace(Held(), torch.randn(2, 8)).layers
    held = {path for layer in layers for path in layer.modules}
    assert {"other.one", "levels.0.extra", "heads.a", "heads.b"} <= held
    assert not {"towers", "heads", "other", "levels.0"} & held
    blocks = [name for name in names(layers) if "blocks" in name]
    assert blocks == [f"levels.{level}.blocks.{place}" for level in (0, 1) for place in (0, 1)]


class Listed(nn.Module):
    """Blocks that others hold too: an updater met before them, and wrappers that never run."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Mixer(4) for _ in range(3))
        self.updater = nn.Module()
        self.updater.instance = nn.ModuleList(blocks)
        self.blocks = blocks
        self.wrappers = nn.ModuleList(nn.Sequential(block) for block in blocks)
        self.head = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def test_other_names_of_blocks_are_no_layers() -> None:
    layers = trace(Listed(), torch.randn(2, 4, 8)).layers
    assert names(layers) == [f"updater.instance.{place}" for place in range(3)]
    assert [path for layer in layers if layer.role is not Role.BLOCK for path in layer.modules] == ["head"]


class Placed(nn.Module):
    """Blocks that hold, and run, a module which the model holds first."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Conv1d(4, 4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(self.place, Mixer(4)) for _ in range(2))
        self.head = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def test_a_shared_module_inside_blocks_is_traced() -> None:
    model = Placed()
    graph = trace(model, torch.randn(2, 4, 8))
    assert sum(kind.parameters.total for kind in map(graph.kind_of, graph.layers)) == sum(
        one.numel() for one in model.parameters()
    )


@pytest.mark.parametrize("blocks", ["body", ["body.0", "body.1", "body.2"], Mixer, [Mixer]])
def test_the_user_names_the_blocks(blocks: Any) -> None:
    model, batch = plain()
    assert names(discover_layers(model, batch, blocks)) == ["body.0", "body.1", "body.2"]


def test_a_named_module_is_one_block() -> None:
    model, batch = plain()
    layers = discover_layers(model, batch, "body.1")
    assert names(layers) == ["body.1"]
    assert layers[0].modules == ("stem", "body.0")
    assert layers[-1].modules == ("body.2", "head")


@pytest.mark.parametrize("blocks", ["layers", nn.LSTM, ["body", "nothing"], Plain])
def test_an_unknown_block_is_an_error(blocks: Any) -> None:
    with pytest.raises(TraceError, match="ModuleList"):
        discover_layers(Plain(), blocks=blocks)


def test_blocks_that_differ_in_a_setting_are_of_two_kinds() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, heads, 16) for heads in (2, 2, 4)))
    assert [layer.kind for layer in discover_layers(model)[1:-1]] == ["block0", "block0", "block1"]


class Looped(nn.Module):
    """Runs the same blocks several times, one more often than all others, as weight-sharing transformers do."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.between, self.times = nn.Linear(4, 4), 1 if shared else 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = self.between(block(x))
        return x.square().mean()


@pytest.mark.parametrize("shared", [True, False])
def test_what_runs_several_times_is_no_layer_and_is_counted_as_often(shared: bool) -> None:
    model, batch = Looped(shared), torch.randn(2, 4)
    graph = trace(model, batch)
    names = [layer.name for layer in graph.layers]
    assert names == (["before", "blocks.0", "blocks.1", "blocks.2", "after"] if shared else ["before", "after"])
    assert "between" in graph.layers[0].modules
    with FlopCounterMode(display=False) as counter:
        model(batch.requires_grad_(shared)).backward()  # equal layers count as one that is given what takes a gradient
    assert graph.flops == pytest.approx(counter.get_total_flops() / 2)
    if not shared:
        with pytest.raises(TraceError, match=r"blocks.0' cannot be used. It runs 5 times in a forward pass"):
            trace(model, batch, blocks="blocks")


class Pyramid(nn.Module):
    """A detector: one head, two rows of convolutions, on maps of three sizes, behind the blocks or between them."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.stem, self.behind = nn.Conv2d(3, 8, 3, padding=1), behind
        self.levels = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()) for _ in range(3))
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.scores, self.boxes = (
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)) for _ in range(2)
        )

    def head(self, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        return [head(one).flatten(1) for one in maps for head in (self.scores, self.boxes)]

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x, maps, out = self.stem(pictures), [], []
        for level, lateral in zip(self.levels, self.lateral, strict=True):
            x = level(x)
            maps.append(lateral(x))
            out += [] if self.behind else self.head(maps[-1:])
        return torch.cat(out or self.head(maps), 1).square().mean()


@pytest.mark.parametrize("behind", [True, False])
def test_heads_that_run_on_maps_of_unlike_sizes_are_no_layers_and_counted_at_each_size(behind: bool) -> None:
    model, batch = Pyramid(behind), torch.randn(2, 3, 16, 16)
    graph = trace(model, batch)
    blocks = {path for layer in graph.layers[1:-1] for path in layer.modules}
    assert "levels.0" in blocks
    assert not any(path.startswith(("scores", "boxes")) for path in blocks)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    assert graph.flops == pytest.approx(counter.get_total_flops() / 2)
