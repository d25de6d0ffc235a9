"""The systemd unit: systemd accepts it, and its command exists."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.deploy import DEPLOY, serve_options
from windfall.cli.serve import KEY_VARIABLE

UNIT = DEPLOY / "windfall@.service"


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(name, []).append(value)
    return found


def test_the_command_has_known_options_and_time_to_end() -> None:
    (command,) = settings()["ExecStart"]
    program, name, *options = command.split()
    assert program.endswith("/bin/windfall") and name == "serve"
    assert [word for word in options if word.startswith("--") and word not in serve_options()] == []
    drain = int(options[options.index("--drain-seconds") + 1])
    assert int(settings()["TimeoutStopSec"][0]) > drain and settings()["KillSignal"] == ["SIGTERM"]


def test_the_variables_are_those_of_windfall() -> None:
    text = UNIT.read_text("utf-8")
    assert KEY_VARIABLE in text and "WINDFALL_CACHE=/var/cache/windfall " in text
    assert settings()["CacheDirectory"] == ["windfall"]
    assert "key" not in " ".join(settings()["ExecStart"])  # other users can see it


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = settings()["ExecStart"][0].split()[0]
    text = UNIT.read_text("utf-8")
    for changed, complains in ((text, False), (text.replace("Restart=on-failure", "Restart=sometimes"), True)):
        unit = tmp_path / f"windfall-{complains}@.service"
        unit.write_text(changed.replace(program, sys.executable))
        command = ["systemd-analyze", "verify", "--man=no", str(unit).replace("@", "@8001")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        own = [line for line in (done.stdout + done.stderr).splitlines() if "windfall-" in line]
        assert bool(own) == complains, own
