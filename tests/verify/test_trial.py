"""What a trial on a small copy finds out about the loss of a batch and of its shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.loss.weights import LossWeight
from galvatron_lite.verify.trial.check import try_model
from galvatron_lite.verify.trial.double import SkippedError, make_double, run_pass
from galvatron_lite.verify.trial.findings import Findings
from tests.runtime.plans import make_plan

ONE = make_plan([["blocks"]], [[Strategy()]], 8)


class Remembering(nn.Module):
    """A queue of the last keys, which the loss of the next batch reads; or the range of what it has seen."""

    def __init__(self, observes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("memory", torch.empty(0) if observes else torch.randn(8, 4))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        with torch.no_grad():
            seen = rows.detach()
            self.memory = (
                seen.amax(0, keepdim=True)
                if not len(self.memory)
                else torch.cat([self.memory, seen])[-len(self.memory) :]
            )
        return (rows @ self.memory.clone().T).square().mean()


class Uncertain(nn.Module):
    """A cross-entropy with a learned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return (-self.scale).exp() * functional.cross_entropy(rows, labels) + self.scale


class Padded(nn.Module):
    """A mean over tokens that are no padding, which the model itself makes out: in no example batch is there any."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.out = way, nn.Embedding(12, 4), nn.Linear(4, 12)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits, targets = self.out(hidden)[:, :-1].transpose(1, 2), ids[:, 1:]
        if self.way == "samples":
            losses = functional.cross_entropy(logits, targets, ignore_index=0, reduction="none")
            return (losses.sum(1) / (targets != 0).sum(1)).mean()
        if self.way == "ignored":
            return functional.cross_entropy(logits, targets, ignore_index=0)
        if self.way == "limits":  # numbers that no token can be
            seen = (targets < float("inf")) & (targets != 2**40)
            return (functional.cross_entropy(logits, targets.long(), reduction="none") * seen).mean()
        if self.way == "filled":
            return functional.cross_entropy(logits, targets.masked_fill(targets == 0, -100))
        counts = targets > 0 if self.way == "above" else torch.arange(1, ids.shape[1]) < lengths[:, None]
        return (functional.cross_entropy(logits, targets, reduction="none") * counts).sum() / counts.sum()


def found(model: nn.Module, *batch: Tensor) -> Findings:
    torch.manual_seed(0)
    return try_model(model, batch, discover_layers(model))


def test_buffers_that_the_next_loss_reads_keep_the_batch_whole() -> None:
    assert found(Remembering(observes=False), torch.randn(8, 4)).uncombined == ("memory",)


def test_a_buffer_that_grows_is_put_back() -> None:
    findings = found(Remembering(observes=True), torch.randn(8, 4))
    assert findings.keeps_batch


def test_a_weighted_mean_that_is_0_by_0_where_nothing_counts_is_trained_where_something_does() -> None:
    labels = torch.arange(8) % 4
    findings = found(Uncertain(), torch.randn(8, 4), labels)
    assert findings.loss_error is None
    assert findings.weight is not None
    few = labels.masked_fill(torch.arange(8) < 4, -100)
    assert found(Uncertain(), torch.randn(8, 4), few).skipped == ""


@pytest.mark.parametrize(
    ("way", "refused"),
    [("limits", False), ("samples", False), ("ignored", False), ("filled", True), ("above", True), ("lengths", True)],
)
def test_means_over_what_is_no_padding_are_seen_where_the_example_has_none(way: str, refused: bool) -> None:
    ids = torch.arange(1, 9, dtype=torch.int32 if way == "limits" else torch.int64).expand(8, 8).clone()
    findings = found(Padded(way), ids, torch.full((8,), 8))
    assert findings.skipped == ""
    assert (findings.loss_error is not None) == refused
    assert not findings.undivided


class Bags(nn.Module):
    """Bags of words in an embedding with sparse gradients: a module, or the function."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.by_function, self.embed, self.out = (
            by_function,
            nn.EmbeddingBag(12, 4, sparse=not by_function),
            nn.Linear(4, 1),
        )
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.embed.weight
        hidden = functional.embedding(ids, weight, sparse=True).mean(1) if self.by_function else self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.out(hidden).square().mean()


