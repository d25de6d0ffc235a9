"""`windfall diagnose`: how right and how sure a drafter is, and which nodes of its trees are used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from windfall.cli.options import Json, ModelOptions, PolicyOptions, SamplingOptions, takes_records
from windfall.cli.session import with_seed
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.bench.inspect.diagnosis import Diagnosis
    from windfall.engine.engine import Engine

DEFAULT_POLICY = "beam"
SHOWN = 10  # ranks in a table


@takes_records
def diagnose(
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: a few of our own.")] = None,
    file: Annotated[
        Path | None, typer.Option("--prompts", help='JSONL file with "turns" (the first is taken) or "text".')
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")] = False,
    children: Annotated[
        int,
        typer.Option("--children", help="Tokens asked for after each guess; rarer ones count as 0.", min=1),
    ] = 256,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it all into this PNG, SVG or PDF file.")] = None,
    json: Json = False,
) -> None:
    """Measure a drafter as the papers do: accuracy and calibration by rank, ranks and acceptance of tree nodes."""
    from windfall.bench.inspect import diagnosis
    from windfall.render import plots

    if plot is not None:
        plots.check(plot)
    texts, keywords = _read(prompts or [], file, raw), with_seed(sampling.keywords(), tell=not json)
    if policy.policy is None and policy.preset is None:
        policy.policy = DEFAULT_POLICY
    engine = model.load(policy.make())
    encoded = [engine.encode(text, plain) for text, plain in texts]
    with console.progress("Decoding") as progress:
        found = diagnosis.diagnose(engine, encoded, engine.params(**keywords), children, progress)
    if plot is not None:
        from windfall.bench.inspect.diagnosis_plot import plot_diagnosis

        plot_diagnosis(found, f"{model.drafter_name} for {engine.target.name}, policy {policy.name}", plot)
    if json:
        about = {**_names(engine, model, policy), "prompts": len(encoded), "seed": keywords["seed"]}
        console.print_json({**about, **found.as_dict()}, indent=2)
    else:
        _show(found)


def _read(prompts: list[str], file: Path | None, raw: bool) -> list[tuple[str, bool]]:
    """Texts, and whether each goes without the chat template."""
    from windfall.bench.tasks import read_file
    from windfall.core.types import InputError
    from windfall.prompts.samples import SAMPLES

    if prompts and file is not None:
        raise InputError("give prompts or --prompts, not both")
    if file is not None:
        return [(each.turns[0], raw or each.raw) for each in read_file(file)]
    return [(text, raw) for text in prompts or SAMPLES]


def _names(engine: Engine, model: ModelOptions, policy: PolicyOptions) -> dict[str, str]:
    return {"target": engine.target.name, "drafter": model.drafter_name, "policy": policy.name}


def _show(found: Diagnosis) -> None:
    trees = found.trees
    rows = [
        [f"{each.rank}", f"{each.contexts}"]
        + [f"{value:.3f}" for value in (each.accuracy, each.confidence, each.ece_paper, each.ece_guo)]
        for each in found.ranks
    ]
    columns = ["rank", "contexts", "accuracy", "q(target's)", "ECE (paper)", "ECE (Guo)"]
    _table("The drafter's guess after its own guess of a rank", columns, rows)
    shares = trees.rank_share()
    ranks = [*map(str, range(1, len(shares))), f"{len(shares)}+"]
    _table("Verified nodes by rank among siblings", ["rank", "nodes"], _shares(ranks, shares))
    for layer, words in ((False, "rank among siblings"), (True, "rank within the level")):
        _heat(f"Share of target passes (%) that accepted a node, by depth and {words}", trees.heat_map(layer, SHOWN))
    lengths = _shares(map(str, trees.lengths), (cycles / trees.cycles for cycles in trees.lengths.values()))
    _table("Target passes by accepted drafted tokens", ["tokens", "passes"], lengths)
    passes = counted(trees.cycles, "target pass", "target passes")
    console.stdout().print(f"{passes}, tau {trees.tau:.2f}, delta {trees.delta:.2f}")


def _shares(names: Iterable[str], shares: Iterable[float]) -> list[list[str]]:
    return [[name, f"{100 * share:.1f}%"] for name, share in zip(names, shares, strict=True)]


def _heat(title: str, cells: list[list[float]]) -> None:
    width = max(map(len, cells), default=0)
    ranks = [f"{rank}+" if rank == SHOWN else f"{rank}" for rank in range(1, width + 1)]
    rows = [[str(depth), *(f"{100 * value:.0f}" for value in row)] for depth, row in enumerate(cells, 1)]
    _table(title, ["depth", *ranks], rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    console.stdout().print(Wrapped(Text(title, style="bold")))
    table = Figures(columns, names="right")
    for row in rows:
        table.add(*row)
    console.stdout().print(table)
