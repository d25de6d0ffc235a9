"""The Dockerfile: what it refers to exists, and its commands work in a new folder."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.deploy import DEPLOY, ROOT, dockerfile, serve_options
from windfall import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = {"ARG", "FROM", "WORKDIR", "ENV", "RUN", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
OPT_IN = "RUN_DOCKERFILE"  # environment variable


def values(name: str) -> list[str]:
    return [each.value for each in dockerfile() if each.name == name]


def copied() -> list[tuple[list[str], str]]:
    return [(each.words[:-1], each.words[-1]) for each in dockerfile() if each.name == "COPY"]


def test_all_instructions_are_known_to_these_tests() -> None:
    assert {each.name for each in dockerfile()} == KNOWN


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    sources = {source for own, _ in copied() for source in own}
    assert ignored[0] == "*" and {line[1:] for line in ignored if line.startswith("!")} == sources
    for source in sources:
        assert (ROOT / source).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "src"}
    assert needed <= sources and not any(fnmatch.fnmatch("src", line) for line in ignored[1:])


def test_the_extra_the_port_and_the_options_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    named = [found for run in values("RUN") for found in re.findall(r'"\.\[([\w,]+)\]"', run)]
    extras = {name for each in named for name in each.split(",")}
    assert extras == {"serve", "grammar"} and extras <= {*project["project"]["optional-dependencies"]}
    command = next(each.words for each in dockerfile() if each.name == "ENTRYPOINT")
    assert command[:2] == [".venv/bin/windfall", "serve"]
    assert [word for word in command if word.startswith("--") and word not in serve_options()] == []
    port = str(serve_options()["--port"].default)
    assert values("EXPOSE") == [port] and f":{port}/health" in values("HEALTHCHECK")[0]


def test_caches_are_in_the_folder_that_every_user_can_write() -> None:
    (folder,) = values("WORKDIR")
    caches = [value.partition("=")[2] for value in values("ENV") if "/" in value]
    assert len(caches) == 3 and all(each.startswith(f"{folder}/cache/") for each in caches)
    assert any("mkdir -m 0777 cache" in run for run in values("RUN")) and int(values("USER")[0]) > 0


@pytest.mark.skipif(not os.environ.get(OPT_IN), reason=f"installs torch, which takes minutes; {OPT_IN}=1 runs it")
def test_every_command_works_in_a_new_folder(tmp_path: Path) -> None:
    """As Docker would: instruction by instruction, with the folder in the place of WORKDIR."""
    (folder,) = values("WORKDIR")
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME") or name.startswith("PIP_")}
    environment = {**kept, "HF_HUB_OFFLINE": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for name, value in dockerfile():
        if name in ("ARG", "ENV"):
            variable, _, default = value.partition("=")
            default = default.replace(folder, str(tmp_path))
            environment[variable] = os.environ.get(variable, default) if name == "ARG" else default
        elif name == "COPY":
            *sources, target = value.split()
            for source in sources:
                place, origin = tmp_path / target, ROOT / source
                if origin.is_dir():
                    shutil.copytree(origin, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
                else:
                    shutil.copy(origin, place / source)
        elif name == "RUN":
            run("/bin/sh", "-c", value)
    entry = next(each.words for each in dockerfile() if each.name == "ENTRYPOINT")
    assert run(entry[0], "--version") == f"windfall {__version__}\n"
    assert "--log-format" in run(*entry[:2], "--help")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o777 and not (tmp_path / "src").exists()
    health = next(each.words for each in dockerfile() if each.name == "HEALTHCHECK")
    failed = subprocess.run(health, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert failed.returncode == 1 and "Connection refused" in failed.stderr  # nothing listens
