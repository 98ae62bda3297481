"""Published runs made up for tests."""

from dataclasses import replace
from typing import Any

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import MeasuredRun, Predicted, ScoredRun, SkipError, judge
from galvatron_lite.validate.rows import PublishedRun

GIB = 2**30

GPT = PublishedRun(
    family="made-up", run_id="made-up-1", framework="Megatron-LM", model="gpt", arch="decoder", layers=8, hidden=1024,
    heads=16, ffn_hidden=4096, gated_mlp=False, vocab=50257, tied_embeddings=True, seq_len=1024, gpu="A100-SXM4-80GB",
    gpus_per_node=8, intra_link="NVLink3/NVSwitch 600GB/s", n_gpus=8, dp=2, tp=2, pp=2, cp=1, micro_batch=2,
    global_batch=32, grad_accum=8, act_ckpt="none", precision="bf16", flash_attn=True, iter_time_s=0.5, quality="A",
)  # fmt: skip
"""A small GPT on one node, data 2 x tensor 2 x pipeline 2."""


def gpt(**changes: Any) -> PublishedRun:
    return replace(GPT, **changes)


def predicted(run: PublishedRun) -> Predicted:
    outcome = Predictor(load_calibration()).predict(run)
    assert isinstance(outcome, Predicted), outcome
    return outcome


def skipped(run: PublishedRun) -> SkipError:
    outcome = Predictor(load_calibration()).predict(run)
    assert isinstance(outcome, SkipError), outcome
    return outcome


def outcome_of(seconds: float, peak: int = 2 * GIB, device: int = 3 * GIB) -> Predicted:
    """A prediction for a device of 4 GiB."""
    return Predicted(seconds, peak, device, 4 * GIB, TimeBreakdown(), MemoryBreakdown())


def judged(predicted: float, measured: float | None, **changes: Any) -> ScoredRun:
    """A run that is predicted to take so many seconds a step, and took others."""
    return judge(gpt(**changes), MeasuredRun(measured, None), outcome_of(predicted))
