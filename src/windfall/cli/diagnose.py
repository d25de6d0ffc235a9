"""`windfall diagnose`: a drafter's accuracy and calibration by rank, and which nodes of its trees are accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from windfall.bench.tasks import read_file
from windfall.cli.declare import argument, json_option, option, plot_option
from windfall.cli.options import ModelOptions, PolicyOptions, SamplingOptions
from windfall.cli.session import with_seed
from windfall.core.errors import InputError
from windfall.core.wording import counted
from windfall.prompts.samples import SAMPLES
from windfall.render import console
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.bench.inspect.diagnosis import Diagnosis

DEFAULT_POLICY = "beam"
MAX_SHOWN_RANKS = 10  # in a table


def diagnose(
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    prompts: list[str] | None = argument(None, "Prompts. Default: six built-in prompts."),
    file: Path | None = option(None, "JSONL file of prompts; only the first turn of each is used.", "--prompts"),
    raw: bool = option(False, "Do not apply the chat template."),
    children: int = option(256, "Use the probabilities of this many likeliest tokens; others count as 0.", min=1),
    plot: Path | None = plot_option("all results"),
    json: bool = json_option(),
) -> None:
    """Measure a drafter as the papers do: accuracy and calibration by rank, and acceptance of tree nodes."""
    from windfall.bench.inspect import diagnosis
    from windfall.render import plots

    plots.check(plot)
    texts, keywords = _read(prompts or [], file, raw), with_seed(sampling.keywords(), announce=not json)
    if policy.policy is None and policy.preset is None:
        policy = replace(policy, policy=DEFAULT_POLICY)
    engine = model.load(policy.make())
    drafter = model.drafter_name(engine.target)
    encoded = [engine.encode(text, plain) for text, plain in texts]
    with console.progress("Decoding") as progress:
        found = diagnosis.diagnose(engine, encoded, engine.params(**keywords), children, progress)
    if plot is not None:
        from windfall.bench.inspect.diagnosis_plot import plot_diagnosis

        plot_diagnosis(found, f"{drafter} for {engine.target.name}, policy {policy.name}", plot)
    if json:
        about = {"target": engine.target.name, "drafter": drafter, "policy": policy.name}
        about |= {"prompts": len(encoded), "seed": keywords["seed"]}
        console.print_json({**about, **found.as_dict()}, indent=2)
    else:
        _show(found)


def _read(prompts: list[str], file: Path | None, raw: bool) -> list[tuple[str, bool]]:
    """The texts, and whether each is used without the chat template."""
    if prompts and file is not None:
        raise InputError("give prompts or --prompts, not both")
    if file is not None:
        return [(each.turns[0], raw or each.raw) for each in read_file(file)]
    return [(text, raw) for text in prompts or SAMPLES]


def _show(found: Diagnosis) -> None:
    trees = found.trees
    rows = [
        [f"{each.rank}", f"{each.contexts}"]
        + [f"{value:.3f}" for value in (each.accuracy, each.confidence, each.ece_paper, each.ece_guo)]
        for each in found.ranks
    ]
    columns = ["rank", "contexts", "accuracy", "q(target's)", "ECE (paper)", "ECE (Guo)"]
    _print_table("Accuracy of the drafter's next guess, by the rank of its guess before", columns, rows)
    shares = trees.rank_share()
    ranks = [*map(str, range(1, len(shares))), f"{len(shares)}+"]
    _print_table("Verified nodes by rank among siblings", ["rank", "nodes"], _share_rows(ranks, shares))
    for layer, words in ((False, "rank among siblings"), (True, "rank within the level")):
        title = f"Share of target passes (%) that accepted a node, by depth and {words}"
        _print_heat_map(title, trees.heat_map(layer, MAX_SHOWN_RANKS))
    lengths = _share_rows(map(str, trees.lengths), (cycles / trees.cycles for cycles in trees.lengths.values()))
    _print_table("Target passes by number of accepted draft tokens", ["tokens", "passes"], lengths)
    passes = counted(trees.cycles, "target pass", "target passes")
    console.stdout().print(f"{passes}, tau {trees.tau:.2f}, delta {trees.delta:.2f}")


def _share_rows(names: Iterable[str], shares: Iterable[float]) -> list[list[str]]:
    return [[name, f"{100 * share:.1f}%"] for name, share in zip(names, shares, strict=True)]


def _print_heat_map(title: str, cells: list[list[float]]) -> None:
    width = max(map(len, cells), default=0)
    ranks = [f"{rank}+" if rank == MAX_SHOWN_RANKS else f"{rank}" for rank in range(1, width + 1)]
    rows = [[str(depth), *(f"{100 * value:.0f}" for value in row)] for depth, row in enumerate(cells, 1)]
    _print_table(title, ["depth", *ranks], rows)


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    console.stdout().print(Wrapped(Text(title, style="bold")))
    table = Figures(columns, names="right")
    for row in rows:
        table.add(*row)
    console.stdout().print(table)
