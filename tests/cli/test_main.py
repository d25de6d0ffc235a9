"""The command line as a whole: errors, `--help`, `--version`, closed pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import refused, windfall
from windfall import __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "No such command 'nonsense'."),
        ("--nonsense", "No such option: --nonsense"),
        ("generate --nonsense", "No such option: --nonsense"),
        ("generate --temperature", "Option '--temperature' requires an argument."),
        ("bench show", "Missing argument 'folder'."),
        ("bench run", "Missing option '--out'."),
        ("bench nonsense", "No such command 'nonsense'."),
        ("generate abc --max-new-tokens 1.5", "--max-new-tokens takes a whole number, not '1.5'"),
        ("generate abc --seed=", "--seed takes a whole number, not ''"),
        ("tune --temperature warm", "--temperature takes a number, not 'warm'"),
        ("tune --temperature -0.5", "--temperature must be at least 0, not -0.5"),
        ("bench speed --rounds 0", "--rounds must be at least 1, not 0"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(arguments: str, message: str) -> None:
    assert refused(*arguments.split()).startswith(message)


@pytest.mark.parametrize("group", ["", "bench", "train"])
def test_a_group_without_a_command_prints_its_help(group: str) -> None:
    assert "Usage:" in windfall(*group.split()).output


def test_help_says_what_fast_may_change() -> None:
    shown = " ".join(re.sub(r"[│\n]", " ", windfall("generate", "--help").stdout).split())
    assert "--fast" in shown and "--exact" not in shown  # the default needs no option
    assert "so the text may differ from plain decoding's" in shown


def test_messages_are_not_markup(folder: Path) -> None:
    assert "'[/red]'" in refused("generate", "abc", "--policy", "[/red]")


def test_bugs_are_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("windfall.engine.loading.load", broken)
    with pytest.raises(ValueError, match="a bug"):
        windfall("generate", "abc", "--target", folder)


def test_version() -> None:
    assert windfall("--version").stdout == f"windfall {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, windfall.cli\ntry: windfall.cli.main()\n"
    code += "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_closed_pipe_ends_a_command_without_a_message() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "windfall.cli", "bench", "suites"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "windfall.cli", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "windfall: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


COMPLETIONS = {
    "windfall gen": {"generate"},
    "windfall generate --policy be": {"beam"},
    "windfall generate --drafter h": {"head", "hydra"},
    "windfall chat --preset eagle-": {"eagle-1", "eagle-2", "eagle-3"},
    "windfall policies med": {"medusa"},
}


def test_the_shell_completes_names_without_torch() -> None:
    code = f"""
import contextlib, os, sys
from windfall.cli import main
sys.argv = ["windfall"]
for line in {list(COMPLETIONS)}:
    os.environ |= {{"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}}
    with contextlib.suppress(SystemExit):
        main()
    print(";")
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    environment = os.environ | {"_WINDFALL_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [{*part.split()} for part in done.stdout.split(";")[:-1]]
    assert dict(zip(COMPLETIONS, found, strict=True)) == COMPLETIONS


def test_completion_can_be_installed() -> None:
    assert {"--install-completion", "--show-completion"} <= {*re.findall(r"--[a-z-]+", windfall("--help").stdout)}
