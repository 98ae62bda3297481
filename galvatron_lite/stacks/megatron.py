"""Megatron-LM and what grew out of it. No torch here."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.stacks.facts import CORE_KERNELS, HALF_GRADIENTS, MEGATRON_KERNELS, MIXED
from galvatron_lite.stacks.schema import Stack

MEGATRON = Stack(
    name="megatron-lm",
    source="github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py (defaults)",
    kernels=MEGATRON_KERNELS,
    states=MIXED,
    fp16_states=HALF_GRADIENTS,  # accumulate_allreduce_grads_in_fp32 is set by --bf16 only
    optimizer="adam-fused",
    vocab_multiple=128,
    dropout=0.1,
    scattered_sends=True,  # --no-scatter-gather-tensors-in-pipeline turns it off
)
"""Megatron-LM with its defaults."""

CI = replace(
    MEGATRON,
    name="megatron-ci",
    # Transformer Engine chooses the attention kernel (--attention-backend auto) unless a test case says otherwise.
    source="github.com/NVIDIA/Megatron-LM, tests/functional_tests (arguments of each test case)",
    kernels=CORE_KERNELS,
    transformer_engine=True,
    cublas_workspace=8 * 4 * 2**20,  # CUBLAS_WORKSPACE_CONFIG: ":4096:8" in every model_config.yaml
    expert_tensor=0,  # their arguments are all there is, and this one's default is the tensor group
)
"""Megatron-LM's functional tests."""

ZERO_BUBBLE = replace(
    MEGATRON,
    name="megatron-zero-bubble",
    # Table 4 of arXiv 2401.10241: 7 more micro-batches of 4 layers take 28 GB, as they do with dropout masks.
    source="github.com/sail-sg/zero-bubble-pipeline-parallelism: Megatron-LM's defaults",
)
"""The fork with zero-bubble schedules."""

CORE = replace(
    MEGATRON,
    name="megatron-core",
    source="docs.nvidia.com/nemo-framework (performance recipes): Megatron-Core over Transformer Engine",
    kernels=CORE_KERNELS,
    states=HALF_GRADIENTS,  # grad_reduce_in_fp32 = False (NeMo's scripts/performance, Megatron-Bridge's too)
    zero_stage=1,
    dropout=0.0,
    transformer_engine=True,
)
"""Megatron-Core under NeMo, with its distributed optimizer."""

BRIDGE = replace(CORE, name="megatron-bridge", source="github.com/NVIDIA-NeMo/Megatron-Bridge, scripts/performance")
"""Megatron-Bridge's performance recipes."""

NEMO = replace(
    CORE,
    name="nemo",
    source="github.com/NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3",
    # distributed_fused_adam over bf16 parameters stores the lower halves of the master copy only
    # (store_param_remainders), and sums in fp32 unless grad_sync_dtype says otherwise.
    states=replace(MIXED, optimizer_bytes=10),
)
"""The NeMo launcher's recipes."""

MEGASCALE = replace(
    CORE,
    name="megascale",
    source="Jiang et al. 2024 (arXiv 2402.15627), section 3: parallel block, sliding-window attention, LAMB",
    states=MIXED,
)
"""ByteDance's MegaScale."""

DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    source="github.com/microsoft/Megatron-DeepSpeed (Megatron-LM's defaults); no ZeRO unless configured",
    states=HALF_GRADIENTS,
    # vTrain's published times (arXiv 2312.12391) drop fourfold in the head from tensor degree 1 to 2: its 50257 entries
    # are not padded.
    vocab_multiple=1,
)
"""Megatron-DeepSpeed."""

BLOOM = replace(
    DEEPSPEED,
    name="megatron-deepspeed-bloom",
    source="github.com/bigscience-workshop/bigscience, train/tr11-176B-ml: ALiBi, ZeRO-1, padded vocabulary",
    # DeepSpeed's first BF16_Optimizer adds up in fp32 beside each pass's own gradients, and its partitions are views of
    # a whole fp32 copy (bf16_optimizer.py: "TODO: Need to only track fp32 params of this partition").
    states=replace(MIXED, bucket_bytes=4, passing_bytes=2),
    fp16_states=MIXED,
    zero_stage=1,
    dropout=0.0,
    positions="alibi",
    vocab_multiple=128,
)
"""BigScience's branch, with fp32 gradient accumulation."""
