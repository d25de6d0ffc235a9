"""Known kinds of heads that windfall does not read are refused by their own names."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import block_layouts, block_peers
from helpers.peers import LAYERS, LAYOUTS, VARIANTS, WIDTH, put
from helpers.random_heads import random_head
from helpers.tiny import tiny
from helpers.unsupported_heads import FILES, layout
from windfall.core.types import InputError
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine import loading
from windfall.heads.fitting import fit
from windfall.heads.formats import write
from windfall.heads.kinds import recognise
from windfall.heads.loading import find_head
from windfall.heads.unsupported import UNSUPPORTED
from windfall.model.target import Target

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.title)
def test_each_is_refused_by_its_name(case: Any, tmp_path: Path) -> None:
    put(tmp_path, *layout(case))
    for ask in (loading.as_drafter, recognise, lambda folder: FeatureHeadDrafter(model=folder).attach(target())):
        with pytest.raises(InputError) as refused:
            ask(tmp_path)
        line = str(refused.value)
        assert line.startswith(f"'{tmp_path}' is a head of kind {case.name}, which windfall does not read: it")
        assert "\n" not in line and len(line) - len(str(tmp_path)) < 240


def test_every_kind_has_such_a_folder() -> None:
    assert {case.name for case in FILES} == {kind.name for kind in UNSUPPORTED}


def target() -> Target:
    return Target(tiny(num_hidden_layers=LAYERS))


def test_quantised_heads(tmp_path: Path) -> None:
    write(fit(random_head(), target()), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["midlayer.mlp.up_proj.weight"] = held["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    held["midlayer.mlp.up_proj.weight_scale"] = torch.ones(1)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="head of kind eagle3 that windfall does not read: its weights are quantised"):
        find_head(tmp_path, target())


def test_a_whole_model_with_mtp_layers_drafts_as_a_model(tmp_path: Path) -> None:
    tiny(num_hidden_layers=1).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "mtp.fc.weight": torch.ones(WIDTH, 2 * WIDTH)}, tmp_path / "model.safetensors")
    assert isinstance(loading.as_drafter(tmp_path), LMDrafter)
    with pytest.raises(InputError, match="is a head of kind MTP, which windfall does not read"):
        FeatureHeadDrafter(model=tmp_path).attach(target())


def test_the_committed_table_is_up_to_date() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "heads_table.py"))
    page = (ROOT / "docs" / "heads.md").read_text("utf-8")
    made = page.partition(table["BEGIN"])[2].partition(table["END"])[0].splitlines()
    assert [line for line in made if "HEAD" in line] == table["refusal_rows"]()
    named = [(layout.project, layout.kind) for layout in LAYOUTS]
    named += [("speculators 0.9.0", f"EAGLE-3: {variant}") for variant in VARIANTS]
    named += [(layout.project, layout.kind) for layout in block_layouts.LAYOUTS]
    named += [("speculators 0.9.0", variant) for variant in block_peers.VARIANTS]
    assert [tuple(line.split(" | ")[:2]) for line in made if line.count(" | ") == 3][1:] == [
        (f"| {project}", kind) for project, kind in named
    ]
