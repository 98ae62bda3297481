"""What a model file holds: one frozen dataclass an architecture family.

Sizes that follow from others may be left at 0: ``kv_heads`` (= heads), ``head_dim`` (= hidden / heads), ``ffn_hidden``
(= 4 x hidden), ``moe_ffn`` (= ffn_hidden), ``position_entries`` (= seq_len), ``decoder_layers`` (= layers),
``decoder_seq_len`` (= seq_len). ``complete`` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

from galvatron_lite.errors import InputError
from galvatron_lite.files import Strict
from galvatron_lite.limits import LAYERS, SAMPLES, Name, is_name
from galvatron_lite.model.shapes.picture_fields import (
    AlexNetShape,
    CosmoFlowShape,
    PerceptionShape,
    PictureShape,
    RegNetShape,
    UNetShape,
    VggShape,
    check_pictures,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape(Strict):
    """Fields that all transformers share."""

    name: Name = ""  # for people; the file's stem where empty
    source: str = ""  # address of the published shape
    layers: int  # blocks (of the encoder, where there are two stacks)
    hidden: int  # width of the hidden state
    heads: int  # query heads
    kv_heads: int = 0  # key-value heads; 0: as many as ``heads``
    head_dim: int = 0  # items of one head; 0: hidden / heads
    ffn_hidden: int = 0  # inner width of the MLP; 0: 4 x hidden
    gated_mlp: bool = False  # whether the MLP multiplies two projections (SwiGLU) instead of activating one
    activation: Literal["gelu", "silu", "relu"] = "gelu"  # function of the MLP; decides what autograd keeps
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # kind of normalisation
    fused_norm: bool = True  # whether RMSNorm runs as one kernel (CUDA) or step by step in fp32 (CPU)
    biases: bool = True  # whether linear layers and LayerNorm have biases
    qkv_bias: bool = False  # whether query, key and value projections have biases even where ``biases`` is false
    # how places are told: a learned table, rotary, relative buckets (T5), a bias by distance (ALiBi), or none
    positions: Literal["learned", "rotary", "relative", "alibi", "none"] = "learned"
    vocab: int  # entries of the vocabulary
    # the tables are padded so that their entries are a multiple of this (tensor parallelism splits them evenly); 1:
    # not padded
    vocab_multiple: int = 1
    tied_embeddings: bool = True  # whether the head shares the token table
    seq_len: int  # tokens per sample
    position_entries: int = 0  # entries of the table of learned positions; 0: ``seq_len``
    dropout: float = 0.0  # probability after embedding, attention and MLP, and on attention weights
    # whether tensor parallelism splits token table and head; None: where they are more than twice as tall as wide
    split_vocabulary: bool | None = None
    # of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): items of a token's compressed keys and values;
    # 0: plain attention
    kv_rank: int = 0
    q_rank: int = 0  # items of a token's compressed query; 0: queries are not compressed
    rope_dim: int = 0  # of latent attention: items of a head that rotary positions turn, part of ``head_dim``
    value_dim: int = 0  # of latent attention: items of one head of values; 0: ``head_dim``

    @property
    def entries(self) -> int:
        """Rows of the token table, padding included."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor parallelism splits token table and head."""
        return self.entries > 2 * self.hidden if self.split_vocabulary is None else self.split_vocabulary

    @property
    def attention_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape(TransformerShape):
    """A causal language model (GPT, Llama)."""

    arch: Literal["decoder"] = "decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape(TransformerShape):
    """A post-norm encoder (BERT)."""

    arch: Literal["encoder"] = "encoder"
    segments: int = 2  # entries of the segment table
    # masked language model, or that plus pooler and next-sentence prediction (pretraining)
    head: Literal["masked_lm", "pretraining"] = "masked_lm"
    predicted: int = 0  # tokens of a sample whose logits are computed; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape(TransformerShape):
    """A causal language model whose MLPs are mixtures of experts (Mixtral)."""

    arch: Literal["moe"] = "moe"
    n_experts: int  # experts a block
    moe_topk: int = 2  # experts a token visits
    moe_ffn: int = 0  # inner width of one expert; 0: ``ffn_hidden``
    shared_ffn: int = 0  # inner width of all shared experts together, which every token visits; 0: there are none
    dense_layers: int = 0  # how many of the first blocks have a plain MLP of ``ffn_hidden``
    # rows of an expert over its even share, where experts take a fixed number; 1: each takes what comes
    capacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderShape(TransformerShape):
    """An encoder and a decoder with cross-attention (T5)."""

    arch: Literal["encoder_decoder"] = "encoder_decoder"
    decoder_layers: int = 0  # blocks of the decoder; 0: ``layers``
    decoder_seq_len: int = 0  # tokens of the decoder's sample; 0: as many as the encoder's
    buckets: int = 32  # relative position buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape(Strict):
    """A vision transformer: square images cut into patches, a class token, pre-norm blocks, a linear head."""

    arch: Literal["vit"] = "vit"
    name: Name = ""  # name, source, layers, hidden, heads, ffn_hidden, dropout: as in ``TransformerShape``
    source: str = ""
    layers: int
    hidden: int
    heads: int
    ffn_hidden: int = 0
    dropout: float = 0.0
    image_size: int = 224  # pixels along each side
    patch: int = 16  # pixels along each side of a patch
    channels: int = 3  # of the image
    classes: int = 1000  # outputs of the head


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape(Strict):
    """A residual network of bottleneck blocks (ResNet-50 and deeper)."""

    arch: Literal["resnet"] = "resnet"
    name: Name = ""  # name, source: for people
    source: str = ""
    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks a stage
    width: int = 64  # channels of the first stage's bottleneck; doubled from stage to stage
    expansion: int = 4  # output channels / bottleneck channels
    image_size: int = 224  # pixels along each side
    channels: int = 3  # of the image
    classes: int = 1000  # outputs of the head


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNextShape(Strict):
    """A ConvNeXt."""

    arch: Literal["convnext"] = "convnext"
    name: Name = ""  # name, source: for people
    source: str = ""
    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    kernel: int = 7  # of the depthwise convolutions
    image_size: int = 224  # pixels along each side
    image_height: int = 0  # image_height, image_width: where the picture is not square; 0: ``image_size``
    image_width: int = 0
    channels: int = 3  # of the image
    classes: int = 1000  # outputs of the head
    # whether LayerNorm runs as one kernel, or step by step over channels that lie first (as PyTorch's
    # ``torch/distributed/tensor/examples/convnext_example.py`` has it); the last one, of the mean, always does
    fused_norm: bool = True


