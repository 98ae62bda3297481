"""What stands before and after a transformer's blocks: embeddings, and heads with their loss."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, SplitDims, TensorSplit
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.calls import FP32, Division, Value
from galvatron_lite.model.shapes.fields import EncoderShape, TransformerShape
from galvatron_lite.model.shapes.tape import Tape

NOT_SPLIT = "nothing in it is split: every device of a tensor group does all of its work"
_MANY_WAYS = 5040
_FIGURE_BYTES = 12
"""Of a token, that a device tells the others of a tensor group for a loss on shares (``parallelism.vocabulary``)."""


def norm(tape: Tape, shape: TransformerShape, name: str, x: Value) -> Value:
    """The shape's normalisation over the hidden size."""
    if shape.norm == "rmsnorm":
        return ops.rms_norm(tape, name, x, shape.hidden, fused=tape.kernels.fused_norm)
    return ops.layer_norm(tape, name, x, shape.hidden, bias=shape.biases)


def many_ways(rows: int = _MANY_WAYS << 6) -> int:
    """A number with many small divisors, none above ``rows``: the degrees offered where rows may be shared unevenly."""
    if rows < _MANY_WAYS:
        return 1 << (rows.bit_length() - 1)
    return _MANY_WAYS << ((rows // _MANY_WAYS).bit_length() - 1)


def embed(tape: Tape, shape: TransformerShape, tokens: int, *, tied: bool = False) -> Value:
    """Token table (``tied``: another layer's), learned positions, dropout: token indices to (tokens, hidden)."""
    indices = tape.enter(tokens, Division.WHOLE, ops.INDEX, grad=False)
    part = Division.TENSOR if shape.splits_vocabulary else Division.WHOLE
    table = shape.entries * shape.hidden * (not tied)
    x = ops.embedding(tape, "embedding", indices, shape.hidden, table=table, part=part)
    if shape.positions == "learned":
        x = ops.positions(tape, "positions", x, shape.position_entries * shape.hidden)
    return x


def embedding_kind(shape: TransformerShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``before``: token table (split over the vocabulary), positions; a BERT's segment table and norm too."""
    tape = Tape(item_bytes, kernels)
    x = embed(tape, shape, tokens)
    if isinstance(shape, EncoderShape):
        segments = tape.enter(tokens, Division.WHOLE, ops.INDEX, grad=False)
        named = ops.embedding(tape, "segments", segments, shape.hidden, table=shape.segments * shape.hidden)
        x = ops.add(tape, "segments.sum", x, named)
        x = norm(tape, shape, "norm", x)
    x = ops.dropout(tape, "dropout", x, shape.dropout)
    return edge_kind(tape, shape, "before", (x,), tokens)


def head(tape: Tape, shape: TransformerShape, x: Value, bias: bool = False) -> tuple[Value, Value]:
    """Logits split over the vocabulary, and their cross-entropy: (logits, loss)."""
    rows = x.items // shape.hidden
    labels = tape.labels(rows)
    part = Division.TENSOR if shape.splits_vocabulary else Division.WHOLE
    tied = shape.tied_embeddings
    logits = ops.linear(tape, "head", tape.gather(x), shape.hidden, shape.entries, part, bias=bias, tied=tied)
    return logits, ops.cross_entropy(tape, "loss", logits, labels)


def head_kind(shape: TransformerShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``after`` of a decoder: final norm, head, loss."""
    tape = Tape(item_bytes, kernels)
    x = norm(tape, shape, "norm", tape.enter(tokens * shape.hidden))
    logits, loss = head(tape, shape, x)
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def masked_head_kind(shape: EncoderShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``after`` of a BERT: transform, head with a bias over the vocabulary, loss; pooler and next-sentence head."""
    tape = Tape(item_bytes, kernels)
    x = tape.enter(tokens * shape.hidden)
    picked = ops.reshape(tape, "predicted", x, shape.predicted * shape.hidden) if shape.predicted else x
    transformed = ops.linear(tape, "transform", picked, shape.hidden, shape.hidden, Division.WHOLE, bias=True)
    transformed = norm(tape, shape, "norm", ops.activation(tape, "transform.act", transformed))
    logits, loss = head(tape, shape, transformed, bias=True)
    if shape.head == "pretraining":
        loss = ops.add(tape, "loss.sum", loss, _next_sentence(tape, shape, x))
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def _next_sentence(tape: Tape, shape: EncoderShape, x: Value) -> Value:
    first = ops.reshape(tape, "pooler.first", x, shape.hidden)
    pooled = ops.linear(tape, "pooler", first, shape.hidden, shape.hidden, Division.WHOLE, bias=True, keeps=x)
    pooled = ops.activation(tape, "pooler.act", pooled, keeps_output=True)
    logits = ops.linear(tape, "next_sentence", pooled, shape.hidden, 2, Division.WHOLE, bias=True)
    return ops.cross_entropy(tape, "next_sentence.loss", logits, tape.labels(1))


def edge_kind(
    tape: Tape, shape: TransformerShape, name: str, out: tuple[Value, ...], tokens: int, gathered: Value | None = None
) -> LayerKind:
    """Sum up the tape of an embedding (its rows are reduced once a forward pass) or of a head and its loss on shares.

    The vocabulary may be shared unevenly, so degrees need not divide it. Where software computes the loss on shares by
    itself, the layer's other work may be shared by tokens (Megatron's sequence parallelism covers both ends); else the
    runtime of this project does, and gathers logits where tokens are shared.
    """
    split, parallel = shape.splits_vocabulary, tape.kernels.parallel_loss
    figures = _FIGURE_BYTES * gathered.items // shape.entries if split and not parallel and gathered else 0
    kind = tape.kind(
        name,
        out,
        SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.entries),
        tensor_degrees=many_ways(shape.entries) if split else many_ways(),
        tensor_reason="" if split else NOT_SPLIT,
        tensor_collectives=2 if split and not gathered else 0,
        recomputed=False,
        sequence_parallel=split and parallel,
        gathered=gathered if split and not parallel else None,
        loss_bytes=figures,
        regions=_regions(split, head=gathered is not None),
    )
    more = FP32 * figures // _FIGURE_BYTES * (2 + shape.entries % 2)
    spared = FP32 * gathered.items if figures and gathered else 0
    kept = {choice: _less_split(own, more) for choice, own in kind.kept.items()}
    return replace(kind, kept=kept, spared_bytes=spared)


def _less_split(kept: TensorSplit, more: int) -> TensorSplit:
    """What is kept, of which the largest share is so many bytes more than one of equal shares.

    Of each token a total in fp32 lies beside the logits, and one of an odd vocabulary is a logit longer.
    """
    return replace(kept, tensor=kept.tensor - more, whole=kept.whole + more)


def _regions(split: bool, *, head: bool) -> tuple[int, int]:
    """Gathers and scatters of an embedding (its rows are summed once) or a head (its input's gradient is)."""
    return (int(split and head), int(split and not head))


def ties_of(shape: TransformerShape, *users: str) -> dict[tuple[str, str], int]:
    """The token table, shared with each user where embeddings are tied."""
    return {("before", user): shape.entries * shape.hidden for user in users if shape.tied_embeddings}
