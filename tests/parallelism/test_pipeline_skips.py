"""Pipelines of models whose layers read more than what the layer before them made, cut anywhere, equal one process.

The stages run one after the other here, and hand over exactly what the runner sends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import batch_size, call_model, loss_of, tensors_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.pipeline.flow import flow_of
from galvatron_lite.parallelism.pipeline.runner import arrived, differentiable, template_of
from galvatron_lite.parallelism.pipeline.stage import StageModel, check_stages
from galvatron_lite.parallelism.pipeline.tied import find_shared
from tests.equivalence.families import build_model, make_batches

STEPS, RATE = 3, 0.1
WIDTH = 6

Batch = Any
Layers = tuple[Layer, ...]


class Glued(nn.Module):
    """Blocks of one linear map each, and code between them."""

    def __init__(self, glue: Callable[[Tensor, nn.ModuleList], Tensor], widths: Sequence[int]) -> None:
        super().__init__()
        self.glue = glue
        self.stem = nn.Linear(3, WIDTH)
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        hidden = self.glue(self.stem(value) + self.position, self.blocks)
        return F.mse_loss(self.head(hidden), target)


def first_read_by_last(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    first = last = blocks[0](hidden)
    for block in blocks[1:]:
        last = torch.tanh(block(last))
    return last + first


def read_by_several(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    """One output with a ReLU between, beside another, and in place of a third; its mean and its shape, too."""
    skip = blocks[0](hidden)
    second = blocks[1](F.relu(skip)).view(*skip.shape)
    third = blocks[2](second * skip.mean() + torch.zeros_like(skip))
    beside = torch.cat([skip, third[..., : skip.shape[-1]]], -1)
    return blocks[3](beside[..., ::2] + second) - skip


def overwrites_passing(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    """Code that changes what it is given in place: not what others read."""
    for block in blocks:
        hidden = block(hidden)
        hidden.mul_(0.5)
        hidden += 0.1
        hidden.relu_()
    return hidden


def writes_into_buffer(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    """Outputs are gathered in a tensor of the code's own."""
    states = hidden.new_zeros(len(blocks), *hidden.shape)
    for number, block in enumerate(blocks):
        hidden = block(hidden)
        states[number] = hidden
    return states.mean(0)


