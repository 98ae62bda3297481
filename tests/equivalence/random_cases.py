"""Random models under free and sampled plans against one process; see ``scripts/check_equivalence --cases``."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize, plan
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.equivalence.plans import describe, sample_plan
from tests.equivalence.random_models import SAMPLES, draw_model, draw_traits
from tests.pool import JobError, WorkerPool

RELATIVE, NOISE = 1e-4, 1e-6
"""Largest error of an entry: so much of its tensor's largest, and for gradients so much of the largest of all."""
STEPS = 3
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    "sum": {"loss_reduction": "sum"},
    "masked mean": {"loss_weight": lambda batch: batch["mask"].sum()},
}
"""What the errors ask for, by the kind of loss."""
VERDICTS = ("equal", "refused", "SILENT", "CRASH", "HANG")
KINDS = ("free", "sampled")


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        seed: of the model and of its plans.
        world: ranks.
        kind: of plan: the one that ``auto_parallelize`` chooses (free), or a sampled one.
        verdict: one of ``VERDICTS``.
        message: what differs, or the error.
        model: what was drawn.
        plan: in a line; empty where it was not made.
    """

    seed: int
    world: int
    kind: str
    verdict: str
    message: str
    model: str
    plan: str = ""


@dataclass(frozen=True)
class Reference:
    """What one process computes: losses of all steps, parameters after ``STEPS``, gradients of the step behind them."""

    losses: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """What the ranks of a case need: either a plan, or a profile and a budget to plan from."""

    reference: Reference
    plan: Plan
    profile: Profile | None
    mem: int | str


def world_of(seed: int) -> int:
    """Every fifth case runs on four ranks."""
    return 4 if seed % 5 == 4 else 2


def check_case(pool: WorkerPool, seed: int, kind: str, seconds: float) -> Result:
    """Train a random model under a plan, and as one process; what differs again in float64, as at a corner of ReLU
    rounding becomes a gradient."""
    result = check_precision(pool, seed, kind, seconds, torch.float32)
    return check_precision(pool, seed, kind, seconds, torch.float64) if result.verdict == "SILENT" else result


def check_precision(pool: WorkerPool, seed: int, kind: str, seconds: float, dtype: torch.dtype) -> Result:
    """The same in one precision."""
    world, model = world_of(seed), str(draw_traits(seed))
    line = ""
    try:
        (prepared,) = pool.run(1, prepare, timeout=seconds, seed=seed, ranks=world, kind=kind, dtype=dtype)
        if isinstance(prepared, Prepared):
            line = describe(prepared.plan)
            verdicts = pool.run(world, train, timeout=seconds, seed=seed, prepared=prepared, dtype=dtype)
        else:
            verdicts = [prepared]
    except JobError as error:
        verdict = "CRASH" if " raised:" in str(error) else "HANG"
        return Result(seed, world, kind, verdict, str(error), model, line)
    verdict, message = max(verdicts, key=lambda each: VERDICTS.index(each[0]))
    return Result(seed, world, kind, verdict, message, model, line)


def prepare(seed: int, ranks: int, kind: str, dtype: torch.dtype) -> Prepared | tuple[str, str]:
    """The reference and the plan of a case; the verdict where the model or the planner refuses it."""
    warnings.simplefilter("ignore")
    drawn = draw_model(seed, dtype)
    batch = drawn.batches[0]
    reference = train_alone(drawn.model, drawn.batches, drawn.loss_fn)
    try:
        graph = trace(draw_model(seed, dtype).model, batch, loss_fn=drawn.loss_fn, name=f"random-{seed}")
        if kind == "sampled":
            return Prepared(reference, sample_plan(graph, ranks, SAMPLES, seed), None, "95%")
        profile = estimate_profile(graph, load_cluster("a100-40gb", ranks), precision="fp32", name=graph.name)
        mem = budget(profile, seed)
        return Prepared(reference, plan(profile, mem=mem, batch=SAMPLES, runners_up=0), profile, mem)
    except GalvatronError as error:
        return refusal(error)


def budget(profile: Profile, seed: int) -> int | str:
    """All of the device, what the plan of least memory needs, or the middle between that and the fastest plan."""
    if seed % 3 == 0:
        return "95%"
    try:
        fastest = plan(profile, batch=SAMPLES, runners_up=0)
        plan(profile, mem=1, batch=SAMPLES)
    except InfeasibleError as error:
        least = error.smallest_budget or 0
        most = max(stage.memory.total for stage in fastest.stages if stage.memory is not None)
        return least if seed % 3 == 1 else (least + most) // 2
    return "95%"


def refusal(error: GalvatronError) -> tuple[str, str]:
    """The verdict on an error that the package raises on purpose: it must name a field and a remedy."""
    complete = isinstance(error, InfeasibleError) or (isinstance(error, InputError) and error.field and error.remedy)
    return "refused" if complete else "CRASH", f"{type(error).__name__}: {error}"


def train_alone(model: nn.Module, batches: Sequence[Any], loss_fn: Any) -> Reference:
    """Plain PyTorch."""
    optimizer = adamw(model.parameters())
    losses, parameters = [], {}
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(call_model(model, batch), batch, loss_fn)
        loss.backward()
        losses.append(float(loss.detach()))
        if number == STEPS:
            break
        optimizer.step()
        parameters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(losses, parameters, gradients)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the check; its eps keeps gradients that are rounding alone from becoming whole updates."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.5)


def train(seed: int, prepared: Prepared, dtype: torch.dtype) -> tuple[str, str]:
    """The verdict of a rank; where an error says how to call it, it is called so."""
    warnings.simplefilter("ignore")
    drawn = draw_model(seed, dtype)
    how: dict[str, Any] = {"plan": prepared.plan} if prepared.profile is None else {"profile": prepared.profile}
    parallel: Any = None
    refused: tuple[str, str] | None = None
    for remedy in [{}, *filter(None, [REMEDIES.get(drawn.traits.loss)])]:
        options: dict[str, Any] = {**how, **remedy, "loss_fn": drawn.loss_fn, "mem": prepared.mem, "device": "cpu"}
        try:
            parallel, refused = auto_parallelize(drawn.model, drawn.batches[0], **options), None
            break
        except GalvatronError as error:
            refused = refusal(error)
            if not isinstance(error, InputError) or error.field not in ("loss_weight", "loss_reduction"):
                break
    refusals: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(refusals, refused)
    if any(refusals):  # where only some ranks refuse, the others would wait for them in the first step
        first = next(filter(None, refusals))
        return first if all(refusals) else ("HANG", f"only ranks {[*map(bool, refusals)]} refuse: {first[1]}")
    optimizer = parallel.optimizer(adamw)
    losses = [float(parallel.train_step(batch, optimizer)) for batch in drawn.batches[:STEPS]]
    state = parallel.full_state_dict()
    last = parallel.backward_step(drawn.batches[STEPS]).detach().clone()
    torch.distributed.all_reduce(last)
    different = differences(prepared.reference, [*losses, float(last)], state, full_gradients(parallel))
    return ("SILENT", "; ".join(different)) if different else ("equal", "")


def differences(
    reference: Reference, losses: Sequence[float], state: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> list[str]:
    """What differs from one process: losses, parameters and buffers, gradients."""
    found = [
        f"loss of step {number + 1} is {loss:.6g}, not {expected:.6g}"
        for number, (loss, expected) in enumerate(zip(losses, reference.losses, strict=True))
        if not abs(loss - expected) <= RELATIVE * abs(expected)
    ]
    largest = max((float(one.abs().max()) for one in reference.gradients.values()), default=0.0)
    return [
        *found,
        *_off("parameters", state, reference.parameters, 0.0),
        *_off("gradients", gradients, reference.gradients, NOISE * largest),
    ]


def _off(what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], noise: float) -> Iterable[str]:
    missing = [name for name in expected if name not in tensors and (what == "parameters" or expected[name].any())]
    if missing:
        yield f"{what}: no {', '.join(missing)}"
    errors = {
        name: float((tensors[name] - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-12)
        for name, wanted in expected.items()
        if name in tensors and not (tensors[name] - wanted).abs().max() <= RELATIVE * wanted.abs().max() + noise
    }
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        yield f"{what}: {len(errors)} of {len(expected)} tensors differ, {worst} by {errors[worst]:.2g} of its largest"


def check_cases(cases: int, first: int, record: Path | None, seconds: float) -> list[Result]:
    """Check ``cases`` models under a plan of every kind; those of the record are not run again."""
    known = recorded(record)
    wanted = [(seed, kind) for seed in range(first, first + cases) for kind in KINDS]
    pool, start, results = WorkerPool(), time.monotonic(), []
    todo = len([key for key in wanted if key not in known])
    for number, (seed, kind) in enumerate(key for key in wanted if key not in known):
        result = check_case(pool, seed, kind, seconds)
        known[seed, kind] = result
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        left = (time.monotonic() - start) / (number + 1) * (todo - number - 1)
        print(f"{number + 1}/{todo}, {left / 60:.0f} min left; {seed} {kind}: {result.verdict}", flush=True)
    pool.close()
    results = [known[key] for key in wanted]
    print(table(results))
    return results


def recorded(record: Path | None) -> dict[tuple[int, str], Result]:
    """Results of an earlier run; a last line that was torn is left out."""
    lines = record.read_text().splitlines(keepends=True) if record is not None and record.exists() else []
    results = [Result(**json.loads(line)) for line in lines if line.endswith("\n")]
    return {(result.seed, result.kind): result for result in results}


def table(results: Sequence[Result]) -> str:
    """How many cases have which verdict, and how to run again those that fail."""
    lines = [f"{'plan':10} ranks " + " ".join(f"{verdict:>8}" for verdict in VERDICTS)]
    for kind in KINDS:
        for world in sorted({result.world for result in results}):
            counts = Counter(one.verdict for one in results if (one.kind, one.world) == (kind, world))
            lines.append(f"{kind:10} {world:5} " + " ".join(f"{counts[verdict]:8}" for verdict in VERDICTS))
    for result in sorted(results, key=lambda one: VERDICTS.index(one.verdict)):
        if result.verdict not in ("equal", "refused"):
            lines.append(f"{result.verdict}: --cases 1 --first-seed {result.seed}  ({result.kind}; {result.model})")
            lines.append(f"    {result.plan}")
            lines.append(f"    {(result.message.strip().splitlines() or [''])[-1][:300]}")
    return "\n".join(lines)