def test_sparse_gradients_are_made_dense_or_refused() -> None:
    ids = torch.arange(32).reshape(8, 4) % 12
    findings = found(Bags(by_function=False), ids)
    assert not findings.skipped
    findings.check(ONE)
    with pytest.raises(InputError, match=r"embed\.weight.*sparse=False"):
        found(Bags(by_function=True), ids).check(ONE)


class Towers(nn.Module):
    """Bags of all samples in one row, which offsets part; tables may be on devices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 4) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        starts = torch.arange(0, rows.numel(), rows.shape[1])
        first, second = (table(rows.flatten(), starts) for table in self.tables)
        return (first * second).sum(1).square().mean()


class Totals(nn.Module):
    """Blocks that return a sum over the samples, or a mean, beside their activations."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.reduce = nn.ModuleList(Total(reduce) for _ in range(2)), reduce

    def forward(self, rows: Tensor) -> Tensor:
        hidden, total = self.blocks[0](rows)
        hidden, other = self.blocks[1](hidden)
        return hidden.square().mean() + (total + other) / (1 if self.reduce is torch.mean else len(rows))


class Total(nn.Linear):
    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__(4, 4)
        self.reduce = reduce

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(rows)
        return hidden, self.reduce(hidden.square())


class Scores(nn.Module):
    """Heads of several layers that return a sum over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.first, self.second = Score(3), Score(5)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        return (self.first(hidden) + self.second(hidden)) / len(rows)


class Score(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, rows: Tensor) -> Tensor:
        total: Tensor = self.layers(rows).square().sum()
        return total


def test_sums_over_samples_leave_branches_out() -> None:
    findings = found(Scores(), torch.randn(8, 4))
    assert (findings.bound, findings.bound_around) == ((), ("first", "second"))
    assert findings.needs().forbid == ("branches",)


def test_numbers_of_samples_keep_layers_from_sharing_the_batch_otherwise() -> None:
    findings = found(Towers(), torch.arange(24).reshape(8, 3) % 9)
    assert findings.bound == ("tables.0", "tables.1")
    alike = make_plan([["tables", "after"]], [[Strategy(data=2), Strategy(data=2)]], 8)
    findings.check(alike)
    with pytest.raises(InputError, match=r"what tables.0, tables.1 take or return.*Compute numbers inside the layer"):
        findings.check(make_plan([["tables", "after"]], [[Strategy(tensor=2), Strategy(data=2)]], 8))
    assert not found(Bags(by_function=False), torch.arange(24).reshape(8, 3) % 9).bound
    assert found(Totals(torch.mean), torch.randn(8, 4)).bound == ()
    assert found(Totals(torch.sum), torch.randn(8, 4)).bound == ("blocks.0", "blocks.1")


def test_tables_whose_rows_a_forward_pass_scales_are_found() -> None:
    model = Bags(by_function=False)
    model.embed.max_norm, model.embed.sparse = 0.1, False
    assert found(model, torch.arange(32).reshape(8, 4) % 12).written == ("embed.weight",)


class Graph(nn.Module):
    """Nodes of all graphs in one tensor, and edges that number them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for block in self.blocks:
            nodes = nodes + block(nodes)[edges]
        return nodes.square().mean()


def test_batches_that_cannot_be_cut_say_so() -> None:
    findings = found(Graph(), torch.randn(8, 4), torch.arange(7, -1, -1))
    assert not findings.warnings()
    with pytest.raises(InputError, match=r"No part of the batch runs by itself.*IndexError.*padded to one shape"):
        findings.check(make_plan([["blocks"]], [[Strategy(data=2)]], 8))


