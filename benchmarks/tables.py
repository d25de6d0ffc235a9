"""Makes the tables of docs/performance.md and docs/performance-gpu.md from the files in benchmarks/results.

python benchmarks/tables.py [--check] [--take OUT] [--gpu h200]

A page has marked sections: `<!-- table: NAME -->`, what this script writes, and `<!-- end -->`. A section without
result files stays empty. --check writes nothing; the exit code is 1 if a page differs from its files. --take first
copies the files that `benchmarks/gpu.sh OUT …` has written to benchmarks/results/NAME-GPU.json. The pages show one GPU;
with the name of another one, the tables are printed instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table_renderers as renderers
from table_renderers import Body, Result, Results

ROOT = Path(__file__).resolve().parent.parent
GPU = "h200"  # of the pages
WIDTH = 120  # characters of a line of text
SECTION = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
BEGIN = "<!-- table: "
OVERVIEW, DETAILS = "docs/performance.md", "docs/performance-gpu.md"
STAGES = {  # of gpu.sh, whose results have other names
    "price": "exact-price",
    "price-8b": "exact-price-8b",
    "texts": "exact-texts",
    "texts-fp16": "exact-texts-fp16",
}


@dataclass(frozen=True)
class Section:
    """A part of a page. It is shown if one of its files exists."""

    page: str
    render: Callable[[Results], Body]
    files: tuple[str, ...]  # names of results
    extra: tuple[str, ...] = ()  # results that are shown together with the files, but not alone
    begin: str = ""  # heading and text before the table, where the page has none
    plot: str | None = None  # the result that docs/NAME-GPU.png shows


SECTIONS = {
    "exact-price": Section(OVERVIEW, renderers.exact_price, ("exact-price", "exact-price-8b")),
    "exact-texts": Section(
        OVERVIEW,
        renderers.exact_texts,
        ("exact-texts", "exact-texts-fp16", "batch-texts"),
        extra=("exact-price", "exact-price-8b"),
    ),
    "first-token": Section(OVERVIEW, renderers.first_token, ("first-token",), extra=("first-token-before",)),
    "throughput": Section(
        OVERVIEW,
        renderers.throughput,
        ("throughput",),
        begin="""### Many requests at once

