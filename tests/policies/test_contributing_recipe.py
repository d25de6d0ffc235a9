"""The recipe in CONTRIBUTING.md works as it is written there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from helpers.table import TableDrafter, draft
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

RECIPE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = RECIPE.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    line = re.search(r'`"(\w+)": "([\w.]+):(\w+)"`', text)
    assert code
    assert line
    name, module, _ = line.groups()
    made = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, made)
    exec(compile(code[1], str(RECIPE), "exec"), made.__dict__)
    monkeypatch.setitem(registry.POLICIES, name, f"{module}:{line[3]}")


@pytest.mark.usefixtures("recipe")
def test_the_policy_of_the_recipe() -> None:
    policy = registry.policy("confident", least="0.4")
    tree, _, passes = draft(policy, TableDrafter([[0.0, 0.9, 0.1], [0.0, 0.3, 0.7], [0.0, 0.6, 0.4]]))
    assert tree.tokens.tolist() == [0, 1, 2, 1]  # .9, .63, .378: below .4, and the end
    assert passes == 3
    target = Target(tiny())
    how = {"max_new_tokens": 20, "temperature": 0.7, "seed": 0}
    wanted = Engine(target, LMDrafter(), registry.policy("none")).generate(prompt(), **how)
    got = Engine(target, LMDrafter(), policy).generate(prompt(), **how)
    assert got.token_ids == wanted.token_ids


def test_the_plan_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host and in fixed buffers: the beam of two ends when its next level sums to less than 0.8."""
    code = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)[1]
    made = types.ModuleType("likely_beam")
    monkeypatch.setitem(sys.modules, "likely_beam", made)
    exec(compile(code, str(RECIPE), "exec"), made.__dict__)
    policy = made.LikelyBeam(k=2, least=0.8)
    _, keep, passes = draft(policy, TableDrafter([[0.0, 0.9, 0.1], [0.0, 0.3, 0.5], [0.0, 0.6, 0.4]]))
    assert (passes, len(keep)) == (2, 7)  # 0.9 + 0.1, then 0.45 + 0.27 of the next level
    target = Target(tiny())
    engines = [Engine(target, LMDrafter(), policy, gpu_options=GpuOptions(graphs)) for graphs in (False, True)]
    texts = [each.generate(prompt(), max_new_tokens=20).token_ids for each in engines]
    assert texts[0] == texts[1] and engines[1].fallback == ""
