"""The files that a release is made from agree with each other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from windfall import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.fixture(scope="module")
def release_notes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "scripts" / "release_notes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_has_one_source(release_notes: ModuleType) -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "windfall.__version__"}
    assert release_notes.version() == __version__


def test_the_version_is_printed_without_torch() -> None:
    code = "import sys, windfall.cli; print(windfall.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__} False\n"


def test_the_changelog_has_a_dated_section_and_a_link_for_each_version(release_notes: ModuleType) -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", CHANGELOG, re.MULTILINE)
    assert versions[0] == __version__
    for version in versions:
        assert release_notes.section(CHANGELOG, version)
        assert f"\n[{version}]: https://" in CHANGELOG


def test_the_release_notes_are_one_section(release_notes: ModuleType) -> None:
    newer = "## [1.1.0] - 2030-01-02\n\n### Fixed\n\n- B.\n\n"
    older = "## [1.0.0] - 2030-01-01\n\n- A.\n\n"
    text = f"## [Unreleased]\n\n{newer}{older}[1.0.0]: https://example.org\n"
    assert release_notes.section(text, "1.1.0") == "### Fixed\n\n- B."
    assert release_notes.section(text, "1.0.0") == "- A."
    for absent in ("1.2.0", "Unreleased"):
        with pytest.raises(ValueError, match="has no section"):
            release_notes.section(text, absent)


def test_the_oldest_versions_in_ci_are_the_lower_bounds() -> None:
    lines = (ROOT / ".ci" / "oldest.txt").read_text("utf-8").splitlines()
    oldest = [Requirement(line) for line in lines if not line.startswith("#")]
    required = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    for constraint in oldest:
        bound = str(required[constraint.name].specifier).removeprefix(">=")
        assert str(constraint.specifier) == f"=={bound}.*"


def test_ci_runs_every_supported_python() -> None:
    marker = "Programming Language :: Python :: "
    supported = re.findall(rf"{marker}(3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    listed = re.search(r"python: \[(.*)\]", workflow)
    assert listed is not None
    assert re.findall(r"[\d.]+", listed[1]) == supported
