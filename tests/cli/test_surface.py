from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from galvatron_lite.cli import app
from tests.processor_time import least

SURFACE = {
    "plan": {
        "--mem", "--batch", "--gpus", "--cluster", "--model", "--profile", "--seq", "--precision", "--certify",
        "--json", "-o", "--output", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab", "--gated",
        "--tied", "--arch", "--experts", "--topk", "--best", "--fix", "--forbid", "--schedule", "--backend", "--for",
        "--best-batch", "--margin", "--max-batch", "--fewest", "--step", "--rate", "--tokens", "--price",
        "--tokens-total", "--tolerance",
        "--samples-total", "--steps", "--within", "--pareto", "--memory-step", "--plot", "--image",
        "--mode", "--allow-delay", "--phases", "-v", "--verbose",
    },
    "profile": {
        "--cluster", "--gpus", "--estimate", "--seq", "--precision", "--max-samples", "--name", "--folder", "--json",
    },
    "profile-import": {
        "--from", "--hardware", "--nodes", "--gpus-per-node", "--layers", "--hidden", "--seq", "--engine",
        "--device-memory", "-o", "--output", "--folder", "--json",
    },
    "export": {"--to", "--for", "-o", "--output", "--strict", "--json"},
    "evaluate": {
        "--for",
        "--profile", "--model", "--cluster", "--gpus", "--batch", "--seq", "--precision", "--mem", "--json", "-o",
        "--output", "-v", "--verbose",
    },
    "explain": {
        "--profile", "--model", "--cluster", "--gpus", "--seq", "--precision", "--mem", "--no-what-if", "--seconds",
        "--fix", "--forbid", "--schedule", "--allow-delay", "--json",
    },
    "compare": {"--profile", "--model", "--cluster", "--gpus", "--seq", "--precision", "--mem", "--json"},
    "report": {
        "-o", "--output", "--trace", "--run", "--search", "--profile", "--model", "--cluster", "--gpus", "--batch",
        "--seq", "--precision", "--mem", "--json",
    },
    "oracle": {
        "--cluster", "--gpus", "--formulas", "--strategies", "--strategy", "--batch", "--samples", "--group",
        "--segments", "--precision", "--image", "--network", "--quirk", "--contention", "--check", "--json", "--plot",
    },
    "launch": {
        "--plan", "--gpus", "--per-node", "--hostfile", "--through", "--srun", "--port", "--max-restarts", "--check",
        "--timeout", "--dry-run",
    },
    "adapt": set(),
    "checkpoint": set(),
    "verify": {"--model", "--seq", "--checks", "--profile", "--processes", "--steps", "--json"},
    "diagnose": {"--profile", "--plan", "--update", "--json"},
    "validate": {"--by", "--family", "--quality", "--calibration", "--worst", "--plot", "--json", "--skipped"},
}  # fmt: skip


def test_the_commands_and_their_options_are_pinned() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        for name, command in commands.items()
    }
    assert found == SURFACE


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["plan"],
        ["profile"],
        ["profile", "import"],
        ["plan", "import"],
        ["plan", "export"],
        ["checkpoint", "show"],
        ["checkpoint", "export"],
        ["evaluate"],
        ["explain"],
        ["compare"],
        ["validate"],
        ["oracle"],
        ["adapt", "replay"],
    ],
)
def test_every_command_explains_itself(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom galvatron_lite.cli import main\nsys.argv = ['galvatron', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'networkx', 'pulp', 'pydantic'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_is_quick() -> None:
    """By the processor's time, whatever else the machine does."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "galvatron_lite", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert least(seconds, 0.5) < 0.5
