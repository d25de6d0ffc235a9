"""Heads that see a few positions only: by their own files, by an option, or in texts longer than they were made for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.cli import character_tokenizer
from helpers.gpu import paths
from helpers.heads import check_children, started
from helpers.random_heads import WINDOWED, random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.cli import app
from windfall.core.errors import HeadWarning, InputError
from windfall.core.types import GpuOptions, Grow
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine, Generation
from windfall.heads import formats
from windfall.heads.base import FeatureHead
from windfall.heads.fitting import fit
from windfall.model.target import Target

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention"]}
quietly = pytest.mark.filterwarnings("ignore::windfall.core.errors.HeadWarning")


# ---- drafting


def drafted(head: FeatureHead, target: Target, committed: list[int], **options: Any) -> Any:
    """A tree of two passes after a prompt that is longer than the window."""
    drafter = FeatureHeadDrafter(model=head, **options)
    drafter.attach(target)
    drafter.start([committed], target.prefill([committed], drafter.taps), [None])
    trees = drafter.begin([committed[-1]])
    for nodes in ([0], [1, 2], [4, 5]):
        trees = drafter.expand(trees, [Grow(torch.tensor(nodes), 3)])
    return trees[0]


@pytest.mark.parametrize("given", [{}, {"window": 3}, {"window": 100}], ids=["positions", "narrow", "wide"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-deep", "eagle3-window"])
def test_past_its_positions_a_head_goes_on_in_a_window(kind: str, given: dict[str, int]) -> None:
    """As if each layer had been made with that window; one that has a smaller one keeps it."""
    model, committed = tiny(), prompt(60)
    tree = drafted(random_head(kind, positions=16), Target(model), committed, **given)
    head = random_head(kind, positions=16)
    window = given.get("window", 16)
    own = head.config.windows or (None,) * head.config.layer.num_hidden_layers
    head.config = replace(head.config, windows=tuple(min(each or window, window) for each in own))
    assert len(tree) == 16
    check_children(fit(head, Target(model)), model, committed, tree)


def test_a_head_with_enough_positions_gets_no_window() -> None:
    head = random_head(positions=256)
    assert started(head, Target(tiny()), [prompt(5)]).head.config.windows == ()


def generated(head: FeatureHead, gpu_options: GpuOptions) -> Generation:
    target = Target(tiny(dtype=torch.float64, max_position_embeddings=1024))
    policy = registry.policy("beam", depth=4, k=3, nodes=12)
    engine = Engine(target, FeatureHeadDrafter(model=head), policy, gpu_options=gpu_options)
    found = engine.generate(prompt(60), max_new_tokens=12, eos=())
    assert not gpu_options.graphs or engine.gpu_runner is not None
    return found


@quietly
@pytest.mark.parametrize("kind", [*WINDOWED, "eagle3"])
def test_fixed_buffers_have_the_same_windows(kind: str) -> None:
    """In the fused form of EAGLE-3 heads of one layer and in the general one, for plans and for host policies."""
    wanted = generated(random_head(kind, positions=32), GpuOptions(False))
    for plans in (True, False):
        found = generated(random_head(kind, positions=32), GpuOptions(True, plans=plans))
        assert found.token_ids == wanted.token_ids
        for one, other in zip(wanted.steps[:5], found.steps[:5], strict=True):
            assert paths(one.drafted) == paths(other.drafted)
            assert len(one.drafted) > 1


# ---- texts longer than the head's positions


def counting_pair() -> tuple[Any, FeatureHead]:
    """A target in whose texts token t is always followed by t + 1, and a head that knows this from the token alone."""
    model, head = tiny(max_position_embeddings=512), random_head("eagle", positions=24, flags={})
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *head.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # the residual stream is the embedding
            elif "norm" in name:
                parameter.fill_(1)
        head.fc.weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 32)], 1))
        vectors = torch.nn.functional.normalize(torch.randn(61, 32, generator=torch.Generator().manual_seed(5)), dim=1)
        model.get_input_embeddings().weight.copy_(vectors)
        model.get_output_embeddings().weight.copy_(20 * vectors.roll(1, 0))
    return model, head


@quietly
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 8}], ids=["positions", "option"])
def test_acceptance_does_not_fall_past_the_positions_of_a_head(graphs: bool, options: dict[str, int]) -> None:
    model, head = counting_pair()
    drafter = FeatureHeadDrafter(model=head, **options)
    engine = Engine(Target(model), drafter, registry.policy("chain", depth=4), gpu_options=GpuOptions(graphs))
    found = engine.generate([1, 2, 3], max_new_tokens=100, eos=())
    assert found.token_ids == [(4 + place) % 61 for place in range(100)]
    assert [len(step.tokens) for step in found.steps] == [5] * 20


# ---- warnings


def warned(record: Any) -> list[str]:
    return [str(each.message) for each in record if issubclass(each.category, HeadWarning)]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_limited_head_warns_once(graphs: bool, recwarn: pytest.WarningsRecorder) -> None:
    model, head = counting_pair()
    engine = Engine(
        Target(model), FeatureHeadDrafter(model=head), registry.policy("chain"), gpu_options=GpuOptions(graphs)
    )
    engine.generate([1, 2, 3], max_new_tokens=20)
    assert warned(recwarn) == []
    for _ in range(2):
        engine.generate([1, 2, 3], max_new_tokens=40)
    [told] = warned(recwarn)
    assert told.startswith("this head was made for 24 positions: in longer texts it sees the last 24 only")
    assert "window=N" in told


def test_a_requested_window_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model, head = counting_pair()
    engine = Engine(Target(model), FeatureHeadDrafter(model=head, window=9), registry.policy("chain"))
    engine.generate([1, 2, 3], max_new_tokens=40)
    narrow = random_head("eagle3-window", positions=24)
    Engine(Target(tiny()), FeatureHeadDrafter(model=narrow), registry.policy("chain")).generate(
        prompt(), max_new_tokens=40
    )
    assert warned(recwarn) == []


@pytest.mark.parametrize("graphs", [False, True])
def test_with_dynamic_rope_drafting_ends_with_a_warning(graphs: bool) -> None:
    model, head = counting_pair()
    head.config.layer.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = Target(model)
    engine = Engine(
        target, FeatureHeadDrafter(model=head), registry.policy("chain", depth=4), gpu_options=GpuOptions(graphs)
    )
    with pytest.warns(HeadWarning, match="made for 24 positions: in longer texts it stops drafting there"):
        found = engine.generate([1, 2, 3], max_new_tokens=60, eos=())
    assert found.token_ids == [(4 + place) % 61 for place in range(60)]
    accepted = [len(step.tokens) for step in found.steps]
    assert accepted[0] == 5 and accepted[-10:] == [1] * 10


def test_a_draft_model_with_a_shorter_context_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    drafter = LMDrafter(tiny(seed=1, max_position_embeddings=32))
    engine = Engine(Target(tiny()), drafter, registry.policy("chain"))
    for _ in range(2):
        engine.generate(prompt(), max_new_tokens=40)
    [told] = warned(recwarn)
    assert told.startswith("the drafter was made for texts of 32 tokens")


@quietly
def test_the_command_prints_the_warning_as_a_note(tmp_path: Path) -> None:
    model, head = counting_pair()
    model.save_pretrained(tmp_path / "target")
    character_tokenizer().save_pretrained(tmp_path / "target")
    formats.write(fit(head, Target(model)), tmp_path / "head")
    command = ["generate", "abc", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "head"), "--raw"]
    for more, said in (([], True), (["--drafter-set", "window=8"], False)):
        found = CliRunner().invoke(app, [*command, "--policy", "chain", "--max-new-tokens", "40", *more])
        assert found.exit_code == 0, found.output
        assert ("this head was made for 24 positions" in found.stderr.replace("\n", " ")) == said
        assert "Warning" not in found.stderr
    found = CliRunner().invoke(app, [*command, "--drafter-set", "window=0"])
    assert found.exit_code == 2 and "window must be at least 1" in found.stderr


# ---- files


def read(folder: Path, **changes: Any) -> FeatureHead:
    """A written head, after these changes to its configuration."""
    target = Target(tiny())
    head = fit(random_head(taps=(1, 2, 3)), target)
    formats.write(head, folder, "speculators" if "transformer_layer_config" in changes else "eagle3")
    config = json.loads((folder / "config.json").read_text())
    if nested := changes.pop("transformer_layer_config", None):
        config["transformer_layer_config"] |= nested
    (folder / "config.json").write_text(json.dumps(config | changes))
    found: FeatureHead = formats.read(folder, target.decoder.config)
    return found


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        (SLIDING, (6,)),
        ({**SLIDING, "use_sliding_window": True}, (6,)),
        ({**SLIDING, "layer_types": ["full_attention"]}, ()),
        ({**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, (6,)),  # a longer list, as its target's
        ({**SLIDING, "use_sliding_window": False}, ()),
        ({**SLIDING, "sliding_window": None}, ()),
        ({"sliding_window": 6}, ()),  # Llama's layers have none unless layer_types says so
        ({"sliding_window": 6, "use_sliding_window": True}, (6,)),
        ({"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 28}, ()),
    ],
)
def test_windows_are_read(tmp_path: Path, said: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(tmp_path / "one", **said).config.windows == windows
    assert read(tmp_path / "two", transformer_layer_config=said).config.windows == windows


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**SLIDING, "layer_types": ["chunked_attention"]}, "layer of type 'chunked_attention'; windfall knows"),
        ({**SLIDING, "layer_types": []}, "must name the attention of its 1 layers"),
        ({**SLIDING, "layer_types": "sliding_attention"}, "must name the attention of its 1 layers"),
        ({**SLIDING, "sliding_window": -5}, "sliding_window: -5, which must be a whole number above 0"),
    ],
)
def test_invalid_windows_are_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, **said)


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_are_written(tmp_path: Path, kind: str) -> None:
    target, head = Target(tiny()), random_head(kind)
    if kind == "eagle3-windows":
        with pytest.raises(InputError, match=r"different windows \(3, 4\) cannot be written"):
            formats.write(fit(head, target), tmp_path)
        head.config = replace(head.config, windows=(4, None, 4))
    for format in ("eagle3", "speculators") if head.config.kind == "eagle3" else (head.config.kind,):
        formats.write(fit(head, target), tmp_path / format, format)
        found = formats.read(tmp_path / format, target.decoder.config)
        assert found.config.windows == head.config.windows
