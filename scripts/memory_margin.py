"""How far measured peak memory is above predictions, as the share of a budget that plans keep free.

Estimated profiles: of each family of published runs the 80 % quantile of measured over predicted peaks, of these the
median, so that no family counts for more than another. Measured profiles: the 80 % quantile over the plans of
``scripts/accuracy`` (the table in docs/accuracy.md).
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.files import read_data, write_data
from galvatron_lite.validate.predict import validate_runs
from galvatron_lite.validate.rows import read_runs

ROOT = Path(__file__).resolve().parent.parent
CONSTANTS = ROOT / "configs" / "calibration" / "stacks.json"
QUANTILE = 0.8


def estimated() -> float:
    """Of published runs."""
    runs = [run for run in read_runs(ROOT / "profiles" / "published" / "runs.jsonl") if run.peak_mem_gb]
    ratios = defaultdict[str, list[float]](list)
    for one in validate_runs(runs, load_calibration()):
        if one.memory:
            ratios[one.run.family].append(1.0 / one.memory)
    for family, own in sorted(ratios.items()):
        print(f"{family}: {len(own)} runs, {np.quantile(own, QUANTILE):.3f}")
    return float(np.median([np.quantile(own, QUANTILE) for own in ratios.values()]))


def measured() -> float:
    """Of the table that ``scripts/accuracy`` prints."""
    rows = re.findall(r"([\d.]+) MiB \| ([\d.]+) MiB", (ROOT / "docs" / "accuracy.md").read_text())
    return float(np.quantile([float(peak) / float(predicted) for predicted, peak in rows], QUANTILE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="note it in configs/calibration/stacks.json")
    told = {"memory_estimated": estimated(), "memory_measured": measured()}
    margins = {name: round(max(1.0 - 1.0 / ratio, 0.0), 3) for name, ratio in told.items()}
    print(margins)
    if parser.parse_args().write:
        known = dict(read_data(CONSTANTS))
        write_data(CONSTANTS, known | {"expected_error": known["expected_error"] | margins})


if __name__ == "__main__":
    main()
