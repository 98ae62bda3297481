"""The points of single layers, added up by hand, against one real training step of the whole model."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch

from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.measure_layers import give_gradients
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.profiler.timing import TimingRule

LAYERS, SAMPLES, TOKENS = 3, 4, 32
QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.02)


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
    model = GPT(GPTConfig(vocab=vocab, layers=LAYERS, hidden=hidden, heads=4, sequence=TOKENS))
    return model, torch.randint(0, vocab, (SAMPLES, TOKENS))


@cache
def profiled(hidden: int, vocab: int) -> Profile:
    model, tokens = made(hidden, vocab)
    with TemporaryDirectory() as folder:
        return measure_profile(model, (tokens, tokens), folder=folder, device="cpu", rule=QUICK, brief=True)


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
