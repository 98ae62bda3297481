"""Published runs made up for tests."""

from dataclasses import replace
from typing import Any

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import Predicted
from galvatron_lite.validate.rows import PublishedRun

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