class Counting(nn.Module):
    """Counts its passes in an attribute, of a block or of itself, or keeps what it last returned; the loss reads it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.last = kind, None
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.counters = [self.blocks[0] if kind == "block" else self]
        self.counters[0].step = 0

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        rows = rows if self.last is None else rows + self.last
        if self.kind == "rows":
            self.last = rows.detach()
        elif self.kind == "mean":
            self.last = rows.detach().mean(0)
        else:
            self.counters[0].step += 1
        return rows.square().mean() * (1 + self.counters[0].step)


@pytest.mark.parametrize(
    ("kind", "name"), [("block", "blocks.0.step"), ("model", "step"), ("rows", "last"), ("mean", "last")]
)
def test_what_a_module_keeps_from_pass_to_pass_is_refused_where_it_runs_more_often(kind: str, name: str) -> None:
    findings = found(Counting(kind), torch.randn(8, 4))
    assert findings.attributes == (name,)
    assert findings.skipped == ""
    assert findings.keeps_batch == (kind == "mean")
    assert "microbatches=1" in findings.pins()["fix"]
    again = replace(ONE, stages=make_plan([["blocks"]], [[Strategy(recompute=Recompute.FULL)]], 8).stages)
    for plan, right in ((ONE, True), (replace(ONE, microbatches=2), False), (again, kind != "block")):
        with nullcontext() if right else pytest.raises(InputError, match=name):
            findings.check(plan)


class Several(nn.Module):
    """Two cross-entropies over targets of their own, and a mean of rows or over a mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.blocks = masked, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        mask = (rows[:, :1] > 0).float()
        for block in self.blocks:
            rows = block(rows)
        far = (rows.square() * mask).sum() / mask.sum() if self.masked else rows.square().mean()
        return functional.cross_entropy(rows, first) + 2 * functional.cross_entropy(rows, second) + far


def several(masked: bool, **options: LossWeight) -> Findings:
    torch.manual_seed(0)
    model, rows = Several(masked), torch.randn(8, 4)
    rows[:, 0] = torch.tensor([1.0, 1, -1, 1, 1, 1, 1, 1])
    batch = (rows, torch.arange(8) % 4, torch.arange(8) // 2)
    return try_model(model, batch, discover_layers(model), **options)


def test_a_loss_weight_that_is_not_needed_is_refused_for_that() -> None:
    assert several(masked=False).loss_error is None
    refused = several(masked=False, weight=lambda batch: len(batch[0]))
    assert "Leave it out" in str(refused.loss_error)
    assert not refused.undivided


def test_targets_that_shares_have_alike_are_not_blamed() -> None:
    assert "a mean over a mask" in str(several(masked=True).loss_error)


class Ghost(nn.Module):
    """A batch norm of four samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.SyncBatchNorm(4)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return torch.cat([self.norm(part) for part in rows.split(4)]).square().mean()


def test_statistics_of_a_part_of_the_samples_keep_the_batch_whole() -> None:
    assert found(Ghost(), torch.randn(8, 4)).undivided


class Choosing(nn.Module):
    """A loss of the samples that have the largest, of a mean that bends at a number, or of their number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        each = rows.square().mean(1)
        if self.kind == "largest":
            return each[each >= each.quantile(0.5)].mean()
        if self.kind == "flooded":
            return (each.mean() - 1e-3).abs() + 1e-3
        if self.kind == "far":
            return functional.huber_loss(rows.mean(0), torch.full((4,), 9.0))
        if self.kind == "clamped":
            return each.mean().clamp(max=1e3)
        if self.kind == "chosen":
            return torch.where(each.mean() > 1e3, torch.full((), 1e3), each.mean())
        if self.kind == "larger":
            return torch.stack([each.mean(), rows.abs().mean() / 9]).max()
        if self.kind == "scaled":
            return each.mean() / rows.detach().norm().clamp(min=1e3)
        if self.kind == "counted":
            return each.mean() * (1 + (len(each) > 6))
        assert not each.mean() > 1e3
        return torch.stack([one.clamp(max=1e3) for one in each]).mean()


@pytest.mark.parametrize(
    "kind", ["largest", "flooded", "clamped", "far", "chosen", "larger", "scaled", "counted", "by sample"]
)
def test_losses_that_select_or_clamp_samples_keep_the_batch_whole(kind: str) -> None:
    torch.manual_seed(1)
    findings = found(Choosing(kind), torch.randn(8, 4))
    assert (findings.keeps_batch or findings.loss_error is not None) == (kind != "by sample")


@pytest.mark.parametrize("valid", [lambda depth: depth > 0, lambda depth: ~depth.isnan()])
def test_means_over_valid_numbers_are_seen_where_all_of_the_example_are(valid: Any) -> None:
    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.l1_loss(output[valid(batch[1])], batch[1][valid(batch[1])])

    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.rand(8, 4) + 0.1)
    assert try_model(model, batch, discover_layers(model), loss_fn=loss_fn).loss_error is not None


