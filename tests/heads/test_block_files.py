"""Files of block heads: windfall's own come back as written, those of other projects compute what they do there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import block_peers, peers
from helpers.block_layouts import LAYOUTS, Layout, by_definition, some_config
from helpers.block_peers import VARIANTS
from helpers.random_heads import BLOCKS, random_block
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import InputError
from windfall.drafters.block import BlockDrafter
from windfall.engine import loading
from windfall.engine.engine import Engine
from windfall.heads.block import BlockHead
from windfall.heads.formats import read, write
from windfall.heads.kinds import recognise
from windfall.model.target import Target

CLOSE = 1e-5
needs_speculators = pytest.mark.skipif(not peers.has_speculators(), reason=peers.MISSING)


# ---- windfall's own


@pytest.mark.parametrize("name", BLOCKS)
def test_heads_come_back_as_written(name: str, tmp_path: Path) -> None:
    head = random_block(name)
    write(head, tmp_path, dtype=torch.float32)
    assert recognise(tmp_path) == "block"
    back = read(tmp_path, tiny().config)
    assert isinstance(back, BlockHead)
    names = [field for field in back.config.__dataclass_fields__ if field not in ("layer", "flags")]
    assert [getattr(back.config, each) for each in names] == [getattr(head.config, each) for each in names]
    assert {flag for flag, on in back.config.flags.items() if on} == {f for f, on in head.config.flags.items() if on}
    ours, theirs = head.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (head.draft_tokens is None) == (back.draft_tokens is None)
    if head.draft_tokens is not None:
        assert torch.equal(head.draft_tokens, back.draft_tokens)
    assert back.config.layer.qk_norm == head.config.layer.qk_norm


def test_a_folder_is_a_drafter(tmp_path: Path) -> None:
    target = Target(tiny(), name="TARGET")
    write(random_block(), tmp_path, target=target)
    assert json.loads((tmp_path / "config.json").read_text())["windfall_target"]["name"] == "TARGET"
    drafter = loading.as_drafter(tmp_path)
    assert isinstance(drafter, BlockDrafter)
    drafter.attach(target)
    with pytest.raises(InputError, match="a block head, which the drafter block takes, not head"):
        registry.drafter("head", model=tmp_path).attach(target)
    with pytest.raises(InputError, match="a head of kind block cannot be written as 'eagle3'"):
        write(random_block(), tmp_path, "eagle3")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"pair_score": "best"}, "pair score of kind 'best'; windfall knows none, projected"),
    ({"block_size": 0}, "says block_size: 0, which must be a whole number above 0"),
    ({"mask_token_id": "x"}, "says mask_token_id: 'x'"),
    ({"mask_token_id": 99}, "has the mask token 99, and its target only 61 tokens"),
    ({"conv_taps": -1}, "says conv_taps: -1"),
    ({"conv_taps": 2, "conv_group": 7}, "which do not fit its width"),
    ({"target_states": [1, "2"]}, "target_states: .* must be a list of whole numbers"),
    ({"target_states": [1, 2, 3, 4, 5]}, "an fc.weight with 96 columns for 5 states"),
    ({"windows": [3]}, "windows: .* for each of its 2 layers"),
    ({"pair_rank": 9}, "pair.before.weight as .8, 32. instead of .9, 32."),
    ({"pair_score": "none"}, "has pair.after.weight, .*, which this kind of head does not use"),
    ({"softcap": -2}, "says softcap: -2, which must be a number above 0"),
]


@pytest.mark.parametrize(("change", "about"), CHANGES)
def test_damaged_files_are_refused_in_one_line(change: dict[str, Any], about: str, tmp_path: Path) -> None:
    write(random_block(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=about) as refused:
        read(tmp_path, tiny().config)
    assert "\n" not in str(refused.value)


# ---- other projects


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verifier") / "target"


@needs_speculators
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_speculators(variant: str, tmp_path: Path, place: Path) -> None:
    model = block_peers.make(variant, place)
    model.save_pretrained(tmp_path)
    assert recognise(tmp_path) == "block"
    head = read(tmp_path)
    assert head.config.first_row == (not model.config.sample_from_anchor) and head.config.mask_token == 5
    assert block_peers.difference(block_peers.ours(head), block_peers.theirs(model)) < CLOSE
    write(head, tmp_path / "own", dtype=torch.float32)
    again = read(tmp_path / "own", peers.target().decoder.config)
    assert block_peers.difference(block_peers.ours(again), block_peers.ours(head)) == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.project}: {layout.kind}")
def test_layouts_by_their_definitions(layout: Layout, tmp_path: Path) -> None:
    layout.put(tmp_path)
    assert recognise(tmp_path) == "block"
    head = read(tmp_path, peers.target().decoder.config)
    assert head.config.taps == layout.taps and head.config.flag("predict_anchor") is layout.anchor
    assert block_peers.difference(block_peers.ours(head), by_definition(layout)) < CLOSE


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.project}: {layout.kind}")
def test_texts_with_public_heads_are_those_of_plain_decoding(layout: Layout, tmp_path: Path) -> None:
    target, drafter = peers.target(), loading.as_drafter(layout.put(tmp_path))
    for temperature in (0.0, 1.0):
        texts = [
            Engine(target, own, registry.policy(policy)).generate(
                prompt(), max_new_tokens=8, temperature=temperature, seed=3
            )
            for own, policy in ((drafter, "beam"), (registry.drafter("ngram"), "none"))
        ]
        assert texts[0].token_ids == texts[1].token_ids
        assert max(len(step.drafted) for step in texts[0].steps) > 3


PUBLIC_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"mask_token_id": None}, "says mask_token_id: None, which must be a token"),
    ({"target_layer_ids": "all"}, "says target_layer_ids: 'all', which must be a list of whole numbers"),
    ({"target_layer_ids": [0, 1, 2, 3, 4]}, "an fc.weight with 96 columns for 5 states"),
    ({"block_size": "8"}, "says block_size: '8', which must be a whole number above 0"),
    ({"final_logit_softcapping": "x"}, "says final_logit_softcapping: 'x'"),
    ({"mask_token_id": 61}, "has the mask token 61, and its target only 61 tokens"),
]


@pytest.mark.parametrize(("change", "about"), PUBLIC_CHANGES)
def test_public_files_with_odd_configs_are_refused(change: dict[str, Any], about: str, tmp_path: Path) -> None:
    Layout("z-lab", "DFlash", some_config(**change)).put(tmp_path)
    with pytest.raises(InputError, match=about) as refused:
        read(tmp_path, peers.target().decoder.config)
    assert "\n" not in str(refused.value)


def test_layers_are_spread_evenly_if_a_file_does_not_say_them(tmp_path: Path) -> None:
    layout = Layout("z-lab", "DFlash", some_config(target_layer_ids=None))
    layout.put(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "fc.weight": torch.ones(32, 2 * 32)}, tmp_path / "model.safetensors")
    assert read(tmp_path, peers.target().decoder.config).config.taps == (2, 6)  # layers 1 and 5 of 8
    with pytest.raises(InputError, match="says target_layer_ids: None"):
        read(tmp_path)


def test_a_convolution_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    LAYOUTS[4].put(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["layers.0.attention_conv.kernel_projection.weight"] = torch.ones(3, 32)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="a convolution of shapes"):
        read(tmp_path, peers.target().decoder.config)
