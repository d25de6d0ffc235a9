"""Known kinds of heads that windfall does not read are refused by their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers import LAYERS, WIDTH, put
from random_heads import random_head
from tiny import tiny
from unread_heads import FILES, layout
from windfall import loading
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.heads.fitting import fit
from windfall.heads.formats import write
from windfall.heads.kinds import recognise
from windfall.heads.loading import find_head
from windfall.heads.unread import UNREAD
from windfall.records import InputError
from windfall.target import Target


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.title)
def test_each_is_refused_by_its_name(case: Any, tmp_path: Path) -> None:
    put(tmp_path, *layout(case))
    for ask in (loading.as_drafter, recognise, lambda folder: FeatureHeadDrafter(model=folder).attach(target())):
        with pytest.raises(InputError) as refused:
            ask(tmp_path)
        line = str(refused.value)
        assert line.startswith(f"'{tmp_path}' is a {case.name} drafter, which windfall does not read; it would need ")
        assert "\n" not in line and len(line) - len(str(tmp_path)) < 240


def test_every_kind_has_such_a_folder() -> None:
    assert {case.name for case in FILES} == {kind.name for kind in UNREAD}


def target() -> Target:
    return Target(tiny(num_hidden_layers=LAYERS))


def test_quantised_heads(tmp_path: Path) -> None:
    write(fit(random_head(), target()), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["midlayer.mlp.up_proj.weight"] = held["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    held["midlayer.mlp.up_proj.weight_scale"] = torch.ones(1)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"is a quantised eagle3 head .*; give the head in bfloat16, float16 or float32"
    ):
        find_head(tmp_path, target())


def test_a_whole_model_with_mtp_layers_drafts_as_a_model(tmp_path: Path) -> None:
    tiny(num_hidden_layers=1).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "mtp.fc.weight": torch.ones(WIDTH, 2 * WIDTH)}, tmp_path / "model.safetensors")
    assert isinstance(loading.as_drafter(tmp_path), LMDrafter)
    with pytest.raises(InputError, match="is a MTP drafter, which windfall does not read"):
        FeatureHeadDrafter(model=tmp_path).attach(target())
