"""Print the section of CHANGELOG.md for the version of the package.

    python scripts/release_notes.py [--tag v0.2.0]

Fails if the section or its date is missing, or if the tag is not `v` and the version.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag that is being released")
    tag = parser.parse_args().tag
    if tag and tag != f"v{version()}":
        sys.exit(f"the tag is {tag}, but the version in src/windfall/__init__.py is {version()}")
    try:
        print(section((ROOT / "CHANGELOG.md").read_text("utf-8"), version()))
    except ValueError as error:
        sys.exit(str(error))


def version() -> str:
    """The version in windfall/__init__.py, read without importing the package."""
    source = (ROOT / "src" / "windfall" / "__init__.py").read_text("utf-8")
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)
    }
    return str(ast.literal_eval(assigned["__version__"]))


def section(changelog: str, wanted: str) -> str:
    """The text below the heading `## [VERSION] - DATE`, up to the next heading of that level or the links."""
    heading = rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d{{2}}-\d{{2}}\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section '## [{wanted}] - YYYY-MM-DD' with text")
    return found[1].strip()


if __name__ == "__main__":
    main()
