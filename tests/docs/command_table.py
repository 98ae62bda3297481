"""What is to be known of the pages' commands to run them: which are not whole, which run otherwise, and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instead:
    """Another command, and why."""

    words: str
    why: str


MENTIONS = frozenset(
    {
        "galvatron plan", "galvatron validate", "galvatron profile", "galvatron report", "galvatron oracle",
        "galvatron evaluate", "galvatron launch", "galvatron diagnose", "galvatron verify", "galvatron explain",
        "galvatron compare", "galvatron plan --phases",
        "galvatron adapt replay", "galvatron plan --mode inference", "galvatron plan --backend deepspeed",
        "galvatron validate --transfer", "galvatron validate --scale-up", "galvatron profile transfer",
        "galvatron calibrate", "galvatron profile import",
        "galvatron launch --plan", "galvatron plan export", "galvatron plan --model",
        "galvatron plan --backend any", "galvatron profile SCRIPT:FACTORY",
        "galvatron export PLAN --to deepspeed|megatron|torchtitan|accelerate|nemo",
        "galvatron plan --model llama2-7b --cluster a100-80gb … --mem 10GB",
    }
)  # fmt: skip
"""Names of commands, with an option at most, in running text: nothing that a reader types."""

ELSEWHERE = {
    "docs/branches.md": "tests/docs/test_pages_run.py",
    "docs/oracle.md": "tests/oracle/test_docs.py",
    "docs/explain.md": "tests/docs/test_pages_run.py",
    "docs/watch.md": "tests/docs/test_pages_run.py",
    "docs/tutorial.md": "tests/docs/test_pages_run.py",
    "docs/for-users-of.md": "tests/docs/test_pages_run.py",
}
"""Pages that a test of their own runs, output included."""

RUN_BY = {"galvatron verify plan.yaml --model train.py:make_model": "tests/cli/test_verify.py"}
"""Commands that a test runs with a model and a plan of its own."""

_HERE = "the processes of tests have less memory, or other profiles"
_PHASES = "galvatron plan --phases configs/phases/sequence-ramp.yaml --model llama2-7b --cluster a100-80gb --gpus 32"
INSTEAD = {
    "galvatron plan --mem 40GB -o plan.yaml": Instead("galvatron plan --mem 1GB -o plan.yaml", _HERE),
    "galvatron plan --mem 70GB": Instead("galvatron plan --mem 2GB", _HERE),
    "galvatron plan --backend deepspeed --mem 40GB -o plan.yaml": Instead(
        "galvatron plan --backend deepspeed --mem 1GB -o plan.yaml", _HERE
    ),
    "galvatron report plan.yaml -o report.html --search 5": Instead(
        "galvatron report plan.yaml -o report.html --search 0.5", "it may use all of the time"
    ),
    "galvatron report plan.yaml -o report.html": Instead(
        "galvatron report plan.yaml -o report.html --search 0.5", "it may use 30 s"
    ),
    "galvatron plan --model deepseek-v3 --cluster h100 --gpus 2048 --mem 80GB": Instead(
        "galvatron plan --model deepseek-v3 --cluster h100 --gpus 2048 --mem 80GB --fix pp=16 --fix tp=1",
        "the free search takes 20 s",
    ),
    "galvatron plan --model qwen3-235b-a22b --cluster h100 --gpus 256 --mem 80GB": Instead(
        "galvatron plan --model qwen3-235b-a22b --cluster h100 --gpus 256 --mem 80GB --fix pp=8 --fix tp=1",
        "the free search takes 7 s; that of a mixture is run in tests/search",
    ),
    "galvatron plan --model gpt-oss-120b --cluster h100 --gpus 64 --mem 80GB": Instead(
        "galvatron plan --model gpt-oss-120b --cluster h100 --gpus 64 --mem 80GB --fix pp=1",
        "the free search takes 4 s",
    ),
    f"{_PHASES} -o phased.yaml": Instead(f"{_PHASES} --fix pp=1 -o phased.yaml", "the free search takes 9 s"),
    "galvatron plan --model llama2-7b --cluster a100-40gb --gpus 8 --fewest": Instead(
        "galvatron plan --model gpt2 --cluster a100-40gb --gpus 8 --fewest", "it takes 8 s of the larger model"
    ),
    "galvatron evaluate plan.yaml --profile PROFILE": Instead(
        "galvatron evaluate plan.yaml --profile profiles/t4/Model.yaml", "a placeholder"
    ),
    "galvatron evaluate plan.yaml --profile PROFILE -o priced.yaml": Instead(
        "galvatron evaluate plan.yaml --model llama2-7b --cluster a100-80gb --gpus 8 -o priced.yaml", "a placeholder"
    ),
    "galvatron profile transfer a100.yaml --to h100 -o h100.yaml": Instead(
        "galvatron profile transfer profiles/t4/Model.yaml --to h100 -o h100.yaml", "the profile that is there"
    ),
    "galvatron calibrate mine.jsonl -o constants": Instead(
        "galvatron calibrate four.jsonl -o constants", "the row of the page is one"
    ),
    "galvatron plan import --from hetu FILE": Instead(
        "galvatron plan import --from hetu theirs.json --profile llama.yaml -o ours.yaml", "a placeholder"
    ),
    "galvatron plan export --to hetu PLAN -o FILE": Instead(
        "galvatron plan export --to hetu ours.yaml -o back.json", "placeholders"
    ),
}
"""Commands that cannot run as they stand, or would take long, and what is run for them."""

MADE = "galvatron profile train.py:make_model"
"""What has made the folder that all are run in (``tests/docs/place.py``)."""

SAYS = {
    "plan --phases": r"warm-up +2K", "plan import": r"Written to ours\.yaml", "plan export": r"back\.json",
    "plan": r"[\dKM] (samples|tokens)/s|GPU-hours|none is beaten",
    "profile import": r"\d[KMBT] parameters in \d+ layers", "profile transfer": r"Written to h100\.yaml",
    "profile": r"\d[KMBT]? parameters in \d+ layers(.|\n)*Written to profiles/",
    "validate": r'family +rows|"families": \{', "evaluate": r"fits: (yes|no)", "export": r"--|\{|ritten",
    "calibrate": r"error on runs left out(.|\n)*Written to constants",
    "adapt": r"step \d+", "launch": r"-m torch\.distributed\.run|srun --nodes=|-m galvatron_lite\.launch\.ray_job",
    "report": r"Written to \S+\.(html|json)", "checkpoint": r"step \d+, \d+ process|whole, \d+ files|\.safetensors",
    "oracle": r"strategy|reproduced|paradl|data",
}  # fmt: skip
"""What every such command prints, as a regular expression; the first that a command begins with counts."""
