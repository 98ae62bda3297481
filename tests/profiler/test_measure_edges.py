"""The parts before and after the blocks add up to the model without blocks."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.measure_bench import EdgeInput, edge_memory, measure_edges
from galvatron_lite.profiler.measure_layers import give_gradients
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import LayerPoint, LayerSetting, Profile
from galvatron_lite.profiler.segments import Skeleton, copy_block, make_skeleton, record_calls
from galvatron_lite.profiler.timing import TimingRule
from tests.profiler.models import TupleModel, gpt_layers, small_gpt, token_batch, tuple_layers


class Words(nn.Module):
    """The model's ids go to two embeddings at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(5, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embeds[0](ids) * self.embeds[1](ids)).mean()


CPU = torch.device("cpu")
QUICK = TimingRule(warmup=1, least=3, most=3, seconds=0.05)
SETTINGS = LayerSetting("before", 2), LayerSetting("after", 2)


def gpt_edges(samples: int = 2) -> EdgeInput:
    model, batch = small_gpt(), token_batch(samples)
    skeleton = make_skeleton(model, gpt_layers(), CPU)
    give_gradients(skeleton.model)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, batch)
    return EdgeInput(skeleton, calls, batch)


def test_what_is_kept_adds_up() -> None:
    """Before and after keep together what the model without blocks keeps, the batch, and the boundary between them."""
    edges = gpt_edges()
    before, after = edge_memory(edges, CPU)
    edges.skeleton.visit_with(lambda _, args, kwargs: args[0])
    with track_peak() as tracked:
        held = edges.copied()
        loss = held.skeleton.model(*held.batch)
    assert before.kept + after.kept == tracked.end
    assert loss.requires_grad


def test_blocks_that_are_given_ids_alone() -> None:
    """Two embeddings are the blocks; nothing but the batch lies before them, and both get gradients from behind."""
    model, ids = Words(), torch.zeros(2, 3, dtype=torch.long)
    layers = discover_layers(model, ids, "embeds")
    skeleton = make_skeleton(model, layers, CPU)
    give_gradients(skeleton.model)
    kind = layers[1].kind
    calls = record_calls(skeleton, {kind: copy_block(model, "embeds.0", CPU)}, ids)
    edges = EdgeInput(skeleton, calls, ids)
    before, after = measure_edges(edges, SETTINGS, CPU, QUICK)
    assert before.kept == ids.nbytes
    assert after.backward > 0


def test_side_inputs_of_blocks_count_to_before() -> None:
    """The shift every block is given lives as long as they do; the stem keeps the batch."""
    model, batch = TupleModel(), torch.ones(3, 4)
    skeleton = make_skeleton(model, tuple_layers(), CPU)
    give_gradients(skeleton.model)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, batch)
    before, _ = edge_memory(EdgeInput(skeleton, calls, batch), CPU)
    assert before.kept == 6 * 4 + batch.nbytes


def test_a_model_without_blocks_is_all_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    edges = EdgeInput(Skeleton(model), {}, torch.ones(2, 4), lambda output, _: output.square().mean())
    before, after = measure_edges(edges, SETTINGS, CPU, QUICK)
    assert before.kept > 0
    assert before.backward > 0
    assert (after.kept, after.working) == (0, 0)


def test_blocks_whose_output_is_not_used() -> None:
    class Deaf(TupleModel):
        def forward(self, inputs: Tensor) -> Tensor:
            super().forward(inputs)
            return self.first(inputs).mean()

    model, batch = Deaf(), torch.ones(3, 4)
    skeleton = make_skeleton(model, tuple_layers(), CPU)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, batch)
    with pytest.raises(TraceError, match="depend"):
        measure_edges(EdgeInput(skeleton, calls, batch), SETTINGS, CPU, QUICK)


LAYERS, SAMPLES, STEP_TOKENS = 3, 4, 32
STEP_RULE = TimingRule(warmup=1, least=2, most=2, seconds=0.02)


def point(profile: Profile, kind: str, recompute: Recompute = Recompute.NONE) -> LayerPoint:
    wanted = (kind, SAMPLES, recompute)
    return next(one for one in profile.layers if (one.kind, one.samples, one.recompute) == wanted)


def added_up(before: LayerPoint, block: LayerPoint, after: LayerPoint, tied: int) -> int:
    """Peak bytes of forward and backward beyond parameters and gradients.

    The head's gradient of a tied weight waits for the embedding's all through backward.
    """
    earlier = [before.kept + index * block.kept for index in range(LAYERS + 1)]
    forward = [before.forward_working, earlier[-1] + after.forward_working]
    forward += [kept + block.forward_working for kept in earlier[:-1]]
    backward = [earlier[-1] + after.working, before.working]
    backward += [kept + block.working + tied for kept in earlier[:-1]]
    return max(*forward, *backward)


def made(hidden: int, vocab: int) -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=vocab, layers=LAYERS, hidden=hidden, heads=4, sequence=STEP_TOKENS))
    return model, torch.randint(0, vocab, (SAMPLES, STEP_TOKENS))


@cache
def profiled(hidden: int, vocab: int) -> Profile:
    model, tokens = made(hidden, vocab)
    with TemporaryDirectory() as folder:
        return measure_profile(model, (tokens, tokens), folder=folder, device="cpu", rule=STEP_RULE, brief=True)


@pytest.mark.parametrize(
    ("hidden", "vocab", "recompute"), [(32, 64, Recompute.NONE), (32, 64, Recompute.FULL), (16, 512, Recompute.NONE)]
)
def test_peak_of_a_step(hidden: int, vocab: int, recompute: Recompute) -> None:
    """A small vocabulary: the peak lies in the blocks. A large one: in the head."""
    profile, (model, tokens) = profiled(hidden, vocab), made(hidden, vocab)
    for block in model.blocks:
        apply_recompute(block, recompute)
    give_gradients(model)
    model(tokens, tokens).backward()
    with track_peak() as tracked:
        batch = tokens.clone(), tokens.clone()  # as training has its samples on the device
        model(*batch).backward()
    predicted = added_up(
        point(profile, "before"), point(profile, "block", recompute), point(profile, "after"), vocab * hidden * 4
    )
    assert predicted == pytest.approx(tracked.peak, abs=64)
