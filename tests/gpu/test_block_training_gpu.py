"""Training block heads on a CUDA device: FlexAttention against dense masks, with gradients, and whole trainings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.teaching import batch
from helpers.texts import write_texts
from helpers.tiny import tiny
from windfall.heads.block import BlockHead
from windfall.model.target import Target
from windfall.train.block_memory import Blocks, DenseBlocks, PackedBlocks, PaddedSizes, new_memory
from windfall.train.heads import HeadJob, train_head
from windfall.train.objectives import block, objective
from windfall.train.recipe import Recipe
from windfall.train.teacher import Teacher

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def wide(dtype: torch.dtype) -> Target:
    return Target(tiny(dtype=dtype, **WIDE).to(DEVICE))


@pytest.mark.parametrize("shape", [{}, {"bidirectional": True, "block": 5}, {"conv": 2, "pair": "selector"}])
def test_flex_attention_is_the_dense_mask(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In several batches of different shapes, loss and gradients."""
    target, method = wide(torch.float32), objective("block", share=1.0)
    torch.manual_seed(0)
    head = method.new_head(target, shape)
    teacher = Teacher(target.model, head.config.taps)
    config, sizes = head.config, PaddedSizes()
    for count, length in ((3, 40), (2, 70), (9, 150)):
        outputs, found = teacher.run(batch(count, length).to(torch.device(DEVICE))), []
        for memory in (DenseBlocks, partial(PackedBlocks, sizes=sizes)):
            monkeypatch.setattr(block, "new_memory", lambda config, blocks, _, memory=memory: memory(config, blocks))
            report = method.report(head, outputs, teacher, 0.0)
            found.append((report.loss, *torch.autograd.grad(report.loss, _trained(head))))
        for own, right in zip(*found, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-2, atol=1e-2 * float(right.abs().max()) + 1e-6)
    blocks = Blocks.where(outputs.batch.answered, torch.device(DEVICE))
    assert isinstance(new_memory(config, blocks, sizes), PackedBlocks)


def _trained(head: BlockHead) -> list[torch.Tensor]:
    """Parameters with a gradient although the pair score is 0."""
    return [p for name, p in head.named_parameters() if not name.startswith("pair.")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["kl", "coupled:0.5,lk:0.5"])
def test_a_training(dtype: torch.dtype, loss: str, tmp_path: Path) -> None:
    target = wide(dtype)
    texts = write_texts(tmp_path / "texts", tiny(**WIDE), count=12, length=60)
    job = HeadJob(texts, tmp_path / "out", method="block", loss=loss, shape={"block": 4, "layers": 2})
    recipe = Recipe(steps=40, batch_tokens=600, rate=5e-3, optimizer="muon", validate_every=20, save_minutes=0)
    events = list(train_head(job, recipe, target))
    first, last = (event.held_out for event in events if event.held_out)
    assert first is not None and last is not None and last["loss"] < first["loss"] and last["tv"][0] < first["tv"][0]
