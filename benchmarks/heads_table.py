"""How heads of other projects are read: built with random weights, loaded, and compared with what they draft there.

    python benchmarks/heads_table.py [--write]

Prints the tables, or puts them into docs/heads.md. Heads of speculators are compared with its own code where it is
installed (`pip install --no-deps speculators==0.9.0 loguru`), all others with a computation written from the
definition of their layout (`tests/helpers/peers.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import block_layouts, block_peers, peers, unsupported_heads  # noqa: E402
from windfall.checkpoints.quiet_libs import quiet  # noqa: E402
from windfall.core.types import InputError  # noqa: E402
from windfall.heads.formats import read, write  # noqa: E402
from windfall.heads.kinds import recognise  # noqa: E402
from windfall.heads.unsupported import UNSUPPORTED, refuse_quantised  # noqa: E402

PAGE = ROOT / "docs" / "heads.md"
BEGIN, END = "<!-- made by benchmarks/heads_table.py -->", "<!-- end of what benchmarks/heads_table.py makes -->"


def read_heads() -> Iterator[tuple[str, str, str, str]]:
    """Project, kind, what it is compared with, and the largest difference of what is drafted."""
    for layout in peers.LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            head = read(layout.put(Path(folder)), peers.target().decoder.config)
            found = peers.difference(layout.ours(head), peers.by_definition(layout))
        yield layout.project, layout.kind, "definition", f"{found:.0e}"
    for variant in peers.VARIANTS:
        yield "speculators 0.9.0", f"EAGLE-3: {variant}", "its own code", _against_speculators(variant)
    for block in block_layouts.LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            made = read(block.put(Path(folder)), peers.target().decoder.config)
        found = block_peers.difference(block_peers.ours(made), block_layouts.by_definition(block))
        yield block.project, block.kind, "definition", f"{found:.0e}"
    for variant in block_peers.VARIANTS:
        yield "speculators 0.9.0", variant, "its own code", _block_against_speculators(variant)


def _block_against_speculators(variant: str) -> str:
    if not peers.has_speculators():
        return "not installed"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = block_peers.make(variant, Path(folder) / "target")
        model.save_pretrained(Path(folder) / "theirs")
        head = read(Path(folder) / "theirs")
    return f"{block_peers.difference(block_peers.ours(head), block_peers.theirs(model)):.0e}"


def _against_speculators(variant: str) -> str:
    """The larger of the differences as read here, and as read there after being written here."""
    if not peers.has_speculators():
        return "not installed"
    from windfall.engine.loading import as_target
    from windfall.heads.fitting import fit

    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(made)
        model = peers.make_speculator(variant, folder / "target")
        model.save_pretrained(folder / "theirs")
        head, target = read(folder / "theirs"), as_target(folder / "target", device="cpu", dtype="float32")
        theirs = peers.speculator_levels(model, len(head.config.taps))
        here = peers.difference(peers.drafted(head), theirs)
        write(fit(head, target), folder / "ours", "speculators", dtype=torch.float32, target=target)
        back = peers.load_speculator(folder / "ours")
        there = peers.difference(peers.speculator_levels(back, len(head.config.taps)), theirs)
    return f"{max(here, there):.0e}"


def refusals() -> Iterator[tuple[str, str]]:
    """Kind, and the line that refuses it."""
    cases = {case.name: case for case in reversed(unsupported_heads.FILES)}
    for kind in UNSUPPORTED:
        with tempfile.TemporaryDirectory() as folder:
            peers.put(Path(folder), *unsupported_heads.layout(cases[kind.name]))
            try:
                recognise(Path(folder), "HEAD")
            except InputError as refused:
                yield kind.name, str(refused)
    yield "fp8 and other quantised heads", str(refuse_quantised("eagle3", "HEAD"))


def refusal_rows() -> list[str]:
    return [f"| {kind} | `{line}` |" for kind, line in refusals()]


def tables() -> str:
    rows = [f"| {' | '.join(row)} |" for row in read_heads()]
    read_part = ["| project | head | compared with | largest difference |", "|---|---|---|---|", *rows]
    return "\n".join([*read_part, "", "| not read | what windfall says |", "|---|---|", *refusal_rows()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/heads.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with quiet():
        made = tables()
    if not options.write:
        print(made)
        return
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
