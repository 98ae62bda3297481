"""Training frameworks by name: what they decide that costs depend on. No torch here.

The facts are those of a framework's defaults and published recipes; what a single run says of itself (attention
kernel, recomputation, precision) goes before them. Calibrated constants are kept apart (``calibration``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from galvatron_lite.model.kernels import EAGER
from galvatron_lite.stacks import megatron, others
from galvatron_lite.stacks.facts import CORE_KERNELS, MIXED, SHARDED
from galvatron_lite.stacks.schema import Stack

GALVATRON = Stack(
    name="galvatron",
    source="galvatron_lite/runtime",
    kernels=EAGER,
    states=replace(SHARDED, copies=True),
    optimizer="adamw",
    uneven_shares=True,  # parallelism/tensor/functions.py: the first ranks take one more
    early_stop=True,
)
"""The project's own runtime: FSDP2 and DTensor under PyTorch's eager mode."""

DEFAULT = Stack(
    name="default",
    source="what most frameworks of large language models have in common",
    kernels=CORE_KERNELS,
    states=MIXED,
    optimizer="adamw-fused",
    vocab_multiple=128,
)
"""A framework of which nothing is known."""

_NAMES: tuple[tuple[str, Stack], ...] = (
    (r"deepspeed.*bloom|bloom.*deepspeed", megatron.BLOOM),
    (r"deepspeed", megatron.DEEPSPEED),
    (r"megatron.*\bci\b", megatron.CI),
    (r"megatron.*fork|zero.?bubble", megatron.ZERO_BUBBLE),
    (r"automodel", others.AUTOMODEL),
    (r"megatron.?bridge", megatron.BRIDGE),
    (r"^nemo$|nemo.?launcher", megatron.NEMO),
    (r"nemo|megatron.?core|transformer.?engine", megatron.CORE),
    (r"megascale", megatron.MEGASCALE),
    (r"megatron", megatron.MEGATRON),
    (r"foundry|composer", others.FOUNDRY),
    (r"torchtitan.*compile", others.TITAN),
    (r"torchtitan|fsdp", others.TITAN_EAGER),
    (r"nanotron", others.NANOTRON),
    (r"\bpax\b|maxtext|\bjax\b|\bxla\b.*jax", others.JAX),
    (r"meta internal|\bmeta\b", others.META),
    (r"internevo|internlm", others.INTERNEVO),
    (r"libai|oneflow", others.ONEFLOW),
    (r"timm", others.TIMM),
    (r"chainer.*nccl", others.CHAINER_NCCL),
    (r"chainer", others.CHAINER),
    (r"gpipe", others.GPIPE),
    (r"tensorflow", others.TENSORFLOW),
    (r"ngc.*mxnet", others.MXNET_NGC),
    (r"mxnet", others.MXNET),
    (r"paddle", others.PADDLE),
    (r"galvatron", GALVATRON),
    (r"deeplearningexamples.*lambda", others.LAMBDA),
    (r"pytorch|\bddp\b|deeplearningexamples", others.PYTORCH),
)
"""Frameworks by words in their names; the first that fits counts."""

STACKS: dict[str, Stack] = {stack.name: stack for stack in (*(stack for _, stack in _NAMES), DEFAULT)}
"""Every stack by name."""


@cache
def match_stack(framework: str) -> Stack:
    """The stack that a framework's name means; ``DEFAULT`` where it is not known."""
    text = framework.lower()
    return next((stack for words, stack in _NAMES if re.search(words, text)), DEFAULT)
