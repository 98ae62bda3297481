"""What cannot be captured is named, with the cause."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.discover import watch_model
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace.record import Recorder, ValuesReadError
from galvatron_lite.model.trace.run import shapes_only
from tests.model.models import FAMILIES, Mixer, Plain, plain


class Choosing(Mixer):
    """Decides by the values it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Careful(Mixer):
    """Works in full precision whatever surrounds it, as rotary embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def test_autocast_by_a_tensor_s_device_is_traced() -> None:
    model, batch = plain()
    expected = trace(model, batch).kinds
    model.body = nn.Sequential(*(Careful(32) for _ in model.body))
    assert trace(model, batch).kinds.keys() == expected.keys()
    with pytest.raises(RuntimeError):
        torch.autocast("meta", enabled=False)


def test_threads_that_trace_at_once_leave_autocast_as_it_was() -> None:
    before, begun, over = torch.autocast.__init__, threading.Event(), threading.Event()

    def first() -> None:
        with shapes_only(Recorder()):
            begun.set()
            over.wait(0.2)  # the second one waits for this one to end, or begins and sets it

    def second() -> None:
        begun.wait()
        with shapes_only(Recorder()):
            over.set()
            threads[0].join()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.autocast.__init__ is before


def test_a_model_that_does_not_take_the_batch() -> None:
    with pytest.raises(TraceError, match=r"model: 'Plain'.*positional argument"):
        trace(Plain(), torch.zeros(2, 3, 4))


def test_modules_that_are_not_ready_are_named() -> None:
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(TraceError, match=r"'1, made by torch\.jit'.*the module that it was made of"):
        trace(scripted, torch.ones(2, 4))
    with pytest.raises(TraceError, match=r"'0\.weight, whose shape is not known yet'.*Run the model once"):
        trace(nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 4))


def test_parameters_that_forward_creates_are_named() -> None:
    class Late(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            self.head = nn.Linear(4, 1)
            return self.head(super().forward(rows)).mean()

    with pytest.raises(TraceError, match=r"head\.weight, a parameter that forward creates"):
        trace(Late(4, 4), torch.ones(2, 4))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "view", "apart"])
def test_parameters_that_share_memory_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "parameter":
        model[1].weight.data = model[0].weight.data[2:]
    elif kind == "buffer":
        model.register_buffer("first", model[0].weight.data)
    elif kind == "view":
        model.rows = model[0].weight[:2]  # type: ignore[assignment]
    else:
        memory = torch.ones(3, 4)
        model[1].weight.data, model[1].bias.data = memory[:2], memory[2, :2]
        trace(model, torch.ones(2, 4), loss_fn=lambda output, _: output.mean())
        return
    with pytest.raises(TraceError, match=r"0\.weight and (1\.weight|first|rows).*share memory"):
        trace(model, torch.ones(2, 4))


class Weighted(nn.Module):
    """Takes what has no samples beside what has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return (x * weights)[: len(names)].mean()


class Settling(Plain):
    """Chooses a block by the length of its first batch, as BigBird does its attention."""

    def forward(self, *args: Tensor) -> Tensor:
        if not isinstance(self.body[0], Careful):
            self.body[0] = Careful(32)
        return super().forward(*args)


def test_a_model_that_replaces_modules_runs_once_before() -> None:
    model, (_, batch) = Settling(), plain()
    with pytest.raises(TraceError, match=r"'body\.0, a Mixer that the forward pass replaces by a Careful'.*Run the mo"):
        trace(model, batch)
    model(*batch)
    assert trace(model, batch).layers


def test_a_tensor_whose_first_dimension_is_that_of_the_samples_by_chance() -> None:
    batch = {"x": torch.ones(4, 4), "weights": torch.ones(4), "names": ["a"]}
    with pytest.raises(TraceError, match=r"batch: 'x, weights'.*The batch has 4 samples.*a first dimension of 1"):
        trace(Weighted(), batch)
    trace(Weighted(), batch | {"weights": torch.ones(1, 4)})


def with_compiled_block(model: Plain) -> nn.Module:
    model.body[0] = torch.compile(model.body[0], backend="eager")
    return model


@pytest.mark.parametrize("wrap", [with_compiled_block, nn.DataParallel])
def test_a_model_that_is_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = plain()
    with pytest.raises(TraceError, match="Give the model "):
        trace(wrap(model), batch)


def test_a_model_without_a_loss_is_refused() -> None:
    model, batch = FAMILIES["gpt"]()
    with pytest.raises(InputError, match="loss_fn"):
        trace(model, batch[:1])


def test_unknown_precision() -> None:
    model, batch = plain()
    with pytest.raises(TraceError, match="bf16"):
        trace(model, batch, precision="int4")


class Growing(Mixer):
    """Runs once more for a large batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x) if len(x) > 3 else x)


class Routed(Mixer):
    """A mixture that takes the tokens of each expert by their places."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.mean(1) > 0
        x = x.clone()
        x[:, :, 0][chosen[:, :1].expand(-1, x.shape[1])] += 1
        return super().forward(x[torch.nonzero(chosen[:, 0]).flatten()])


def spare(model: Plain) -> None:
    model.spare = nn.ModuleList(Mixer(32) for _ in range(2))


