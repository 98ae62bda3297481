"""Fields of a model file: one frozen dataclass for each architecture family.

Sizes that follow from others may be 0: ``kv_heads`` (= heads), ``head_dim`` (= hidden / heads), ``ffn_hidden``
(= 4 x hidden), ``moe_ffn`` (= ffn_hidden), ``position_entries`` (= seq_len), ``decoder_layers`` (= layers),
``decoder_seq_len`` (= seq_len). ``complete`` fills them in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar, get_args

from galvatron_lite.errors import InputError
from galvatron_lite.files import Strict
from galvatron_lite.limits import LAYERS, SAMPLES, Name, is_name

AUXILIARY_LOSS, CORRECTED_SCORES = 0.72, 0.04
"""Tokens of the most loaded expert over the mean (MaxVio) if an auxiliary loss balances experts, and if a correction of
each expert's score does (Wang et al. 2024, arXiv:2408.15664, table 2, 1B models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape(Strict):
    """Fields that all transformers share."""

    name: Name = ""  # for people; the file's stem if empty
    source: str = ""  # address of the published shape
    layers: int  # blocks (of the encoder, if there are two stacks)
    hidden: int  # width of the hidden state
    heads: int  # query heads
    kv_heads: int = 0  # key-value heads; 0: as many as ``heads``
    head_dim: int = 0  # items of one head; 0: hidden / heads
    ffn_hidden: int = 0  # inner width of the MLP; 0: 4 x hidden
    gated_mlp: bool = False  # whether the MLP multiplies two projections (SwiGLU) instead of activating one
    activation: Literal["gelu", "silu", "relu"] = "gelu"  # of the MLP
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    fused_norm: bool = True  # whether RMSNorm runs as one kernel (CUDA) or step by step in fp32 (CPU)
    biases: bool = True  # whether linear layers and LayerNorm have biases
    qkv_bias: bool = False  # whether query, key and value projections have biases although ``biases`` is false
    # position encoding: a learned table, rotary, relative buckets (T5), a bias by distance (ALiBi), or none
    positions: Literal["learned", "rotary", "relative", "alibi", "none"] = "learned"
    vocab: int  # entries of the vocabulary
    vocab_multiple: int = 1  # tables are padded to a multiple of this, so that tensor parallelism splits them evenly
    tied_embeddings: bool = True  # whether the head shares the token table
    seq_len: int  # tokens per sample
    position_entries: int = 0  # entries of the table of learned positions; 0: ``seq_len``
    dropout: float = 0.0  # probability after embedding, attention and MLP, and on attention weights
    # whether tensor parallelism splits token table and head; None: if they have more than twice as many rows as columns
    split_vocabulary: bool | None = None
    # the next four for multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
    kv_rank: int = 0  # items of a token's compressed keys and values; 0: plain attention
    q_rank: int = 0  # items of a token's compressed query; 0: queries are not compressed
    rope_dim: int = 0  # items of a head with rotary positions, part of ``head_dim``
    value_dim: int = 0  # items of one head of values; 0: ``head_dim``
    window: int = 0  # tokens that a query sees at most, including its own; 0: all before it
    window_period: int = 1  # every such block sees all tokens, the others a window; 1: none has a window
    head_norm: bool = False  # whether each head of queries and keys is normalised (RMSNorm) before positions
    sinks: bool = False  # whether each head has a learned logit beside its scores

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
    n_experts: int  # per block
    moe_topk: int = 2  # experts that a token visits
    moe_ffn: int = 0  # inner width of one expert; 0: ``ffn_hidden``
    clamped: bool = False  # whether gate and up projections of experts are clamped before their product
    shared_ffn: int = 0  # inner width of all shared experts together, which all tokens visit; 0: there are none
    dense_layers: int = 0  # first blocks with a plain MLP of ``ffn_hidden``
    capacity: float = 1.0  # rows of an expert over its even share; 1: dropless, each takes the tokens that choose it
    # weights of a token's experts: softmax over all logits, softmax over the chosen ones, or a sigmoid of each
    router: Literal["softmax", "chosen_softmax", "sigmoid"] = "softmax"
    expert_groups: int = 1  # groups of experts
    chosen_groups: int = 1  # groups that a token visits at most
    expert_excess: float = AUXILIARY_LOSS  # load of the most loaded expert above the mean, as a share of it; 0: even


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderShape(TransformerShape):
    """An encoder and a decoder with cross-attention (T5)."""

    arch: Literal["encoder_decoder"] = "encoder_decoder"
    decoder_layers: int = 0  # 0: ``layers``
    decoder_seq_len: int = 0  # tokens per sample of the decoder; 0: ``seq_len``
    buckets: int = 32  # relative position buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureShape(Strict):
    """Fields that all image networks share."""

    name: Name = ""  # name, source: for people
    source: str = ""
    image_size: int = 224  # pixels along each side
    channels: int = 3  # of the image
    classes: int = 1000  # outputs of the head


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape(PictureShape):
    """A vision transformer: square images cut into patches, a class token, pre-norm blocks, a linear head."""

    arch: Literal["vit"] = "vit"
    layers: int  # layers, hidden, heads, ffn_hidden, dropout: as in ``TransformerShape``
    hidden: int
    heads: int
    ffn_hidden: int = 0
    dropout: float = 0.0
    patch: int = 16  # pixels along each side of a patch


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape(PictureShape):
    """A residual network of bottleneck blocks (ResNet-50 and deeper)."""

    arch: Literal["resnet"] = "resnet"
    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks a stage
    width: int = 64  # channels of the first stage's bottleneck; doubled from stage to stage
    expansion: int = 4  # output channels / bottleneck channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNextShape(PictureShape):
    """A ConvNeXt."""

    arch: Literal["convnext"] = "convnext"
    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    kernel: int = 7  # of the depthwise convolutions
    image_height: int = 0  # image_height, image_width: if the picture is not square; 0: ``image_size``
    image_width: int = 0
    # whether LayerNorm runs as one kernel, or step by step with channels first (as in PyTorch's
    # ``torch/distributed/tensor/examples/convnext_example.py``), except the last one, which is always one kernel
    fused_norm: bool = True

    @property
    def extent(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.image_height or self.image_size, self.image_width or self.image_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VggShape(PictureShape):
    """A VGG: groups of 3 x 3 convolutions with max pooling between them, three fully connected layers."""

    arch: Literal["vgg"] = "vgg"
    depths: tuple[int, ...]  # convolutions a group
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)  # channels a group
    hidden: int = 4096  # outputs of the first two fully connected layers
    pooled: int = 7  # pixels along each side of what enters the first of these
    dropout: float = 0.5  # probability after them