Shape = (
    DecoderShape | EncoderShape | MoeShape | EncoderDecoderShape | VitShape | ResNetShape | ConvNextShape | VggShape
    | AlexNetShape | RegNetShape | UNetShape | CosmoFlowShape | PerceptionShape
)  # fmt: skip
SHAPES: dict[str, type[Shape]] = {
    "decoder": DecoderShape,
    "encoder": EncoderShape,
    "moe": MoeShape,
    "encoder_decoder": EncoderDecoderShape,
    "vit": VitShape,
    "resnet": ResNetShape,
    "convnext": ConvNextShape,
    "vgg": VggShape,
    "alexnet": AlexNetShape,
    "regnet": RegNetShape,
    "unet": UNetShape,
    "cosmoflow": CosmoFlowShape,
    "perception": PerceptionShape,
}
"""Architecture families by the name a file gives under ``arch``."""


T = TypeVar("T", bound=TransformerShape)
_MAY_BE_ZERO = {
    "kv_heads", "head_dim", "ffn_hidden", "moe_ffn", "decoder_layers", "decoder_seq_len", "position_entries",
    "kv_rank", "q_rank", "rope_dim", "value_dim", "predicted", "shared_ffn", "dense_layers", "image_height",
    "image_width",
}  # fmt: skip


