"""Whether a plan trains like one process: a small model under a small plan of the same kind, run for real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.launched import ForkedServer
from galvatron_lite.verify.numbers.shrink import Recipe, TooLargeError, shrink
from galvatron_lite.verify.numbers.train import GRACE, HANGS, Result
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource

NAME = "numbers"
TIMEOUT = 300.0  # seconds for the reference, and for the ranks
_MOST = 12  # differences that are listed
_HANGING: Result = {"error": HANGS}


def check_numbers(
    source: ModelSource, plan: Plan, training: ForkedServer, processes: int | None = None, timeout: float = TIMEOUT
) -> Check:
    """Train a small model under a small plan on gloo processes, and hold loss, gradients and weights against one."""
    try:
        recipe = shrink(source, plan, processes)
    except TooLargeError as error:
        return Check(NAME, Verdict.SKIPPED, f"{error} Nothing was run.")
    try:
        return _judged(recipe, training.ask((recipe, timeout), timeout + 4 * GRACE))
    except TimeoutError:
        return _broken(dict.fromkeys(range(recipe.plan.devices), _HANGING), recipe.plan.devices, recipe.changes)


def _judged(recipe: Recipe, ranks: Mapping[int, Result]) -> Check:
    details, first = recipe.changes, ranks[0]
    if alone := first.get("alone"):
        text = f"The small model does not train in one process either: {alone} Nothing was compared."
        return Check(NAME, Verdict.SKIPPED, text, (*details, *_trace(first)))
    failed = {rank: result for rank, result in ranks.items() if "error" in result}
    if first.get("draws"):
        text = "The model draws random numbers that dropout does not explain: two runs of it differ."
        return Check(NAME, Verdict.SKIPPED, f"{text} Nothing was compared.", details)
    if failed:
        return _broken(failed, len(ranks), details)
    wrong = {rank: lines for rank, result in ranks.items() if (lines := result["wrong"])}
    if wrong or first["missing"]:
        return _different(wrong, first["missing"], details)
    lost = f" Not kept small: {', '.join(recipe.lost)}." if recipe.lost else ""
    processes = f"{len(ranks)} gloo process{'es' * (len(ranks) > 1)}"
    text = f"Loss, gradients and updated weights of a shrunken plan on {processes} equal those of one process.{lost}"
    return Check(NAME, Verdict.PASSED, text, details)


def _broken(failed: Mapping[int, Result], world: int, details: Sequence[str]) -> Check:
    """Ranks that raised, or never came to an end."""
    raised = {rank: result for rank, result in failed.items() if result["error"] != HANGS}
    rank, first = next(iter((raised or failed).items()))
    if raised:
        text = f"Rank {rank} of {world} of the shrunken plan fails: {first['error']}"
    else:
        ranks = ", ".join(map(str, failed))
        text = f"The shrunken plan hangs: rank{'s' * (len(failed) > 1)} {ranks} of {world} did not come to an end."
    return Check(NAME, Verdict.FAILED, text, (*details, *_trace(first)))


def _trace(result: Result) -> list[str]:
    return str(result.get("trace", "")).splitlines()[-_MOST:]


def _different(wrong: Mapping[int, Sequence[str]], missing: Sequence[str], details: Sequence[str]) -> Check:
    """What differs from one process, each line with the ranks that found it."""
    lines = [*dict.fromkeys(line for some in wrong.values() for line in some)]
    by_rank = [f"{line} (rank {', '.join(str(rank) for rank in wrong if line in wrong[rank])})" for line in lines]
    kinds = list(Counter(line.split(":")[0].split(" is ")[0] for line in lines))
    what = ", ".join(kinds[:4]) or missing[0]
    where = f"on rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}" if wrong else "on any rank"
    text = f"The shrunken plan does not train like one process: {what} differ {where}."
    more = [f"... and {len(lines) - _MOST} more"] * (len(lines) > _MOST)
    return Check(NAME, Verdict.FAILED, text, (*missing, *by_rank[:_MOST], *more, *details))