@dataclass(frozen=True, slots=True, kw_only=True)
class AlexNetShape(PictureShape):
    """An AlexNet in one tower."""

    arch: Literal["alexnet"] = "alexnet"
    widths: tuple[int, ...] = (64, 192, 384, 256, 256)  # channels of the five convolutions
    hidden: int = 4096  # hidden, pooled: as of a VGG
    pooled: int = 6
    dropout: float = 0.5  # probability before the first two fully connected layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RegNetShape(PictureShape):
    """A RegNet."""

    arch: Literal["regnet"] = "regnet"
    widths: tuple[int, ...]  # channels of each block; the picture is halved where they grow
    group: int  # channels of a group of the 3 x 3 convolutions
    squeeze: bool = False  # whether blocks have squeeze and excitation
    stem: int = 32  # channels of the first convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetShape(PictureShape):
    """A U-Net with padded convolutions, a class for every pixel."""

    arch: Literal["unet"] = "unet"
    base: int = 64  # channels of the first level; doubled from level to level
    levels: int = 4  # halvings of the picture
    norm: bool = False  # whether batch normalisation follows each convolution (which then has no bias)
    # whether the picture is enlarged by interpolation (the lowest level then has half the channels) or transposed
    # convolution
    bilinear: bool = False
    image_size: int = 512
    channels: int = 1
    classes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CosmoFlowShape(PictureShape):
    """A CosmoFlow: 3-D convolutions with mean pooling, fully connected layers, regression of ``classes`` numbers."""

    arch: Literal["cosmoflow"] = "cosmoflow"
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 256, 128)  # channels of each convolution
    kernels: tuple[int, ...] = (3, 3, 3, 3, 2, 2, 2)  # voxels along each side
    strides: tuple[int, ...] = (1, 1, 2, 1, 1, 1, 1)  # along each side
    padded: bool = False  # whether all convolutions except the last one are padded and keep the extent
    hidden: tuple[int, ...] = (2048, 256)  # outputs of the fully connected layers before the last one
    bias: bool = False  # whether convolutions and fully connected layers have biases
    image_size: int = 512
    channels: int = 4
    classes: int = 4

    @property
    def sides(self) -> tuple[int, ...]:
        """Voxels along each side before each convolution, and after the last one."""
        sides, last = [self.image_size], len(self.kernels) - 1
        for index, (kernel, stride) in enumerate(zip(self.kernels, self.strides, strict=True)):
            around = kernel - 1 if self.padded and index < last else 0
            after = (sides[-1] + around - kernel) // stride + 1
            sides.append(after // 2 if index < last else after)
        return tuple(sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptionShape(PictureShape):
    """Two encoder-decoders that map one bird's-eye view of LiDAR scans (the channels) to a picture each."""

    arch: Literal["perception"] = "perception"
    base: int = 32  # channels of the first level; doubled from level to level
    levels: int = 6  # halvings of the picture, rounded down
    # whether each level of the segmentation network's decoder reads the output of the level below; else, as published,
    # all levels except the finest are computed and dropped
    chained: bool = True
    image_size: int = 1000
    channels: int = 16
    classes: int = 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the finest first."""
        return tuple(self.base * 2**level for level in range(self.levels))

    @property
    def sides(self) -> tuple[int, ...]:
        """Pixels along a side of what enters each level."""
        return tuple(self.image_size // 2**level for level in range(self.levels))


Shape = (
    DecoderShape | EncoderShape | MoeShape | EncoderDecoderShape | VitShape | ResNetShape | ConvNextShape | VggShape
    | AlexNetShape | RegNetShape | UNetShape | CosmoFlowShape | PerceptionShape
)  # fmt: skip
SHAPES: dict[str, type[Shape]] = {kind.__dataclass_fields__["arch"].default: kind for kind in get_args(Shape)}
"""Architecture families by the ``arch`` of a file."""


T = TypeVar("T", bound=TransformerShape)
_MAY_BE_ZERO = {
    "kv_heads", "head_dim", "ffn_hidden", "moe_ffn", "decoder_layers", "decoder_seq_len", "position_entries",
    "kv_rank", "q_rank", "rope_dim", "value_dim", "window", "predicted", "shared_ffn", "dense_layers", "image_height",
    "image_width",
}  # fmt: skip


_LARGEST = {"layers": LAYERS, "decoder_layers": LAYERS, "depths": LAYERS // 4, "levels": 24, "n_experts": 2**16}
"""The largest sizes that count layers or halvings."""


def complete(shape: Shape) -> Shape:
    """Check a shape and fill in sizes that follow from others.

    Raises:
        InputError: a size is out of range, or sizes do not fit one another.
    """
    _check_sizes(shape)
    match shape:
        case EncoderDecoderShape():
            shape = replace(
                shape,
                decoder_layers=shape.decoder_layers or shape.layers,
                decoder_seq_len=shape.decoder_seq_len or shape.seq_len,
            )
        case MoeShape():
            _check_moe(shape)
        case VitShape():
            remedy = f"Choose a number that divides the hidden size {shape.hidden}."
            _require(shape.hidden % shape.heads == 0, "heads", shape.heads, remedy)
            remedy = f"Choose a number that divides the image size {shape.image_size}."
            _require(shape.image_size % shape.patch == 0, "patch", shape.patch, remedy)
            return replace(shape, ffn_hidden=shape.ffn_hidden or 4 * shape.hidden)
        case VggShape() | ConvNextShape():
            _require_length("depths", shape.depths, len(shape.widths))
        case AlexNetShape():
            _require_length("widths", shape.widths, 5)
        case RegNetShape():
            uneven = [width for width in shape.widths if width % min(shape.group, width)]
            _require(not uneven, "group", shape.group, f"Choose a number that divides the widths {uneven}.")
        case UNetShape():
            remedy = f"Choose a multiple of {2**shape.levels}: {shape.levels} halvings."
            _require(shape.image_size % 2**shape.levels == 0, "image_size", shape.image_size, remedy)
        case PerceptionShape():
            _require(shape.base % 2 == 0, "base", shape.base, "Choose an even number: the last level has half of it.")
            remedy = f"Choose at least {2**shape.levels}: {shape.levels} halvings leave no pixel."
            _require(shape.image_size >= 2**shape.levels, "image_size", shape.image_size, remedy)
            _require(shape.classes == 1, "classes", shape.classes, "Leave it at 1: each network gives one picture.")
        case CosmoFlowShape():
            _require_length("kernels", shape.kernels, len(shape.widths))
            _require_length("strides", shape.strides, len(shape.widths))
            remedy = f"One voxel must be left, not {shape.sides[-1]}; sides are {shape.sides}."
            _require(shape.sides[-1] == 1, "image_size", shape.image_size, remedy)
    return _complete_transformer(shape) if isinstance(shape, TransformerShape) else shape


def _require(condition: bool, field: str, value: object, remedy: str) -> None:
    if not condition:
        raise InputError(field, value, remedy)


def _require_length(field: str, values: tuple[int, ...], length: int) -> None:
    _require(len(values) == length, field, values, f"Give {length} numbers.")


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
    _require(0 <= probability < 1, "dropout", probability, "Give a probability from 0 up to, not including, 1.")


def _complete_transformer(shape: T) -> T:
    kv_heads, head_dim = shape.kv_heads or shape.heads, shape.head_dim or shape.hidden // shape.heads
    remedy = f"Choose a number that divides {shape.hidden}, or give head_dim."
    _require(bool(shape.head_dim) or shape.hidden % shape.heads == 0, "heads", shape.heads, remedy)
    remedy = f"Choose a number that divides the {shape.heads} heads."
    _require(shape.heads % kv_heads == 0, "kv_heads", kv_heads, remedy)
    remedy = "Latent attention turns part of head_dim; give a smaller number."
    _require(not shape.kv_rank or 0 < shape.rope_dim < head_dim, "rope_dim", shape.rope_dim, remedy)
    entries = shape.position_entries or shape.seq_len
    remedy = f"The table of learned positions has {entries} (position_entries)."
    _require(shape.positions != "learned" or shape.seq_len <= entries, "seq_len", shape.seq_len, remedy)
    ffn_hidden = shape.ffn_hidden or 4 * shape.hidden
    filled = replace(shape, kv_heads=kv_heads, head_dim=head_dim, ffn_hidden=ffn_hidden, position_entries=entries)
    return replace(filled, moe_ffn=filled.moe_ffn or ffn_hidden) if isinstance(filled, MoeShape) else filled


def _check_moe(shape: MoeShape) -> None:
    experts = shape.n_experts
    _require(shape.moe_topk <= experts, "moe_topk", shape.moe_topk, f"There are {experts} experts a block.")
    remedy = f"Choose fewer than the {shape.layers} layers."
    _require(shape.dense_layers < shape.layers, "dense_layers", shape.dense_layers, remedy)
    remedy = f"Give a number from 0 (even) up to, not including, the {experts} experts."
    _require(0 <= shape.expert_excess < experts, "expert_excess", shape.expert_excess, remedy)
    fits = experts % shape.expert_groups == 0 and shape.chosen_groups <= shape.expert_groups
    remedy = f"Groups must divide the {experts} experts, and chosen_groups be among them."
    _require(fits, "expert_groups", (shape.expert_groups, shape.chosen_groups), remedy)
    _require(shape.capacity >= 1, "capacity", shape.capacity, "Give a factor of 1 or more on an expert's even share.")


_SIDES = re.compile(r"^([1-9]\d*)(?:x([1-9]\d*))?$")


def sides_of(image: str) -> tuple[int, int]:
    """Parse height and width of a picture, as in ``224`` or ``512x1024``."""
    match = _SIDES.match(image.lower())
    if match is None:
        raise InputError("--image", image, "Give pixels as 224, or height and width as 512x1024.")
    return int(match[1]), int(match[2] or match[1])


def sizes_of(shape: Shape, name: str, image: str) -> dict[str, object]:
    """Return the fields of a shape that set another size of pictures.

    Raises:
        InputError: the model takes no pictures, or only square ones.
    """
    height, width = sides_of(image)
    sizes: dict[str, object] = {"image_size": height}
    if height != width:
        sizes = {"image_height": height, "image_width": width}
    if all(hasattr(shape, field) for field in sizes):
        return sizes
    if hasattr(shape, "image_size"):
        raise not_square(name, image)
    raise InputError("--image", image, f"{name}: It takes no pictures.")


def not_square(name: str, image: str) -> InputError:
    """Make the error for a model that is priced with square pictures only."""
    remedy = f"models of this family are priced with square pictures: give {min(sides_of(image))}"
    return InputError("--image", image, f"{name}: {remedy}, or trace your own with SCRIPT:FACTORY.")