Tokens/s of all requests together by the number of requests at once, prefill included ([windfall bench
throughput](benchmark.md#bench-throughput)). Speed-ups are over `none` with the same number of requests.""",
        plot="throughput",
    ),
    "throughput-8b": Section(
        OVERVIEW,
        renderers.throughput,
        ("throughput-8b",),
        begin="""### Many requests at 8B cost

Tokens/s of all requests together by the number of requests at once, prefill included ([windfall bench
throughput](benchmark.md#bench-throughput)). The model is zero-padded to the layer dimensions of Llama-3.1-8B, a timing
proxy. Speed-ups are over `none` with the same number of requests.""",
        plot="throughput-8b",
    ),
    "one-request": Section(
        OVERVIEW,
        renderers.one_request,
        ("one-request",),
        begin="""### One request, before and after batches

Tokens/s of one request at a time, prefill included, before the engine had batches and now
(`benchmarks/one_request.py`).""",
    ),
    "host-requests": Section(
        OVERVIEW,
        renderers.host_requests,
        ("host-requests",),
        begin="""### Requests that need the host

Tokens/s of all requests together, if they share verify passes and if one runs after the other
(`benchmarks/host_requests.py`). The requests ask for log-probabilities, penalties, a JSON schema, or a policy that is
not the engine's. `plain` requests need none of this.""",
    ),
    "peers": Section(
        OVERVIEW,
        renderers.peers,
        ("peers", "peers-model"),
        begin="""### Other engines

Tokens/s of all requests together, on the same prompts and GPU (`benchmarks/peers.py`). The next request begins when one
ends; transformers' `generate` takes batches.""",
    ),
    "serve": Section(
        OVERVIEW,
        renderers.serve,
        ("serve", "serve-8b", "serve-cpu"),
        begin="""### A server under load

`windfall serve` with clients that send one request after another, beside the bare engine with the same number of
requests in flight (`benchmarks/serve_overhead.py`). The overhead is the share of the engine's tokens/s that the server
loses. Times are percentiles of the [load test](operations.md#load-test): to the first text (TTFT), and per token after
it (TPOT).""",
    ),
    "soak": Section(OVERVIEW, renderers.soak, ("soak", "soak-cpu", "soak-pages-cpu")),
    "draft-phase": Section(
        DETAILS,
        renderers.draft_phase,
        ("draft-phase", "draft-phase-8b"),
        begin="""### Draft passes of a cycle

Milliseconds of the draft passes of a beam, and of its verify pass over 60 rows (`benchmarks/draft_phase.py`). The
bundled head runs once for each level of the tree. A [block head](heads.md#block-heads) runs once, in the first pass;
the block heads of this table are untrained, so only their times count.""",
    ),
    "products": Section(DETAILS, renderers.products, ("products",)),
    "shapes": Section(DETAILS, renderers.shapes, ("shapes",)),
}
RESULTS = {name for section in SECTIONS.values() for name in (*section.files, *section.extra)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs from its files")
    parser.add_argument("--take", type=Path, metavar="OUT", help="first copy the files of gpu.sh from this folder")
    parser.add_argument("--gpu", default=GPU, help="the end of the names of result files")
    options = parser.parse_args()
    try:
        if options.take is not None:
            for file in take(options.take, options.gpu, ROOT):
                print(f"benchmarks/results/{file}")
        if options.gpu != GPU:
            print("\n\n".join(filter(None, (body(section, options.gpu, ROOT) for section in SECTIONS.values()))))
            sys.exit()
        differing = check(ROOT) if options.check else []
        if not options.check:
            write(ROOT)
    except ValueError as error:
        sys.exit(f"tables.py: {error}")
    for place in differing:
        print(f"{place} differs from benchmarks/results; run: python benchmarks/tables.py")
    sys.exit(bool(differing))


def check(root: Path) -> list[str]:
    """Sections and plots that differ from their files."""
    differing = []
    for page, text in pages(root).items():
        found = dict(SECTION.findall(text))
        differing += [f"{page}: section '{name}'" for name, inner in found.items() if inner != wanted(name, root)]
    return differing + [f"docs/{plot}" for plot, _ in old_plots(root)]


def write(root: Path) -> None:
    """Draw the plots, and rewrite the sections."""
    for plot, result in old_plots(root):
        draw(result, root / "docs" / plot)
    for page, text in pages(root).items():
        made = SECTION.sub(lambda part: f"{BEGIN}{part[1]} -->\n{wanted(part[1], root)}<!-- end -->", text)
        if made != text:
            (root / page).write_text(made, "utf-8")
            print(page)


def pages(root: Path) -> dict[str, str]:
    """The texts of the pages, which have each of their sections once."""
    texts = {}
    for page in dict.fromkeys(section.page for section in SECTIONS.values()):
        texts[page] = (root / page).read_text("utf-8")
        found = [name for name, _ in SECTION.findall(texts[page])]
        own = [name for name, section in SECTIONS.items() if section.page == page]
        if sorted(found) != sorted(own) or texts[page].count(BEGIN) != len(own):
            raise ValueError(f"{page} must have these sections, each once and with an end: {', '.join(own)}")
    return texts


def wanted(name: str, root: Path) -> str:
    """What a section of a page should have between its marks."""
    made = body(SECTIONS[name], GPU, root)
    return f"\n{made}\n\n" if made else ""


def body(section: Section, gpu: str, root: Path) -> str:
    """The Markdown of a section; empty if none of its files exists."""
    found = {name: read(name, gpu, root) for name in (*section.files, *section.extra)}
    found = {name: result for name, result in found.items() if result is not None}
    if not any(name in found for name in section.files):
        return ""
    try:
        lines, about = section.render(found)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        names = ", ".join(file_name(name, gpu) for name in found)
        raise ValueError(f"{names}: not in the format of its tool ({error!r})") from error
    source = renderers.sources({file_name(name, gpu): result for name, result in found.items()})
    paragraph = textwrap.fill(f"{about} {source}".strip(), WIDTH, break_long_words=False, break_on_hyphens=False)
    picture = ""
    if section.plot in found:
        plot = f"{section.plot}-{gpu}.png"
        picture = f"[![Tokens per second by the number of requests at once]({plot})]({plot})"
    return "\n\n".join(filter(None, (section.begin, picture, "\n".join(lines), paragraph)))


# ---- files


def file_name(result: str, gpu: str) -> str:
    return f"{result}.json" if result.endswith("-cpu") else f"{result}-{gpu}.json"


def read(name: str, gpu: str, root: Path) -> Result | None:
    """A result; None if it has not been measured."""
    file = root / "benchmarks" / "results" / file_name(name, gpu)
    return parsed(file) if file.exists() else None


def parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from error


def take(out: Path, gpu: str, root: Path) -> list[str]:
    """Copy the results of gpu.sh to benchmarks/results; returns their new names."""
    found = {STAGES.get(file.stem, file.stem): file for file in sorted(out.glob("*.json"))}
    found = {name: file for name, file in found.items() if name in RESULTS}
    if not found:
        raise ValueError(f"'{out}' has no results of benchmarks/gpu.sh")
    for file in found.values():
        if not measured_on(gpu, parsed(file)):
            raise ValueError(f"{file.name} was not measured on a GPU whose name has '{gpu}' in it")
    for name, file in found.items():
        (root / "benchmarks" / "results" / file_name(name, gpu)).write_bytes(file.read_bytes())
    return [file_name(name, gpu) for name in found]


def measured_on(gpu: str, result: Result) -> bool:
    """Whether a result names this GPU, spaces and capitals aside."""
    named = renderers.hardware({**result, **result.get("provenance", {})})
    return gpu.lower() in re.sub(r"[\W_]", "", named).lower()


def old_plots(root: Path) -> list[tuple[str, Result]]:
    """Plots that are missing or show another measurement, and their results. A plot has the date of its measurement."""
    found = []
    for name in filter(None, (section.plot for section in SECTIONS.values())):
        result, plot = read(name, GPU, root), f"{name}-{GPU}.png"
        file = root / "docs" / plot
        if result is not None and not (file.exists() and result["provenance"]["date"].encode() in file.read_bytes()):
            found.append((plot, result))
    return found


def draw(result: Result, file: Path) -> None:
    """Draw a result of `windfall bench throughput`; needs windfall[plot]."""
    from windfall.bench.throughput.plot import plot

    plot(result, file)
    print(f"docs/{file.name}")


if __name__ == "__main__":
    main()