BROKEN: dict[str, tuple[Callable[[Plain], object], str]] = {
    "reads values": (lambda model: model.body.__setitem__(1, Choosing(32)), r"block body\.1: 'Choosing'.*reads values"),
    "a module inside fails": (
        lambda model: setattr(model.body[2], "out", nn.Conv1d(7, 32, 1)),
        r"block body\.2\.out: 'Conv1d'.*channel dimensions",
    ),
    "other work at another batch size": (
        lambda model: [model.body.__setitem__(place, Growing(32)) for place in range(3)], "batch size",
    ),
    "places of values": (
        lambda model: model.body.__setitem__(0, Routed(32)),
        r"nonzero reads values of tensors\. auto_parallelize trains such a model",
    ),
    "cannot be copied": (lambda model: setattr(model, "lock", threading.Lock()), "deepcopy"),
    "never runs": (spare, r"spare\.0.*never runs"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_traced_is_named_with_the_cause(name: str) -> None:
    model, batch = plain()
    change, said = BROKEN[name]
    change(model)
    with pytest.raises(TraceError, match=said):
        trace(model, batch, blocks=["body", "spare"] if change is spare else None)


class Carrying(nn.Module):
    """Keeps a state for each sample, in a buffer or an attribute."""

    def __init__(self, in_buffer: bool) -> None:
        super().__init__()
        self.body, self.cell = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.GRUCell(4, 4)
        if in_buffer:
            self.register_buffer("state", torch.zeros(8, 4))
        else:
            self.state = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        x = self.cell(x, None if self.state is None else self.state.clone())
        if self.state is None:
            self.state = x.detach()
        else:
            self.state.copy_(x.detach())
        return x


@pytest.mark.parametrize("in_buffer", [True, False])
def test_a_state_that_is_kept_for_each_sample_is_named(in_buffer: bool) -> None:
    model = Carrying(in_buffer)
    for run in (trace, watch_model) if in_buffer else (trace,):
        with pytest.raises(TraceError, match=r"model: 'state'.*keeps it from pass to pass"):
            run(model, (torch.randn(8, 4),))


class Margins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(self.body(x), labels)


def test_operators_that_do_not_run_without_data_are_named() -> None:
    batch = {"x": torch.ones(4, 6), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(ValuesReadError, match=r"no aten::multi_margin_loss\w* without data.*take another operator"):
        trace(Margins(), batch)


class Remembering(nn.Module):
    """Attends to the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory[0] if self.memory else x
        self.memory = [x.detach()]
        for layer in self.body:
            x = layer(x)
        return torch.cat([before, x], 1).mean()


def test_a_memory_of_another_batch_size_is_found_by_its_line() -> None:
    with pytest.raises(TraceError, match=r"\(test_trace_errors\.py, line \d+\).*keeps tensors of an earlier batch"):
        trace(Remembering(), torch.ones(4, 4))


class Turn(nn.Module):
    """A step of a normalizing flow: the logarithm of a determinant goes on beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.first, self.last = nn.Parameter(torch.eye(6)), nn.Linear(3, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (x @ self.turn).chunk(2, -1)
        shift, scale = self.last(self.first(left).tanh()).chunk(2, -1)
        return torch.cat([left, right * scale.tanh().exp() + shift], -1), volume + scale.tanh().sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Turn() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for step in self.body:
            x, volume = step(x, volume)
        return (x.square().sum(-1) - volume).mean()


def test_blocks_may_hand_on_a_vector_beside_their_activations() -> None:
    graph = trace(Flow(), torch.ones(8, 6))
    assert [layer.name for layer in graph.layers if layer.role is Role.BLOCK] == ["body.0", "body.1", "body.2"]


class Growth(nn.Module):
    """Layers that are handed all outputs so far, in one list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Joined(4 + 2 * place) for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.body:
            outputs.append(layer(outputs))
        return torch.cat(outputs, -1).square().mean()


class Joined(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        joined: Tensor = self.linear(torch.cat(outputs, -1))
        return joined


def test_a_list_that_grows_is_what_each_block_was_given() -> None:
    graph = trace(Growth(), torch.ones(8, 4))
    assert sum(graph.kind_of(layer).parameters.total for layer in graph.layers) == 2 * (4 + 6 + 8) + 3 * 2


class Detector(nn.Module):
    """Works through the images one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        seen = self.body(images)
        return torch.stack([(seen[i] - one["box"]).square().mean() for i, one in enumerate(targets)]).mean()


class OneByOne(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(OneByOne, self).forward(row[None])[0] for row in x])


def test_models_that_run_other_operators_with_other_batch_sizes_are_for_data_parallelism() -> None:
    model, batch = plain()
    model.body = nn.Sequential(*(OneByOne(32) for _ in model.body))
    with pytest.raises(ValuesReadError, match="auto_parallelize trains such a model"):
        trace(model, batch)


def test_a_list_of_samples_is_named() -> None:
    batch = {"images": torch.ones(8, 4), "targets": [{"box": torch.ones(4)} for _ in range(8)]}
    with pytest.raises(TraceError, match=r"'targets' cannot be used.*list with an item for each of the 8 samples"):
        trace(Detector(), batch)
