from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from galvatron_lite.cli import app, main
from tests.processor_time import least

SURFACE = {
    "plan": {
        "--mem", "--batch", "--gpus", "--cluster", "--model", "--profile", "--seq", "--precision", "--certify",
        "--json", "-o", "--output", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab", "--gated",
        "--tied", "--arch", "--experts", "--topk", "--best", "--fix", "--forbid", "--schedule", "--backend", "--for",
        "--best-batch", "--margin", "--max-batch", "--fewest", "--step", "--rate", "--tokens", "--price",
        "--tokens-total", "--tolerance",
        "--samples-total", "--steps", "--within", "--pareto", "--memory-step", "--plot", "--image",
        "--mode", "--allow-delay", "--phases", "--calibration", "-v", "--verbose", "--trainable", "--freeze",
    },
    "profile": {
        "--cluster", "--gpus", "--estimate", "--seq", "--precision", "--max-samples", "--name", "--folder", "--json",
        "--calibration", "--trainable", "--freeze", "--check",
    },
    "profile-transfer": {"--to", "--gpus", "--precision", "-o", "--output", "--folder", "--json"},
    "profile-import": {
        "--from", "--hardware", "--nodes", "--gpus-per-node", "--layers", "--hidden", "--seq", "--engine",
        "--device-memory", "-o", "--output", "--folder", "--json",
    },
    "export": {"--to", "--for", "-o", "--output", "--strict", "--json"},
    "evaluate": {
        "--for",
        "--profile", "--model", "--cluster", "--gpus", "--batch", "--seq", "--precision", "--mem", "--json", "-o",
        "--output", "--calibration", "-v", "--verbose", "--trainable", "--freeze",
    },
    "explain": {
        "--profile", "--model", "--cluster", "--gpus", "--seq", "--precision", "--mem", "--no-what-if", "--seconds",
        "--fix", "--forbid", "--schedule", "--allow-delay", "--json", "--trainable", "--freeze",
    },
    "compare": {
        "--profile", "--model", "--cluster", "--gpus", "--seq", "--precision", "--mem", "--json", "--trainable",
        "--freeze",
    },
    "report": {
        "-o", "--output", "--trace", "--run", "--search", "--profile", "--model", "--cluster", "--gpus", "--batch",
        "--seq", "--precision", "--mem", "--json", "--trainable", "--freeze",
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
    "verify": {
        "--model", "--seq", "--checks", "--profile", "--processes", "--steps", "--calibration", "--json", "--trainable",
        "--freeze",
    },
    "calibrate": {"-o", "--output", "--calibration", "--json"},
    "diagnose": {"--profile", "--plan", "--update", "--json"},
    "validate": {
        "--by", "--family", "--quality", "--calibration", "--worst", "--plot", "--json", "--skipped", "--transfer",
        "--scale-up",
    },
}  # fmt: skip


def test_the_commands_and_their_options_are_pinned() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        for name, command in commands.items()
    }
    assert found == SURFACE


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --bach 8", "galvatron plan: No such option: --bach. Did you mean --batch?"),
        ("plna", "galvatron: No such command 'plna'. Did you mean 'plan'?"),
        ("plan --model lama3-8b --cluster h100 --gpus 8", "'lama3-8b' is unknown. Did you mean llama3-8b?"),
        ("plan --model gpt2 --cluster h10 --gpus 8", "--cluster: 'h10' is unknown. Did you mean h100?"),
        (
            "plan --model gpt2 --cluster h100 --fix layers.3.recmpute=full",
            "'recmpute' is unknown.",
        ),
        ("plan --model gpt2 --cluster h100 --for megtron", "--for: 'megtron' is unknown. Did you mean megatron?"),
        ("plan --mem", "Option '--mem' requires an argument."),
        ("export plan.yaml", "Missing option '--for' / '--to'."),
    ],
)
def test_wrong_words_are_named_in_two_lines_with_the_nearest(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["galvatron", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert len(error) < 2 * 100


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_names(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(words: str) -> str:
        monkeypatch.setenv("_GALVATRON_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        return CliRunner().invoke(app, [], prog_name="galvatron").output

    assert "report" in completed("galvatron rep")
    assert "--best-batch" in completed("galvatron plan --best-b")
    assert "llama3-8b" in completed("galvatron plan --model llama3")
    assert "h100" in completed("galvatron plan --cluster h1")
    assert "megatron" in completed("galvatron plan --for me")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: shell)
    done = CliRunner().invoke(app, ["--install-completion"], prog_name="galvatron")
    assert done.exit_code == 0
    assert any("galvatron" in path.name and "COMPLETE" in path.read_text() for path in tmp_path.rglob("*galvatron*"))


@pytest.mark.parametrize("columns", [60, 100])
def test_a_terminal_is_filled_and_a_pipe_is_plain(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan", "--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "8", "--batch", "64"]
    assert "\x1b" not in CliRunner().invoke(app, words).output
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in CliRunner().invoke(app, words).output
    monkeypatch.setenv("NO_COLOR", "1")
    _, *lines = CliRunner().invoke(app, words).output.splitlines()
    assert "\x1b" not in "".join(lines)
    assert columns - 20 < max(map(len, lines)) <= columns


PLAN = ["plan", "--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "2"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], PLAN, [*PLAN, "--json"]])
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "galvatron_lite", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_an_error_keeps_its_status_where_the_pipe_is_open() -> None:
    command = [sys.executable, "-m", "galvatron_lite", *PLAN, "--mem", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("galvatron: --mem")


def test_any_encoding_is_written_to() -> None:
    command = [sys.executable, "-m", "galvatron_lite", *PLAN]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage" in done.stdout
