"""What a model file holds: one frozen dataclass an architecture family. No torch here.

Sizes that follow from others may be left at 0: ``kv_heads`` (= heads), ``head_dim`` (= hidden / heads), ``ffn_hidden``
(= 4 x hidden), ``moe_ffn`` (= ffn_hidden), ``position_entries`` (= seq_len), ``decoder_layers`` (= layers),
``decoder_seq_len`` (= seq_len). ``complete`` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from galvatron_lite.files import STRICT
from galvatron_lite.model.shapes.picture_fields import (
    AlexNetShape,
    CosmoFlowShape,
    PerceptionShape,
    RegNetShape,
    UNetShape,
    VggShape,
)

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Fields that all transformers share.

    Attributes:
        name: for people; the file's stem where empty.
        source: address of the published shape.
        layers: blocks (of the encoder, where there are two stacks).
        hidden: width of the hidden state.
        heads: query heads.
        kv_heads: key-value heads; 0: as many as ``heads``.
        head_dim: items of one head; 0: hidden / heads.
        ffn_hidden: inner width of the MLP; 0: 4 x hidden.
        gated_mlp: whether the MLP multiplies two projections (SwiGLU) instead of activating one.
        activation: function of the MLP; decides what autograd keeps.
        norm: kind of normalisation.
        fused_norm: whether RMSNorm runs as one kernel (CUDA) or step by step in fp32 (CPU).
        biases: whether linear layers and LayerNorm have biases.
        qkv_bias: whether query, key and value projections have biases even where ``biases`` is false.
        positions: how places are told: a learned table, rotary, relative buckets (T5), a bias by distance (ALiBi), or
            none.
        vocab: entries of the vocabulary.
        vocab_multiple: the tables are padded so that their entries are a multiple of this (tensor parallelism
            splits them evenly); 1: not padded.
        tied_embeddings: whether the head shares the token table.
        seq_len: tokens per sample.
        position_entries: entries of the table of learned positions; 0: ``seq_len``.
        dropout: probability after embedding, attention and MLP, and on attention weights.
        split_vocabulary: whether tensor parallelism splits token table and head; None: where they are more than
            twice as tall as wide.
        kv_rank: of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): items of a token's compressed keys and
            values; 0: plain attention.
        q_rank: items of a token's compressed query; 0: queries are not compressed.
        rope_dim: of latent attention: items of a head that rotary positions turn, part of ``head_dim``.
        value_dim: of latent attention: items of one head of values; 0: ``head_dim``.
    """

    name: str = ""
    source: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden: int = 0
    gated_mlp: bool = False
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    fused_norm: bool = True
    biases: bool = True
    qkv_bias: bool = False
    positions: Literal["learned", "rotary", "relative", "alibi", "none"] = "learned"
    vocab: int
    vocab_multiple: int = 1
    tied_embeddings: bool = True
    seq_len: int
    position_entries: int = 0
    dropout: float = 0.0
    split_vocabulary: bool | None = None
    kv_rank: int = 0
    q_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0

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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["decoder"] = "decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape(TransformerShape):
    """A post-norm encoder (BERT).

    Attributes:
        segments: entries of the segment table.
        head: masked language model, or that plus pooler and next-sentence prediction (pretraining).
        predicted: tokens of a sample whose logits are computed; 0: all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["encoder"] = "encoder"
    segments: int = 2
    head: Literal["masked_lm", "pretraining"] = "masked_lm"
    predicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape(TransformerShape):
    """A causal language model whose MLPs are mixtures of experts (Mixtral).

    Attributes:
        n_experts: experts a block.
        moe_topk: experts a token visits.
        moe_ffn: inner width of one expert; 0: ``ffn_hidden``.
        shared_ffn: inner width of all shared experts together, which every token visits; 0: there are none.
        dense_layers: how many of the first blocks have a plain MLP of ``ffn_hidden``.
        capacity: rows of an expert over its even share, where experts take a fixed number; 1: each takes what comes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["moe"] = "moe"
    n_experts: int
    moe_topk: int = 2
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    capacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderShape(TransformerShape):
    """An encoder and a decoder with cross-attention (T5).

    Attributes:
        decoder_layers: blocks of the decoder; 0: ``layers``.
        decoder_seq_len: tokens of the decoder's sample; 0: as many as the encoder's.
        buckets: relative position buckets.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["encoder_decoder"] = "encoder_decoder"
    decoder_layers: int = 0
    decoder_seq_len: int = 0
    buckets: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape:
    """A vision transformer: square images cut into patches, a class token, pre-norm blocks, a linear head.

    Attributes:
        name, source, layers, hidden, heads, ffn_hidden, dropout: as in ``TransformerShape``.
        image_size: pixels along each side.
        patch: pixels along each side of a patch.
        channels: of the image.
        classes: outputs of the head.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["vit"] = "vit"
    name: str = ""
    source: str = ""
    layers: int
    hidden: int
    heads: int
    ffn_hidden: int = 0
    dropout: float = 0.0
    image_size: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """A residual network of bottleneck blocks (ResNet-50 and deeper).

    Attributes:
        name, source: for people.
        depths: blocks a stage.
        width: channels of the first stage's bottleneck; doubled from stage to stage.
        expansion: output channels / bottleneck channels.
        image_size: pixels along each side.
        channels: of the image.
        classes: outputs of the head.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["resnet"] = "resnet"
    name: str = ""
    source: str = ""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    expansion: int = 4
    image_size: int = 224
    channels: int = 3
    classes: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNextShape:
    """A ConvNeXt.

    Attributes:
        name, source: for people.
        depths: blocks a stage.
        widths: channels a stage.
        kernel: of the depthwise convolutions.
        image_size: pixels along each side.
        image_height, image_width: where the picture is not square; 0: ``image_size``.
        channels: of the image.
        classes: outputs of the head.
        fused_norm: whether LayerNorm runs as one kernel, or step by step over channels that lie first (as PyTorch's
            ``torch/distributed/tensor/examples/convnext_example.py`` has it); the last one, of the mean, always does.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    arch: Literal["convnext"] = "convnext"
    name: str = ""
    source: str = ""
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    kernel: int = 7
    image_size: int = 224
    image_height: int = 0
    image_width: int = 0
    channels: int = 3
    classes: int = 1000
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
