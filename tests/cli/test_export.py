"""`windfall export`: a light head becomes a folder that other engines read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.cli import folder as folder
from helpers.cli import refused, windfall
from helpers.random_heads import random_head
from windfall.heads.formats import read, write

pytestmark = pytest.mark.filterwarnings("ignore::windfall.core.errors.HeadWarning")  # random heads agree with nothing
FIRST_LAYERS = (0, 1, 2)


@pytest.fixture
def light(tmp_path: Path) -> Path:
    write(random_head(taps=FIRST_LAYERS), tmp_path / "light", light=True)
    return tmp_path / "light"


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_an_exported_head_has_matrices_of_its_target(folder: Path, light: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    done = windfall("export", light, "--target", folder, "--out", out, "--format", format)
    assert done.exit_code == 0 and "a head of kind eagle3 that drafts 61 tokens is in" in done.stderr
    found, own = read(out), read(light).state_dict()
    assert found.config.taps == FIRST_LAYERS
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in own.items())
    written, target = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, of_target in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        assert torch.equal(written[f"{name}.weight"], target[f"{of_target}.weight"].bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "light"], "--out is a new folder, and 'light' exists; choose another name"),
        (["--out", "new", "--format", "eagle"], "a head of kind eagle3 cannot be written as 'eagle'; choose from"),
        (["--out", "new", "--format", "nosuch"], "a head of kind eagle3 cannot be written as 'nosuch'; choose from"),
        (["--out", "light/config.json/new"], "cannot write to 'light/config.json/new': Not a directory"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    folder: Path, light: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(light.parent)
    monkeypatch.delattr("windfall.engine.loading.as_target")  # no model is loaded
    before = sorted(light.parent.rglob("*"))
    done = windfall("export", light, "--target", folder, *options)
    assert done.exit_code == 2 and message in done.stderr.replace("\n", " ")
    assert sorted(light.parent.rglob("*")) == before


def test_an_unknown_format_of_the_embedded_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("windfall.engine.loading.as_target")
    said = refused("export", "--out", tmp_path / "new", "--format", "nosuch")
    assert said.startswith("there is no format 'nosuch'; choose from ") and "eagle3, speculators, vllm" in said
