"""Heads as other projects write them draft here what they draft there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from helpers import peers
from windfall.engine.loading import as_target
from windfall.heads.fitting import fit
from windfall.heads.formats import Shape, read, read_checkpoint, write

CLOSE = 1e-4
needs_speculators = pytest.mark.skipif(not peers.has_speculators(), reason=peers.MISSING)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verifier") / "target"


@pytest.mark.parametrize("layout", peers.LAYOUTS, ids=lambda layout: f"{layout.project}: {layout.kind}")
def test_layouts_by_their_definitions(layout: peers.Layout, tmp_path: Path) -> None:
    head = read(layout.put(tmp_path), peers.target().decoder.config)
    assert peers.difference(layout.ours(head), peers.by_definition(layout)) < CLOSE
    write(head, tmp_path / "again", dtype=torch.float32)
    again = read(tmp_path / "again", peers.target().decoder.config)
    assert peers.difference(layout.ours(again), layout.ours(head)) < CLOSE


@needs_speculators
@pytest.mark.parametrize("variant", peers.VARIANTS)
def test_speculators_own_heads(variant: str, tmp_path: Path, place: Path) -> None:
    """Saved by its code and read by ours, then written by ours and loaded by its code."""
    model = peers.make_speculator(variant, place)
    model.save_pretrained(tmp_path / "theirs")
    head = read(tmp_path / "theirs")
    theirs = peers.speculator_levels(model, len(head.config.taps))
    assert peers.difference(peers.drafted(head), theirs) < CLOSE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' about the files
        target = as_target(place, device="cpu", dtype="float32")
        write(fit(head, target), tmp_path / "ours", "speculators", dtype=torch.float32, target=target)
        back = peers.load_speculator(tmp_path / "ours")
    assert peers.difference(peers.speculator_levels(back, len(head.config.taps)), theirs) < CLOSE
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size", peers.AUX):
        assert getattr(back.config, name) == getattr(model.config, name)


@needs_speculators
def test_a_speculators_file_has_a_single_reading(tmp_path: Path, place: Path) -> None:
    peers.make_speculator("qwen3", place).save_pretrained(tmp_path)
    assert len(read_checkpoint(tmp_path, "x", Shape.of(peers.target().decoder.config)).stated) == 1
