"""Training frameworks by name: what they decide that costs depend on.

The facts are those of a framework's defaults and published recipes; what a single run says of itself (attention
kernel, recomputation, precision) goes before them. Calibrated constants are kept apart (``calibration``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from galvatron_lite.cluster.transport import Transport
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.parallelism.base import PictureSplit
from galvatron_lite.stacks.schema import (
    AMP,
    CORE_KERNELS,
    EAGER_KERNELS,
    GRAPH_KERNELS,
    HALF_GRADIENTS,
    MEGATRON_KERNELS,
    MIXED,
    SHARDED,
    Stack,
)

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

ZERO_BUBBLE = replace(
    MEGATRON,
    name="megatron-zero-bubble",
    # Table 4 of arXiv 2401.10241: 7 more micro-batches of 4 layers take 28 GB, as they do with dropout masks.
    source="github.com/sail-sg/zero-bubble-pipeline-parallelism: Megatron-LM's defaults",
    steps_overlap=True,  # --enable-optimizer-post-validation
)

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

BRIDGE = replace(CORE, name="megatron-bridge", source="github.com/NVIDIA-NeMo/Megatron-Bridge, scripts/performance")

NEMO = replace(
    CORE,
    name="nemo",
    source="github.com/NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3",
    # distributed_fused_adam over bf16 parameters stores the lower halves of the master copy only
    # (store_param_remainders), and sums in fp32 unless grad_sync_dtype says otherwise.
    states=replace(MIXED, optimizer_bytes=10),
)

MEGASCALE = replace(
    CORE,
    name="megascale",
    source="Jiang et al. 2024 (arXiv 2402.15627), section 3: parallel block, sliding-window attention, LAMB",
    states=MIXED,
)

DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    source="github.com/microsoft/Megatron-DeepSpeed (Megatron-LM's defaults); no ZeRO unless configured",
    states=HALF_GRADIENTS,
    # vTrain's published times (arXiv 2312.12391) drop fourfold in the head from tensor degree 1 to 2: its 50257 entries
    # are not padded.
    vocab_multiple=1,
)

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


_MASKED = 5 / 32
"""Share of a sample's tokens whose logits BERT's recipes compute: max_predictions_per_seq is 20 of 128 and 80 of 512
(github.com/google-research/bert, and NVIDIA's, MXNet's, Paddle's and OneFlow's scripts after it)."""
_NVIDIA = "github.com/NVIDIA/DeepLearningExamples"

TITAN = Stack(
    name="torchtitan",
    source="github.com/pytorch/torchtitan, docs/fsdp.md: FSDP2, torch.compile by block, loss parallel",
    # "TODO: compiling loss function causes CUDA errors, turning off for now" (train.py until 2025).
    kernels=Kernels(parallel_loss=True, compiled=True, fp8_kept=False, selective="alternate"),
    states=SHARDED,
    optimizer="adamw-fused",
    zero_stage=3,
    # pipeline_parallel_microbatches: "the default value will be the number of pipeline stages, if unspecified"
    # (torchtitan/config_manager.py; parallelize takes the degree).
    splits_by_stage=True,
    copies_gathered=True,
    gathers_once=True,
    early_stop=True,
    reports_reserved=True,  # torchtitan/metrics.py: max_reserved_gib
)

TITAN_EAGER = replace(
    TITAN,
    name="torchtitan-eager",
    # norms.py, and torch.nn.RMSNorm before PyTorch 2.8: step by step in fp32.
    kernels=Kernels(fused_norm=False, parallel_loss=True, fp8_kept=False, selective="alternate"),
)

AUTOMODEL = replace(
    TITAN,
    name="automodel",
    source="docs.nvidia.com/nemo/automodel/performance/performance-summary.md (FSDP2; mixtures: TE + DeepEP)",
    kernels=replace(TITAN.kernels, unique_dispatch=True),
    # TransformerEngine's FusedAdam with store_param_remainders and both moments in bf16, as its recipes set it.
    states=replace(SHARDED, parameters="bf16", optimizer_bytes=6),
    reports_reserved=False,
)

FOUNDRY = Stack(
    name="llm-foundry",
    source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking: FSDP, learned positions, no biases",
    # Wqkv in one, flash-attn's cross-entropy (loss_fn: fused_crossentropy).
    kernels=Kernels(merged_projections=True, compiled_loss=True),
    states=SHARDED,
    zero_stage=3,
    biases=False,
    early_stop=True,  # activation_checkpointing_reentrant: false
)

NANOTRON = Stack(
    name="nanotron",
    splits_by_work=True,
    source="github.com/huggingface/nanotron: bf16 parameters, fp32 gradient accumulation and master copy",
    # qkv_proj and gate_up_proj in one each, flash-attn's rotary, an eager GLUActivation; the model casts its logits to
    # fp32 and the loss subtracts the largest out of place.
    kernels=Kernels(fused_rotary=True, merged_projections=True, parallel_loss=True, regather=False, jit_loss=True),
    # FP32GradientAccumulator: fp32 buffers of all gradients beside those in bf16, which are None again after every
    # backward pass; DistributedDataParallel's buckets are no views of them (gradient_as_bucket_view is off).
    states=replace(MIXED, bucket_bytes=2, passing_bytes=2),
    optimizer="adamw-fused",
    # parallelism.tp_recompute_allgather: [Empirical] the memory of published runs that fit without it says it is off.
    regathers_at_need=True,
)

JAX = Stack(
    name="jax",
    source="github.com/NVIDIA/JAX-Toolbox (Pax and MaxText under XLA): fp32 weights, bf16 compute",
    kernels=Kernels(merged_projections=True, compiled=True, compiled_loss=True),
    states=SHARDED,
    optimizer="adamw-fused",
    early_stop=True,  # XLA removes what nothing uses
    vocab_multiple=128,
)

META = Stack(
    name="meta",
    source="Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2: FSDP without resharding, fp32 reduction",
    kernels=replace(CORE_KERNELS, remade=True),
    states=SHARDED,
    optimizer="adamw-fused",
    zero_stage=2,
    gathers_once=True,
    # The same section: the first chunk is the embedding alone, the last one the head alone.
    virtual_stages=0,
)

INTERNEVO = Stack(
    name="internevo",
    source="github.com/InternLM/InternEvo, configs/7B_sft.py: bf16, flash attention, hybrid ZeRO",
    # wqkv in one, flash-attn's rotary and cross-entropy.
    kernels=Kernels(merged_projections=True, fused_rotary=True, parallel_loss=True, inplace_loss=True),
    # zero_grad(set_to_none=True) after every update (solver/optimizer/hybrid_zero_optim.py).
    states=replace(HALF_GRADIENTS, buffered_gradients=False),
    zero_stage=1,
)

ONEFLOW = Stack(
    name="oneflow",
    source="github.com/Oneflow-Inc/libai: AMP, fused bias-gelu and bias-dropout, graph mode",
    kernels=replace(MEGATRON_KERNELS, autocast=True),
    states=AMP,
    vocab_multiple=128,
    dropout=0.1,
    fuses_norms=True,
    predicted_share=_MASKED,
)

TENSORFLOW = Stack(
    name="tensorflow",
    source=f"{_NVIDIA}, TensorFlow (graph mode)",
    kernels=GRAPH_KERNELS,
    states=AMP,
    dropout=0.1,
    predicted_share=_MASKED,
)

MXNET = Stack(
    name="mxnet", source=f"{_NVIDIA}, MxNet", kernels=GRAPH_KERNELS, states=AMP, dropout=0.1, predicted_share=_MASKED
)

MXNET_NGC = replace(
    MXNET, name="mxnet-ngc", source=f"{_NVIDIA}, MxNet (--fuse-bn-relu, --fuse-bn-add-relu)", fuses_norms=True
)

PADDLE = Stack(
    name="paddle",
    source="github.com/PaddlePaddle/Paddle",
    kernels=EAGER_KERNELS,
    states=AMP,
    dropout=0.1,
    fuses_norms=True,
    predicted_share=_MASKED,
)

PYTORCH = Stack(
    name="pytorch-ddp",
    # apex: opt_level O2 (parameters in half precision beside a master copy), FusedLayerNorm, FusedLAMB; softmax takes
    # what it is given.
    source=f"{_NVIDIA}, PyTorch: DistributedDataParallel, apex amp O2 (run_pretraining.py, run_squad.py)",
    kernels=replace(EAGER_KERNELS, autocast=False, fused_activation=True, fused_softmax=True),
    states=HALF_GRADIENTS,
    optimizer="adamw-fused",
    dropout=0.1,
    predicted_share=_MASKED,
)

LAMBDA = replace(
    PYTORCH,
    source="github.com/lambdal/deeplearning-benchmark, pytorch/scripts: NVIDIA's examples, BERT fine-tuned on SQuAD",
    predicted_share=0.0,
)

TIMM = Stack(
    name="timm",
    source="github.com/huggingface/pytorch-image-models, benchmark.py; query, key and value in one",
    kernels=replace(EAGER_KERNELS, merged_projections=True),
    states=AMP,
    optimizer="sgd",
)

CHAINER = Stack(
    name="chainer",
    source="github.com/chainer/chainer, ChainerMN's functions (MPI); Kahira et al. 2021 (arXiv 2104.09075), section 5",
    kernels=replace(EAGER_KERNELS, autocast=False),
    states=AMP,
    dropout=0.1,
    # Halos, layer-wise collectives and gathers are mpi4py calls on device buffers, without GPUDirect; about 3 ms a
    # message (paraDL-analysis, parallel_analysis.py). NCCL 2.4.8 sums gradients: [Empirical] over one adapter, as VGG
    # on two nodes of ABCI says (553 MB in 0.19 s), whereas ResNet-50's gathers by filters need both (report, table 8).
    transport=Transport(direct=False, sum_rings=1, staged=("spatial", "channel", "layout"), message=3e-3),
    # The first process of a group reads for all of it (paraDL, hybrid_spatial/train_imagenet.py:
    # create_multi_node_iterator). [Empirical] Under data parallelism each reads 64 pictures in ResNet-50's 0.191 s.
    pictures=PictureSplit(gathers_each=True, own_statistics=True, whole_weights=True, read_rate=335.0),
)

CHAINER_NCCL = replace(
    CHAINER,
    name="chainer-nccl",
    source=f"{CHAINER.source}; layer-wise collectives by NCCL 2.4.8",
    transport=replace(CHAINER.transport, staged=("spatial", "layout")),
)
"""The same with layer-wise collectives of its own, by NCCL, as the measurements of ParaDL's report ran."""