_LARGEST = {"layers": LAYERS, "decoder_layers": LAYERS, "depths": LAYERS // 4, "levels": 24, "n_experts": 2**16}
"""The largest sizes that count layers or halvings."""


def complete(shape: Shape) -> Shape:
    """The shape with sizes that follow from others filled in."""
    _check_sizes(shape)
    match shape:
        case EncoderDecoderShape():
            whole = replace(
                shape,
                decoder_layers=shape.decoder_layers or shape.layers,
                decoder_seq_len=shape.decoder_seq_len or shape.seq_len,
            )
            return _complete_transformer(whole)
        case MoeShape():
            return _complete_moe(shape)
        case VitShape():
            return _complete_vit(shape)
        case ConvNextShape():
            return _checked_convnext(shape)
        case PictureShape():
            check_pictures(shape)
        case TransformerShape():
            return _complete_transformer(shape)
    return shape


def _check_sizes(shape: Shape) -> None:
    for item in fields(shape):
        value = getattr(shape, item.name)
        sizes = value if isinstance(value, tuple) else (value,)
        low = 0 if item.name in _MAY_BE_ZERO else 1
        high = _LARGEST.get(item.name, SAMPLES)
        wrong = any(isinstance(size, int) and not isinstance(size, bool) and not low <= size <= high for size in sizes)
        if wrong or not 0 < len(sizes) <= LAYERS:
            number = "numbers" if isinstance(value, tuple) else "a number"
            raise InputError(item.name, value, f"Give {number} from {low} to {high}.")
    try:
        is_name(shape.name)
    except ValueError as error:
        raise InputError("name", shape.name, f"{error}.") from error
    probability = getattr(shape, "dropout", 0.0)
    if not 0 <= probability < 1:
        raise InputError("dropout", probability, "Give a probability from 0 up to, not including, 1.")


def _complete_transformer(shape: T) -> T:
    kv_heads = shape.kv_heads or shape.heads
    if not shape.head_dim and shape.hidden % shape.heads:
        raise InputError("heads", shape.heads, f"Choose a number that divides {shape.hidden}, or give head_dim.")
    if shape.heads % kv_heads:
        raise InputError("kv_heads", kv_heads, f"Choose a number that divides the {shape.heads} heads.")
    if shape.kv_rank and not 0 < shape.rope_dim < (shape.head_dim or shape.hidden // shape.heads):
        raise InputError("rope_dim", shape.rope_dim, "Latent attention turns part of head_dim; give a smaller number.")
    entries = shape.position_entries or shape.seq_len
    if shape.positions == "learned" and shape.seq_len > entries:
        raise InputError("seq_len", shape.seq_len, f"The table of learned positions has {entries} (position_entries).")
    return replace(
        shape,
        kv_heads=kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        ffn_hidden=shape.ffn_hidden or 4 * shape.hidden,
        position_entries=entries,
    )


def _complete_moe(shape: MoeShape) -> MoeShape:
    if shape.moe_topk > shape.n_experts:
        raise InputError("moe_topk", shape.moe_topk, f"There are {shape.n_experts} experts a block.")
    if shape.dense_layers >= shape.layers:
        raise InputError("dense_layers", shape.dense_layers, f"Choose fewer than the {shape.layers} layers.")
    if shape.capacity < 1:
        raise InputError("capacity", shape.capacity, "Give a factor of 1 or more on an expert's even share.")
    whole = _complete_transformer(shape)
    return replace(whole, moe_ffn=whole.moe_ffn or whole.ffn_hidden)


def _complete_vit(shape: VitShape) -> VitShape:
    if shape.hidden % shape.heads:
        raise InputError("heads", shape.heads, f"Choose a number that divides the hidden size {shape.hidden}.")
    if shape.image_size % shape.patch:
        raise InputError("patch", shape.patch, f"Choose a number that divides the image size {shape.image_size}.")
    return replace(shape, ffn_hidden=shape.ffn_hidden or 4 * shape.hidden)


def _checked_convnext(shape: ConvNextShape) -> ConvNextShape:
    if len(shape.depths) != len(shape.widths):
        raise InputError("depths", shape.depths, f"Give as many as widths ({len(shape.widths)}).")
    return shape
