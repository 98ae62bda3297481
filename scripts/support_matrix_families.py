"""Tiny models of the families of transformers, from their own configurations with every size made small, and the vision
models of our zoo. Every other field keeps its default, but for chances, as nothing may be random."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, HEADS, LAYERS, TOKENS, VOCAB, IMAGE, PATCH, SOUND = 32, 4, 2, 16, 64, 32, 8, 800

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "n_vocab"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "classifier_proj_size",
         "mlp_dim", "output_hidden_size", "projection_dim", "lru_width", "decoder_hidden_size"), HIDDEN,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim",
         "ffn_hidden_size", "shared_expert_intermediate_size", "dense_intermediate_size"), 2 * HIDDEN,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), HIDDEN // 2),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "num_decoder_layers"), LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads"), HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS // 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_size", "kv_channels", "rotary_dim", "v_head_dim"), HIDDEN // HEADS,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), HIDDEN // HEADS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), HIDDEN // 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_target_positions"), 4 * TOKENS,
    ),
    "max_source_positions": TOKENS,
    "num_mel_bins": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 5,
    "sliding_window": TOKENS // 2,
    "mlp_expansion_ratio": 2,
}  # fmt: skip
"""What a field of a configuration becomes where it is a larger number."""
CALM = (
    "dropout",
    "pdrop",
    "drop_path",
    "layerdrop",
    "jitter",
    "stochastic_depth",
    "mask_time_prob",
    "mask_feature_prob",
)
"""Fields that have one of these in their names are chances: nothing random is left."""

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 4},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    "wav2vec2": {"conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 8], "num_feat_extract_layers": 2},
    "hubert": {"conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 8], "num_feat_extract_layers": 2},
    "wavlm": {"conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 8], "num_feat_extract_layers": 2},
    "deepseek_v2": {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_key_value_heads": HEADS},
    "deepseek_v3": {"num_hidden_layers": 3, "num_key_value_heads": HEADS},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "falcon": {"new_decoder_architecture": False},
    "gptj": {"rotary_dim": 4},
}
"""What the rule for sizes does not find."""

ZOO = (
    "resnet-mini",
    "vgg-mini",
    "alexnet-mini",
    "regnet-mini",
    "convnext-mini",
    "unet-bilinear-mini",
    "cosmoflow-mini",
)
"""Vision models of the zoo, whose batch norms take the statistics of all samples (SyncBatchNorm)."""

NAMED = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2", "bert", "vit", "t5", "qwen2_moe", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "gpt_neox", "gptj", "opt", "bloom", "falcon", "stablelm", "olmo", "olmo2", "cohere",
    "granite", "starcoder2", "deepseek_v2", "deepseek_v3", "qwen3_moe", "roberta", "distilbert", "albert", "electra",
    "deberta-v2", "mpnet", "xlm-roberta", "bart", "whisper", "deit", "beit", "swin", "convnext", "clip_vision_model",
    "clip_text_model", "wav2vec2", "hubert", "wavlm", "mbart", "m2m_100", "pegasus", "mt5", "blenderbot", "marian",
    "ernie", "camembert", "roformer", "deberta", "convbert", "fnet", "megatron-bert", "rembert",
    "codegen", "gpt_bigcode", "mpt", "olmoe", "phimoe", "cohere2", "glm", "helium", "persimmon",
    "biogpt", "smollm3", "seed_oss", "arcee", "dinov2", "convnextv2", "resnet", "regnet", "swinv2",
    *(f"zoo:{name}" for name in ZOO),
)  # fmt: skip
"""Families that are tried first, in this order."""

Maker = Callable[[int], Any]


@dataclass(frozen=True)
class Family:
    """A model to try."""

    name: str  # its type in transformers, or the target of a user's own
    model: nn.Module  # with random weights
    batches: Maker  # makes a batch of so many samples
    loss_fn: Callable[[Any, Any], Tensor] | None = None  # of a model that gives none


def known_families() -> tuple[str, ...]:
    """Every type that some AutoModel with a loss builds, the named ones first."""
    others = sorted({name for mapping in _mappings() for name in mapping} - set(NAMED))
    return (*NAMED, *others)


def build(name: str) -> Family:
    """A tiny model of a family, in training mode, always the same."""
    if name.startswith("zoo:"):
        return _of_zoo(name)
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()
    config = _shrunken(type(AutoConfig.for_model(name)), name)
    kind = _model_class(name)
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(unsettled(kind(config))).train()
    if "loss" in dir(model):  # a model's own attribute would be taken for its loss
        raise ValueError(f"{name}: the model has an attribute loss")
    return Family(name, model, _batches(model), None if _takes(model, "labels") else distance)


def unsettled(model: nn.Module) -> nn.Module:
    """Biases and scales as after some training: updates by Adam of entries that are zero are rounding's to decide."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def _of_zoo(name: str) -> Family:
    from galvatron_lite.model.zoo import build as build_size

    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_size(name.removeprefix("zoo:")))
    example: Any = model.example_batch
    model = unsettled(model).train()

    def make(samples: int) -> Any:
        batch = example(samples)
        return {
            key: torch.randn_like(value) if value.is_floating_point() else value[torch.randperm(len(value))]
            for key, value in batch.items()
        }

    return Family(name, model, make)