GPIPE = Stack(
    name="torchgpipe",
    source="Kim et al. 2020 (arXiv 2004.09910)",
    kernels=EAGER_KERNELS,
    states=AMP,
    optimizer="sgd",
)

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

ENGINE = Stack(
    name="deepspeed",
    source="github.com/deepspeedai/DeepSpeed, runtime/engine.py: bf16 parameters and sums around a model's own kernels",
    kernels=replace(EAGER, remade_gates=False),
    states=HALF_GRADIENTS,
    optimizer="adamw",
)
"""DeepSpeed's engine around a training script of its user's; published runs are of Megatron-DeepSpeed."""

_NAMES: tuple[tuple[str, Stack], ...] = (
    (r"deepspeed.*bloom|bloom.*deepspeed", BLOOM),
    (r"deepspeed", DEEPSPEED),
    (r"megatron.*\bci\b", CI),
    (r"megatron.*fork|zero.?bubble", ZERO_BUBBLE),
    (r"automodel", AUTOMODEL),
    (r"megatron.?bridge", BRIDGE),
    (r"^nemo$|nemo.?launcher", NEMO),
    (r"nemo|megatron.?core|transformer.?engine", CORE),
    (r"megascale", MEGASCALE),
    (r"megatron", MEGATRON),
    (r"foundry|composer", FOUNDRY),
    (r"torchtitan.*compile", TITAN),
    (r"torchtitan|fsdp", TITAN_EAGER),
    (r"nanotron", NANOTRON),
    (r"\bpax\b|maxtext|\bjax\b|\bxla\b.*jax", JAX),
    (r"meta internal|\bmeta\b", META),
    (r"internevo|internlm", INTERNEVO),
    (r"libai|oneflow", ONEFLOW),
    (r"timm", TIMM),
    (r"chainer.*nccl", CHAINER_NCCL),
    (r"chainer", CHAINER),
    (r"gpipe", GPIPE),
    (r"tensorflow", TENSORFLOW),
    (r"ngc.*mxnet", MXNET_NGC),
    (r"mxnet", MXNET),
    (r"paddle", PADDLE),
    (r"galvatron", GALVATRON),
    (r"deeplearningexamples.*lambda", LAMBDA),
    (r"pytorch|\bddp\b|deeplearningexamples", PYTORCH),
)

STACKS: dict[str, Stack] = {stack.name: stack for stack in (*(stack for _, stack in _NAMES), ENGINE, DEFAULT)}
"""Every stack by name."""


@cache
def match_stack(framework: str) -> Stack:
    """The stack that a framework's name means; ``DEFAULT`` where it is not known."""
    text = framework.lower()
    return next((stack for words, stack in _NAMES if re.search(words, text)), DEFAULT)