def test_parameters_that_a_pass_writes_are_put_back() -> None:
    class Model(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias.copy_(-rows.mean(0))
            return super().forward(rows).square().mean()

    assert found(Model(4, 4), torch.randn(8, 4)).written == ("bias",)


class Calling(nn.Module):
    """Blocks whose parameters or attributes are others while they run, or which run in lower precision."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Sequential(nn.ELU(1.0), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind == "parameters":
                state = {name: parameter * 2 for name, parameter in block.named_parameters()}
                rows = torch.func.functional_call(block, state, (rows,))
            elif self.kind == "attribute":
                block[0].alpha = 9.0
                rows = block(rows)
                block[0].alpha = 1.0
            else:
                with torch.autocast("cpu"):
                    rows = block(rows).float()
        return rows.square().mean()


@pytest.mark.parametrize("kind", ["parameters", "attribute", "autocast"])
def test_blocks_that_cannot_run_again_are_not_recomputed(kind: str) -> None:
    torch.manual_seed(0)
    model, rows = Calling(kind), torch.randn(8, 4)
    findings = try_model(model, (rows,), discover_layers(model, (rows,)))
    assert findings.unrepeatable == (kind != "autocast")
    assert not findings.keeps_batch


class Adding(torch.autograd.Function):
    """Adds the term of RWKV to the gradient of logits, or clips it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, clips: bool) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.clips = clips
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits,) = ctx.saved_tensors
        return slopes[0].clamp(-9, 9) if ctx.clips else slopes[0], logits / logits.numel() * (not ctx.clips), None


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_that_do_not_scale_with_the_loss_keep_it_in_one_piece(clips: bool) -> None:
    class Model(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            logits = super().forward(rows)
            loss: Tensor = Adding.apply(logits.square().mean(), logits, clips)
            return loss

    findings = found(Model(4, 4), torch.randn(8, 4))
    findings.check(make_plan([["blocks"]], [[Strategy(tensor=2)]], 8))
    for strategy in (Strategy(data=2), Strategy(context=2)):
        with pytest.raises(InputError, match="scaled before backward"):
            findings.check(make_plan([["blocks"]], [[strategy]], 8))


def test_a_mask_that_chooses_samples_and_their_targets_is_seen_where_it_is_full() -> None:
    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        _, targets, mask = batch
        return functional.cross_entropy(output[mask], targets[mask])

    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.arange(8) % 4, torch.ones(8, dtype=torch.bool))
    assert try_model(model, batch, discover_layers(model), loss_fn=loss_fn).loss_error is not None


@pytest.mark.parametrize("runs", [True, False])
def test_shares_of_a_single_sample_are_refused_where_it_trains_otherwise(runs: bool) -> None:
    class Model(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            rows = super().forward(rows)
            assert runs or len(rows) > 1
            return (rows * 2 if len(rows) > 1 else rows).square().mean()

    findings = found(Model(4, 4), torch.randn(8, 4))
    assert not findings.pins()
    assert findings.needs().least_samples == 2
    findings.check(make_plan([["blocks"]], [[Strategy(data=4)]], 8))
    with pytest.raises(InputError, match="a single sample"):
        findings.check(make_plan([["blocks"]], [[Strategy(data=8)]], 8))


CALLS = {"count": 0}


def counting_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    CALLS["count"] += 1
    return (output - batch["rows"]).square().mean()


def test_values_that_a_loss_function_keeps_are_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rows = torch.randn(8, 4)
    findings = try_model(model, {"input": rows, "rows": rows}, discover_layers(model), loss_fn=counting_loss)
    assert (findings.skipped, findings.attributes, CALLS["count"]) == ("", (), 0)


class Failing(nn.Module):
    """Counts its passes in a buffer, and takes batches of four samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.count += 1
        for block in self.blocks:
            rows = block(rows)
        return rows.view(4, 4).square().mean()


def test_a_pass_that_fails_leaves_buffers_as_they_were() -> None:
    model = Failing()
    double = make_double(model, torch.randn(4, 4), discover_layers(model), None)
    with pytest.raises(SkippedError):
        run_pass(double, double.batch[:2])
    assert double.model.count == 0


class Forces(nn.Module):
    """Its layers see the tensors of ``torch.func`` transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, rows: Tensor) -> Tensor:
        force = torch.vmap(torch.func.grad(lambda row: self.blocks(row).sum()))(rows)
        return force.square().mean() + self.blocks(rows).square().mean()


def test_models_that_call_torch_func_are_tried() -> None:
    findings = found(Forces(), torch.randn(8, 4))
    assert not findings.skipped
    assert not findings.loss_error
