"""Default plans of models by name against dry runs of them, a line each; see ``scripts/verify_defaults``."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

from galvatron_lite.api import plan
from galvatron_lite.api_plans import verify_plan
from galvatron_lite.cost.step import device_memory
from galvatron_lite.errors import GalvatronError
from galvatron_lite.verify.schema import Verdict, Verification

ROOT = Path(__file__).resolve().parent.parent


def verified(model: str, gpus: int, options: argparse.Namespace) -> dict[str, Any]:
    """The worst difference of a peak, in shares of the prediction, and the checks that did not pass."""
    begun = time.process_time()
    try:
        chosen = plan(model=model, cluster=options.cluster, gpus=gpus, mem=options.mem, batch=options.batch * gpus)
        found: Verification = verify_plan(chosen, checks="dry")
    except GalvatronError as error:
        return {"error": str(error)[:200]}
    predicted = device_memory(chosen)
    off = [run.peak.tensors / max(predicted[run.stage].tensors, 1) - 1 for run in found.roles]
    wrong = {one.name: [one.verdict.value, one.said] for one in found.checks if one.verdict is not Verdict.PASSED}
    worst = {"above": round(max(off), 4), "below": round(min(off), 4)} if off else {}
    return {"seconds": round(time.process_time() - begun, 1), **worst, "wrong": wrong}


def main() -> None:
    models = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=models, choices=models, metavar="NAME")
    parser.add_argument("--gpus", nargs="+", type=int, default=[4, 16, 64, 256])
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--mem", default="80GB")
    parser.add_argument("--batch", type=int, default=4, help="samples a GPU")
    parser.add_argument("--record", type=Path, help="a file of results: a run that is started again goes on from it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = set[str]()
    if options.record is not None and options.record.exists():
        known = {json.loads(line)["plan"] for line in options.record.read_text().splitlines()}
    for model in options.models:
        for gpus in options.gpus:
            name = f"{model} on {gpus} {options.cluster}, {options.mem}, {options.batch} samples each"
            if name not in known:
                line = json.dumps({"plan": name, **verified(model, gpus, options)})
                print(line, flush=True)
                if options.record is not None:
                    with options.record.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