def distance(output: Any, _batch: Any) -> Tensor:
    """A loss for a model that has none: its first output against a fixed picture."""
    values = output[0] if not isinstance(output, Tensor) else output
    picture = torch.cos(torch.arange(math.prod(values.shape[1:]), device=values.device, dtype=torch.float32))
    return (values.float() - picture.reshape(values.shape[1:])).square().mean()


def _mappings() -> Sequence[Mapping[str, str]]:
    from transformers.models.auto import modeling_auto as auto

    kinds = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION",
             "AUDIO_CLASSIFICATION", "CTC")  # fmt: skip
    return [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds]


def _model_class(name: str) -> Any:
    import transformers

    found = {"clip_vision_model": "CLIPVisionModel", "clip_text_model": "CLIPTextModel"}.get(name)
    found = found or next((mapping[name] for mapping in _mappings() if name in mapping), None)
    if found is None:
        raise ValueError(f"transformers has no model of type {name} that gives a loss")
    return getattr(transformers, found if isinstance(found, str) else found[0])


def _shrunken(kind: Any, name: str = "") -> Any:
    """A configuration of a kind, with small sizes, no chances, and parts that are small too."""
    plain = kind()
    fields = {key: getattr(plain, key, None) for key in plain.to_dict()}
    small = {key: value for key, own in fields.items() if (value := _small(key, own)) is not None}
    parts = {
        key: _shrunken(type(own)) for key, own in fields.items() if key.endswith("_config") and hasattr(own, "to_dict")
    }
    tokens = {key: 0 for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id") if key in fields}
    if "pad_token_id" in fields:
        tokens["pad_token_id"] = 1 if name in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    tokens |= {"decoder_start_token_id": 0} if getattr(plain, "is_encoder_decoder", False) else {}
    return kind(**{**small, **tokens, **parts, **SPECIAL.get(name, {})})


def _small(key: str, own: Any) -> Any:
    """The small value of a field; None where it stays as it is."""
    if isinstance(own, float) and any(word in key for word in CALM):
        return 0.0
    if key in SIZES and isinstance(own, int) and not isinstance(own, bool):
        return min(own, SIZES[key])
    return None


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _batches(model: nn.Module) -> Maker:
    """Batches by what the model's main input is."""
    main = getattr(model, "main_input_name", "input_ids")

    def make(samples: int) -> Any:
        batch = dict(_inputs(model, main, samples))
        if _takes(model, "labels"):
            batch["labels"] = _labels(model, main, samples)
        return batch

    return make


def _inputs(model: nn.Module, main: str, samples: int) -> Iterator[tuple[str, Tensor]]:
    config: Any = model.config
    if main == "pixel_values":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else IMAGE
        yield main, torch.randn(samples, getattr(config, "num_channels", 3), side, side)
    elif main == "input_features":
        yield main, torch.randn(samples, config.num_mel_bins, 2 * TOKENS)
    elif main == "input_values":
        yield main, torch.randn(samples, SOUND)
    else:
        yield main, _text(samples)


def _labels(model: nn.Module, main: str, samples: int) -> Tensor:
    """Of every token, or of the sample where the model tells classes."""
    config: Any = model.config
    if main == "pixel_values" or "Classification" in type(model).__name__:
        return torch.randint(0, config.num_labels, (samples,))
    return _text(samples)


def _text(samples: int) -> Tensor:
    """Token ids above those with a meaning of their own."""
    return torch.randint(4, VOCAB, (samples, TOKENS))
