"""Links, counts and code of the documentation that other tests do not check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import windfall
from helpers.cli import character_tokenizer
from helpers.tiny import tiny
from windfall import registry
from windfall.engine.gpu.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text("utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text("utf-8")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", word).replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if link.startswith("http"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            broken.append(link)
    assert not broken


def table(title: str) -> list[list[str]]:
    """The cells of a table of docs/models.md."""
    (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", MODELS, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()[2:]]


def test_the_readme_has_the_counts_of_the_code_and_of_the_models() -> None:
    assert f"[all {len(registry.POLICIES)} policies]" in README
    assert f"{len(table('Equal'))} causal-LM architectures" in README
    assert f"{len(table('Refused'))} are refused" in README


def test_the_page_of_models_counts_its_rows() -> None:
    ways = [way for _, _, way, _ in table("Equal")]
    for name in ("fused", "windfall's attention", "mask", "host loop"):
        assert f"**{name}** ({sum(way.startswith(name) for way in ways)})" in MODELS


def test_the_page_of_models_has_the_fused_families() -> None:
    assert {kind for _, kind, way, _ in table("Equal") if way == "fused"} == set(FAMILIES)


def test_the_policies_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-a-policy.md").read_text("utf-8")
    _, budget = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "half.py").write_text(budget)
    model, prompts = (tiny(), character_tokenizer()), ["one", "another"]

    def tokens(policy: str) -> list[list[int]]:
        with windfall.load(model, drafter="self", policy=policy) as engine:
            return [answer.token_ids for answer in engine.generate_batch(prompts, max_new_tokens=8)]

    assert tokens(f"{tmp_path}/half.py:HalfChains") == tokens("none")