def overwrites_skip(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    skip = blocks[0](hidden)
    hidden = blocks[1](skip.mul_(2))
    for block in blocks[2:]:
        hidden = block(hidden)
    return hidden + skip


class Windows(nn.Module):
    """Layers of other shapes, and modules without parameters between them that ask for the right number of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv1d(2, 4, 1), nn.Flatten(2), nn.Unflatten(2, (2, 4)), nn.Linear(4, 3), nn.Flatten(2),
            nn.Linear(6, 5), nn.Unflatten(2, (5, 1)), nn.Conv2d(4, 1, 1), nn.Flatten(1), nn.Linear(5, 1),
        )  # fmt: skip

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.blocks(value)
        return output


def windows() -> tuple[nn.Module, Batch, Layers]:
    torch.manual_seed(0)
    model, batch = Windows().double(), (torch.randn(4, 2, 8, dtype=torch.float64),)
    places = [place for place, module in enumerate(model.blocks) if any(True for _ in module.parameters())]
    paths = [f"blocks.{place}" for place in places]
    blocks = [Layer(path, f"kind{path}", Role.BLOCK, (path,)) for path in paths[1:-1]]
    before, after = Layer("before", "before", Role.BEFORE, paths[:1]), Layer("after", "after", Role.AFTER, paths[-1:])
    return model, batch, (before, *blocks, after)


def runs_again(hidden: Tensor, blocks: nn.ModuleList) -> Tensor:
    for block in (*blocks, *blocks[:1]):
        hidden = block(hidden)
    return hidden


def glued(glue: Callable[[Tensor, nn.ModuleList], Tensor]) -> tuple[nn.Module, Batch, Layers]:
    torch.manual_seed(0)
    model = Glued(glue, (WIDTH,) * 4).double()
    batch = (torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64))
    return model, batch, discover_layers(model, batch)


def flat() -> tuple[nn.Module, Batch, Layers]:
    """Layers that overwrite what they are given."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 3)]
    model = nn.Sequential(*parts).double()
    batch = (torch.randn(2, 2, 8, 8, dtype=torch.float64),)
    names = [str(place) for place in range(len(parts))]
    blocks = [Layer(name, f"kind{name}", Role.BLOCK, (name,)) for name in names[:-1]]
    return model, batch, (Layer("before", "before", Role.BEFORE), *blocks, Layer("after", "after", Role.AFTER, ("4",)))


def pictures(name: str) -> tuple[nn.Module, Batch, Layers]:
    torch.manual_seed(0)
    model = build(name, image_size=8).double()
    batch = {key: one.double() if one.is_floating_point() else one for key, one in model.example_batch(2).items()}
    return model, batch, discover_layers(model, batch)


def t5() -> tuple[nn.Module, Batch, Layers]:
    model, (batch,) = build_model("t5").double(), make_batches("t5", 4, 1)
    return model, batch, discover_layers(model, batch)


CASES: dict[str, Callable[[], tuple[nn.Module, Batch, Layers]]] = {
    "unet": lambda: pictures("unet-mini"),
    "unet-bilinear": lambda: pictures("unet-bilinear-mini"),
    "t5": t5,
    "flat": flat,
    "windows": windows,
    "first_read_by_last": lambda: glued(first_read_by_last),
    "read_by_several": lambda: glued(read_by_several),
    "overwrites_passing": lambda: glued(overwrites_passing),
    "writes_into_buffer": lambda: glued(writes_into_buffer),
}


def loss_fn(output: Any, _: Any) -> Tensor:
    loss: Tensor = output.square().mean() if isinstance(output, Tensor) and output.dim() else loss_of(output, None)
    return loss


def cut_model(model: nn.Module, layers: Layers, cuts: Sequence[int], batch: Batch | None) -> list[StageModel]:
    names = [layer.name for layer in layers]
    flow = None if batch is None else flow_of(model, layers, batch, loss_fn)
    parts = [names[start:stop] for start, stop in pairwise([0, *cuts, len(names)])]
    check_stages(layers, parts, flow)
    stages = [StageModel(copy.deepcopy(model), layers, part, flow=flow) for part in parts]
    for stage in stages:
        stage.attach()
    return stages


def call_stage(stage: StageModel, batch: Batch) -> Any:
    output = call_model(stage.model, batch)
    return loss_fn(output, batch) if stage.last else output


def run_stages(stages: Sequence[StageModel], batch: Batch) -> float:
    """Forward and backward; the loss."""
    value, passes = None, []
    for stage in stages:
        produced = stage.run(lambda stage=stage: call_stage(stage, batch), value)  # type: ignore[misc]
        sent = [tensor.detach().clone() for tensor in tensors_of(produced)]
        value, slots = arrived(template_of(produced), sent)
        passes.append((differentiable(produced), slots))
    for (outputs, slots), stage in zip(reversed(passes), reversed(stages), strict=True):
        gradients = None if stage.last else [slot.taken(torch.device("cpu")) for slot in slots]
        torch.autograd.backward(outputs, gradients)
    return float(produced.detach())


def owned(modules: Sequence[nn.Module], first: dict[str, str]) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, by the first of its names in the whole model; copies on several stages are several."""
    pairs = {id(one): (first.get(name, name), one) for module in modules for name, one in module.named_parameters()}
    return list(pairs.values())


def descend(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """A step in which copies get the sum of their gradients; the gradients."""
    sums: dict[str, Tensor] = {}
    for name, parameter in parameters:
        if parameter.grad is not None:
            sums[name] = sums.get(name, 0.0) + parameter.grad
            parameter.grad = None
    for name, parameter in parameters:
        if name in sums:
            parameter.data -= RATE * sums[name]
    return sums


def train(
    modules: Sequence[nn.Module], first: dict[str, str], run: Callable[[], float]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the last gradients, and the weights after some steps."""
    parameters, losses, gradients = owned(modules, first), list[float](), dict[str, Tensor]()
    for _ in range(STEPS):
        losses.append(run())
        gradients = descend(parameters)
    return losses, gradients, {name: parameter.detach() for name, parameter in parameters}


def check(case: str, every_cut: Sequence[Sequence[int]]) -> None:
    model, batch, layers = CASES[case]()
    first = {name: shared.names[0] for shared in find_shared(model, layers) for name in shared.names}
    whole = copy.deepcopy(model)

    def alone() -> float:
        # what a model overwrites is its own
        loss = loss_fn(call_model(whole, copy.deepcopy(batch)), batch)
        torch.autograd.backward(loss)
        return float(loss.detach())

    losses, gradients, weights = train([whole], first, alone)
    for cuts in every_cut:
        stages = cut_model(model, layers, cuts, batch)
        found = train([stage.model for stage in stages], first, lambda: run_stages(stages, batch))  # noqa: B023
        assert found[0] == pytest.approx(losses, rel=1e-12), cuts
        for tensors, expected in ((found[1], gradients), (found[2], weights)):
            assert tensors.keys() == expected.keys(), cuts
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case != "t5"])
def test_two_stages_at_every_cut(case: str) -> None:
    check(case, [(cut,) for cut in range(1, len(CASES[case]()[2]))])


def test_encoder_and_decoder() -> None:
    """Cut in the encoder, between both, and in the decoder, which passes position scores on from block to block."""
    check("t5", [(2,), (6,), (1, 4, 6)])


@pytest.mark.parametrize("case", ["unet", "first_read_by_last", "read_by_several"])
def test_four_stages(case: str) -> None:
    places = range(1, len(CASES[case]()[2]))
    check(case, list(combinations(places, 3))[::4])


@pytest.mark.parametrize("case", ["unet", "read_by_several"])
def test_as_many_bytes_travel_as_the_graph_says(case: str) -> None:
    model, batch, layers = CASES[case]()
    blocks = [layer.name for layer in layers if layer.role is Role.BLOCK]
    graph = trace(model, batch, loss_fn=loss_fn, blocks=blocks)
    assert [layer.name for layer in graph.layers] == [layer.name for layer in layers]
    for cut in range(1, len(layers)):
        stage = cut_model(model, layers, [cut], batch)[0]
        sent = stage.run(lambda stage=stage: call_stage(stage, batch), None)  # type: ignore[misc]
        assert sum(one.nbytes for one in tensors_of(sent)) == graph.crossing(cut) * batch_size(batch), cut


def test_a_chain_sends_what_its_last_layer_returned() -> None:
    model, batch, layers = CASES["overwrites_passing"]()
    stage = cut_model(model, layers, [3], batch)[0]
    produced = stage.run(lambda: call_stage(stage, batch), None)
    assert isinstance(produced, Tensor)


@pytest.mark.parametrize("case", ["unet", "first_read_by_last"])
def test_without_an_example_a_model_that_is_no_chain_is_refused_when_it_runs(case: str) -> None:
    model, batch, layers = CASES[case]()
    stages = cut_model(model, layers, [3], None)
    value = stages[0].run(lambda: call_stage(stages[0], batch), None)
    with pytest.raises(InputError, match="earlier pipeline stage"):
        stages[1].run(lambda: call_stage(stages[1], batch), value)


def test_changing_in_place_what_a_later_stage_reads_is_refused() -> None:
    model, batch, layers = glued(overwrites_skip)
    stages = cut_model(model, layers, [3], batch)
    with pytest.raises(InputError, match=r"blocks\.0.*in place"):
        stages[0].run(lambda: call_stage(stages[0], batch), None)


def test_a_layer_that_runs_again_behind_the_cut_is_refused() -> None:
    model, batch, layers = glued(runs_again)
    with pytest.raises(InputError, match=r"blocks\.0 runs again"):
        cut_model(model, layers, [3], batch)
    assert len(cut_model(model, layers, [len(layers) - 1], batch)) == 2


def test_a_parameter_of_no_layer_that_is_read_late_is_refused() -> None:
    model, batch, layers = glued(lambda hidden, blocks: blocks[3](blocks[2](blocks[1](blocks[0](hidden)))) + hidden)
    with pytest.raises(InputError, match="position, which no layer holds"):
        cut_model(model, layers, [3], batch)


def test_hollow_convolutions_take_inputs_of_the_precision_of_compute() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    layers = (Layer("stem", "stem", Role.BEFORE, ("0",)), Layer("1", "block", Role.BLOCK, ("1",)))
    stage = StageModel(model, layers, ["1"])
    stage.attach()
    with torch.autocast("cpu", torch.bfloat16):
        output = stage.run(lambda: model(torch.ones(1, 3, 2, 2).bfloat16()), torch.ones(1, 4, 2, 2).bfloat16())
    assert output.dtype is torch.bfloat16
