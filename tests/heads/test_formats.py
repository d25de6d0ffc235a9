"""Draft-head checkpoints: every format read and written, ambiguous ones settled by the target, damaged ones refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import windfall
from helpers.random_heads import KINDS, WIDTH, random_head
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.checkpoints import bundled
from windfall.cli import _show_warning
from windfall.cli.options import ModelOptions
from windfall.core.types import InputError
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine import loading
from windfall.engine.engine import Engine
from windfall.heads import probe
from windfall.heads.base import FeatureHead
from windfall.heads.fitting import fit
from windfall.heads.formats import FORMATS, Shape, read, read_checkpoint, write
from windfall.heads.formats.eagle3 import AUX
from windfall.heads.kinds import recognise
from windfall.heads.layers import Unrolled
from windfall.heads.loading import find_head
from windfall.heads.probe import HeadWarning
from windfall.model.target import Target

LAYERS = 8  # enough for the usual taps to be different ones
ALL = [(kind, format) for kind in KINDS for format, own in FORMATS.items() if own == kind.split("-")[0]]
ALL.remove(("eagle3-final", "speculators"))
Tensors = dict[str, Tensor]


@cache
def target() -> Target:
    return Target(tiny(num_hidden_layers=LAYERS))


def stored(folder: Path, kind: str = "eagle3", format: str | None = None, **how: Any) -> Path:
    head = fit(random_head(kind), target())
    write(head, folder, format, dtype=torch.float32, **how)
    return folder


def change(folder: Path, config: dict[str, Any] | None = None, tensors: Callable[[Tensors], Any] | None = None) -> None:
    """Set keys of config.json (... takes one away) and let a function change the tensors."""
    if config is not None:
        known = json.loads((folder / "config.json").read_text()) | config
        kept = {key: value for key, value in known.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file(held, folder / "model.safetensors")


@torch.no_grad()
def logits(head: FeatureHead) -> Tensor:
    """Of a few columns, and of one drafted after them."""
    fit(head, target())
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 5, len(head.config.taps) * WIDTH, generator=generator)
    memory = Unrolled()
    memory.mask = torch.ones(1, 5, 5).tril().bool()
    guess = head(torch.tensor([prompt(5)]), head.fuse(features), torch.arange(5)[None], memory)
    memory.mask = torch.ones(1, 1, 6, dtype=torch.bool)
    more = head(torch.tensor([[7]]), guess.recycled[:, -1:], torch.tensor([[5]]), memory)
    return torch.cat([head.logits(guess.state[0]), head.logits(more.state[0])])


def same(one: FeatureHead, other: FeatureHead) -> bool:
    names = [None if head.draft_tokens is None else head.draft_tokens.tolist() for head in (one, other)]
    return names[0] == names[1] and torch.equal(logits(one), logits(other))


@cache
def plain_text(temperature: float) -> list[int]:
    engine = Engine(target(), registry.drafter("ngram"), registry.policy("none"))
    return engine.generate(prompt(), max_new_tokens=12, temperature=temperature, seed=5).token_ids


def generates_the_same_text(drafter: Any) -> None:
    engine = Engine(target(), loading.as_drafter(drafter), registry.policy("beam"))
    for temperature in (0.0, 1.0):
        found = engine.generate(prompt(), max_new_tokens=12, temperature=temperature, seed=5)
        assert found.token_ids == plain_text(temperature)
        assert any(len(step.drafted) > 1 for step in found.steps)


# ---- round trips


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(("kind", "format"), ALL)
def test_what_is_written_is_read_back(tmp_path: Path, kind: str, format: str, light: bool) -> None:
    folder, config = stored(tmp_path / "head", kind, format, light=light), random_head(kind).config
    found = read(folder)
    assert same(found, random_head(kind))
    assert (found.config.taps, found.config.kind) == (config.taps, config.kind)
    assert recognise(folder) == config.kind
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    names = load_file(folder / "model.safetensors").keys()
    assert ("embed_tokens.weight" in names) == (not light or config.flag("own_embedding"))
    if config.kind == "eagle3":
        assert ("lm_head.weight" in names) == (not light or config.flag("own_vocabulary"))
        assert ("d2t" in names) == ("t2d" in names) == (config.draft_vocab_size is not None)


@pytest.mark.parametrize("kind", ["eagle3-pruned", "eagle", "griffin"])
def test_weights_are_written_in_half_precision_by_default(tmp_path: Path, kind: str) -> None:
    write(fit(random_head(kind), target()), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert set(kinds.values()) == {torch.bfloat16}
    if kind == "eagle3-pruned":
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        tokens = torch.arange(30) + tensors["d2t"]
        assert torch.equal(tokens, tensors["t2d"].nonzero()[:, 0])
        wanted = target().model.get_output_embeddings().weight[tokens].bfloat16()
        assert torch.equal(tensors["lm_head.weight"], wanted)
    found = read(tmp_path).state_dict()
    assert all(torch.equal(found[name], own.bfloat16()) for name, own in random_head(kind).state_dict().items())


@pytest.mark.parametrize(("kind", "format"), [("eagle", None), ("eagle3-normed", "speculators"), ("griffin", None)])
@pytest.mark.filterwarnings("ignore::windfall.heads.probe.HeadWarning")
def test_a_folder_drafts(tmp_path: Path, kind: str, format: str | None) -> None:
    folder = stored(tmp_path, kind, format)
    assert isinstance(loading.as_drafter(str(folder)), FeatureHeadDrafter)
    generates_the_same_text(folder)
    generates_the_same_text(read(folder))


def test_writing_over_an_older_head(tmp_path: Path) -> None:
    stored(tmp_path, "eagle3-deep")
    stored(tmp_path, "eagle")
    assert same(read(tmp_path), random_head("eagle"))


def test_heads_that_a_format_has_no_place_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written as 'eagle3'; choose from eagle$"):
        stored(tmp_path, "eagle", "eagle3")
    with pytest.raises(InputError, match="fit it first, or write it light"):
        write(random_head(), tmp_path)
    with pytest.raises(InputError, match="no fc bias"):
        write(random_head(flags={"fc_bias": True}), tmp_path, "speculators", light=True)
    with pytest.raises(InputError, match="reads several of its target's states; write this one as eagle3"):
        write(random_head("eagle3-final"), tmp_path, "speculators", light=True)
    biased = Target(tiny("phi"))
    with pytest.raises(InputError, match="has a bias"):
        write(fit(random_head(), biased), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the folder"):
        write(random_head(), tmp_path / "file", light=True)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_config_for_vllm_has_one_meaning(tmp_path: Path) -> None:
    stored(tmp_path, "eagle3-pruned", "vllm", target=target())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[AUX] == config["eagle_config"][AUX] == [1, 2, 3] and config["num_aux_hidden_states"] == 3
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert "rope_scaling" not in config and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["vocab_size"] == len(load_file(tmp_path / "model.safetensors")["t2d"])


def test_a_speculators_config_has_the_fields_of_the_format(tmp_path: Path) -> None:
    stored(tmp_path, "eagle3-pruned", "speculators", target=target())
    config = json.loads((tmp_path / "config.json").read_text())
    flags = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"}
    assert all(config[flag] is False for flag in flags)
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 30)
    assert config[AUX] == [1, 2, 3]
    about = config["speculators_config"]
    assert about["algorithm"] == "eagle3" and about["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert about["default_proposal_method"] == about["proposal_methods"][0]["proposal_type"] == "greedy"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", VOCABULARY, 1)
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")


# ---- what other projects write


def rename(tensors: Tensors, names: Callable[[str], str]) -> None:
    held = dict(tensors)
    tensors.clear()
    tensors.update({names(name): tensor for name, tensor in held.items()})


@pytest.mark.parametrize("kind", ["eagle", "eagle3-pruned", "griffin"])
def test_a_prefix_and_pickled_weights(tmp_path: Path, kind: str) -> None:
    stored(tmp_path, kind)
    change(tmp_path, tensors=lambda held: rename(held, lambda name: f"model.{name}"))
    assert same(read(tmp_path), random_head(kind))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert recognise(tmp_path) == kind.split("-")[0]
    assert same(read(tmp_path), random_head(kind))


@pytest.mark.parametrize("biased", [True, False])
def test_eagle_configs_nested_or_without_a_bias_setting_are_read(tmp_path: Path, biased: bool) -> None:
    head = random_head("eagle", flags={"fc_bias": biased})
    write(fit(head, target()), tmp_path, dtype=torch.float32)
    change(tmp_path, {"bias": ..., "num_key_value_heads": 2, "rope_theta": ..., "head_dim": ...})
    change(tmp_path, tensors=lambda held: held.pop("embed_tokens.weight"))
    assert same(read(tmp_path), head)
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": inner, "eagle_fc_bias": biased}))
    assert same(read(tmp_path), head)
    if biased:
        change(tmp_path, tensors=lambda held: held.pop("fc.bias"))
        with pytest.raises(InputError, match=r"says that fc has a bias, and lacks fc.bias"):
            read(tmp_path)


def test_eagle3_with_older_names(tmp_path: Path) -> None:
    stored(tmp_path, "eagle3-normed")
    places = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}

    def older(held: Tensors) -> None:
        rename(held, lambda name: f"{places[name[:9]]}.weight" if name[:9] in places else name)
        held["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change(tmp_path, {"fc_norm": ..., "target_hidden_size": ...}, older)
    assert same(read(tmp_path), random_head("eagle3-normed"))


def test_biases_and_norms_of_the_attention(tmp_path: Path) -> None:
    """Qwen2-like: biases on queries, keys and values alone; Qwen3-like: normed queries and keys; heads of any width."""
    config = random_head().config.layer
    layer = type(config)(**{**config.to_dict(), "head_dim": 16})
    layer.qk_norm, layer.attention_bias, layer.o_bias = True, True, False
    made = type(random_head())(random_head().config.__class__(**{**vars(random_head().config), "layer": layer}))
    for format in ("eagle3", "speculators"):
        write(fit(made, target()), tmp_path / format, format, dtype=torch.float32)
        found = read(tmp_path / format)
        assert same(found, made)
        names = found.state_dict().keys()
        assert "layers.0.self_attn.q_norm.weight" in names and "layers.0.self_attn.o_proj.bias" not in names
        assert found.state_dict()["layers.0.self_attn.q_proj.weight"].shape == (64, 2 * WIDTH)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"rope_theta": 500000.0}, "default"),
        ({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "default"),
        (
            {
                "rope_theta": 500000.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            "yarn",
        ),
    ],
)
def test_rotary_positions_of_every_kind(tmp_path: Path, given: dict[str, Any], kind: str) -> None:
    stored(tmp_path / "one")
    change(tmp_path / "one", given)
    head = read(tmp_path / "one")
    rope = head.config.layer.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"]) == (500000.0, kind)
    assert not torch.equal(logits(head), logits(random_head()))
    write(head, tmp_path / "other", dtype=torch.float32)
    assert same(read(tmp_path / "other"), head)


def test_griffin_by_hand() -> None:
    """One column attends to itself alone, so that its value is what comes out."""
    head = random_head("griffin")
    w = head.state_dict()
    emb = target().model.get_input_embeddings().weight[7]
    fit(head, target())
    feature = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean() + head.config.layer.rms_norm_eps)

    silu = torch.nn.functional.silu
    with torch.no_grad():
        x = w["fc.fc.weight"] @ torch.cat([emb, feature]) + w["fc.fc.bias"]
        seen = norm(x, "fc.post_attention_layernorm")
        both = torch.cat([norm(y, "fc.mlp.input_layernorm") for y in (seen, emb)])
        x = x + w["fc.mlp.down_proj.weight"] @ silu(w["fc.mlp.up_proj.weight"] @ both)
        value = (w["layers.0.self_attn.v_proj.weight"] @ x).view(2, 8).repeat_interleave(2, 0).flatten()
        x = x + w["layers.0.self_attn.o_proj.weight"] @ value
        y = norm(x, "layers.0.post_attention_layernorm")
        inner = silu(w["layers.0.mlp.gate_proj.weight"] @ y) * (w["layers.0.mlp.up_proj.weight"] @ y)
        out = torch.cat([x, x]) + w["layers.0.mlp.down_proj.weight"] @ inner
        guess = head(torch.tensor([[7]]), feature[None, None], torch.zeros(1, 1).long(), Unrolled())
    assert torch.allclose(guess.state[0, 0], out[:WIDTH], rtol=1e-4, atol=1e-4)
    assert torch.allclose(guess.recycled[0, 0], out[WIDTH:], rtol=1e-4, atol=1e-4)


# ---- what the file leaves open


def constant_target(layers: int = LAYERS) -> Target:
    """Says 7 whatever comes. Its state has dimension 0 from the embedding, and dimension k from layer k - 1 on."""
    model = tiny(num_hidden_layers=layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight[:, 0] = 1
        model.get_output_embeddings().weight[7, 0] = 1
        for place, layer in enumerate(model.model.layers):
            layer.mlp.gate_proj.weight[0, 0] = layer.mlp.up_proj.weight[0, 0] = 1
            layer.mlp.down_proj.weight[place + 1, 0] = 1
    return Target(model)


def telling_head(taps: tuple[int, ...], **flags: bool) -> FeatureHead:
    """Says 7 if its first tap is what it should be, and 9 if that is a later state."""
    head = random_head(taps=taps, flags={"own_vocabulary": True, **flags})
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        head.fc.weight[0, 0] = 1
        head.fc.weight[1, taps[0] + 1] = 100
        head.lm_head.weight[7, 0] = head.lm_head.weight[9, 1] = 1
    return head


@pytest.mark.parametrize(
    ("ids", "right"), [([2, 4, 6], (2, 4, 6)), ([2, 4, 6], (3, 5, 7)), ([1, 3, 5], (1, 3, 5)), ([1, 3, 5], (2, 4, 6))]
)
def test_layers_counted_from_either_end_of_a_layer(tmp_path: Path, ids: list[int], right: tuple[int, ...]) -> None:
    """Nested ids are boundaries for some engines and outputs for others."""
    judge = constant_target()
    write(fit(telling_head(right), judge), tmp_path, dtype=torch.float32)
    change(tmp_path, {AUX: ..., "eagle_config": {AUX: ids}})
    with pytest.warns(HeadWarning, match="allows several readings; chosen: taps " + "/".join(map(str, right))) as told:
        head = find_head(str(tmp_path), judge)
    assert (head.config.taps, head.agreement) == (right, 1.0)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("given", "taps"),
    [
        ({AUX: [2, 4, 6], "eagle_config": {AUX: [5, 6, 7]}}, (2, 4, 6)),
        ({AUX: ..., "eagle_config": ...}, (2, 4, 5)),
        ({AUX: ..., "eagle_config": {AUX: [2, 4, 8]}}, (2, 4, 8)),  # as outputs they would lie past the end
    ],
)
def test_unambiguous_layers_take_one_pass_of_the_target(
    tmp_path: Path, given: dict[str, Any], taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = constant_target()
    write(fit(telling_head((2, 4, 6)), judge), tmp_path, dtype=torch.float32)
    change(tmp_path, given)
    passes: list[int] = []
    scored = probe.scored
    monkeypatch.setattr(probe, "scored", lambda *given: passes.append(1) or scored(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = find_head(str(tmp_path), judge)
    assert (head.config.taps, head.agreement, passes) == (taps, 1.0, [1])
    assert not judge.decoder.taps and not judge.decoder.lengths


@pytest.mark.parametrize("right", [False, True])
def test_a_missing_residual_setting_of_speculators_is_inferred(tmp_path: Path, right: bool) -> None:
    judge, head = constant_target(), telling_head((2, 4, 6), norm_before_residual=right)
    with torch.no_grad():  # both directions are on; the norm takes away one of them
        head.fc.weight[1, 2 + 1], head.fc.weight[1, 2] = 0, 0.1
        head.layers[0].hidden_norm.weight[1 if right else 0] = 0
        if right:
            head.fc.weight[1, 2] = 100
    write(fit(head, judge), tmp_path, "speculators", dtype=torch.float32)
    change(tmp_path, {"norm_before_residual": ...})
    with pytest.warns(HeadWarning, match=f"chosen: norm_before_residual {right}.*the next best on 0%"):
        found = find_head(str(tmp_path), judge)
    assert found.config.flag("norm_before_residual") == right
    assert found.agreement == 1.0


def made_up_score(agreement: float, likelihood: float, spread: float = 0.0) -> probe.Score:
    """Of 200 guesses, whose log-probabilities spread around their mean in the same way."""
    each = likelihood + spread * torch.randn(200, generator=torch.Generator().manual_seed(int(1000 * agreement)))
    return probe.Score(agreement, float(each.mean()), agreement, each)


@pytest.mark.parametrize(
    ("measured", "spread", "chosen"),
    [
        ({(2, 4, 5): 0.37, (3, 5, 6): 0.43, (1, 3, 4): 0.35}, 0.5, (3, 5, 6)),  # the usual ones agree, others more
        ({(2, 4, 5): 0.43, (3, 5, 6): 0.37, (1, 3, 4): 0.35}, 0.5, (2, 4, 5)),
        ({(2, 4, 5): 0.43, (3, 5, 6): 0.44, (1, 3, 4): 0.35}, 5.0, (2, 4, 5)),  # no more than chance explains
    ],
)
def test_layers_that_agree_better_than_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: dict[Any, float], spread: float, chosen: tuple[int, ...]
) -> None:
    judge = constant_target()
    write(fit(telling_head((2, 4, 6)), judge), tmp_path, dtype=torch.float32)
    change(tmp_path, {AUX: ..., "eagle_config": ...})

    def score(head: FeatureHead, *rest: Any) -> probe.Score:
        agreement = measured[head.config.taps]
        return made_up_score(agreement, -4 + 4 * agreement, spread)

    monkeypatch.setattr(probe, "score", score)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert find_head(tmp_path, judge).config.taps == chosen
    lines = [str(warning.message) for warning in told if issubclass(warning.category, HeadWarning)]
    if chosen == (2, 4, 5):
        assert not lines
    else:
        [line] = lines
        assert "chosen: taps 3/5/6, which agrees with" in line and "next best on 37%" in line


@pytest.mark.parametrize("right", [False, True])
def test_whether_the_normed_state_is_fed_back_is_seen_in_later_steps(tmp_path: Path, right: bool) -> None:
    """First guesses are the same either way; the wrong state grows in direction 2, which says 9, from step to step."""
    judge, head = constant_target(), telling_head((2, 4, 6), norm_output=right)
    with torch.no_grad():
        layer = head.layers[0].mlp
        if right:  # the layer adds to it, the norm takes it back
            layer.gate_proj.weight[0, 0] = layer.up_proj.weight[0, 0] = 1
            layer.down_proj.weight[2, 0] = 0.45 / 32
            head.norm.weight[2] = 0.1
        else:  # the norm enlarges it
            head.fc.weight[2, 0] = 0.15
            head.norm.weight[2] = 3
        head.lm_head.weight[9, 2] = 1 / head.norm.weight[2] if right else 1
    write(fit(head, judge), tmp_path, dtype=torch.float32)
    change(tmp_path, {"norm_output": ...})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = find_head(tmp_path, judge)
    assert found.config.flag("norm_output") == right and found.agreement == 1.0
    lines = [str(warning.message) for warning in told if issubclass(warning.category, HeadWarning)]
    assert [("chosen: norm_output True" in line) for line in lines] == ([True] if right else [])


def test_a_missing_theta_is_ten_thousand_or_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path)
    change(tmp_path, {"rope_theta": ...})
    judge = Target(tiny(num_hidden_layers=LAYERS, rope_theta=5e5))
    found = read_checkpoint(tmp_path, "x", Shape.of(judge.decoder.config))
    assert [reading.choices["rope_theta"] for reading in found.stated] == [10000.0, 5e5]
    assert len(read_checkpoint(tmp_path, "x", Shape(LAYERS, 10000.0)).stated) == 1

    def score(head: FeatureHead, *rest: Any) -> probe.Score:
        return made_up_score(0.5, -1.0 if head.config.layer.rope_parameters["rope_theta"] == 5e5 else -2.0)

    monkeypatch.setattr(probe, "score", score)
    with pytest.warns(HeadWarning, match="chosen: rope_theta 500000.0, which agrees with .* on 50%"):
        assert find_head(tmp_path, judge).config.layer.rope_parameters["rope_theta"] == 5e5


def test_the_feature_before_the_embedding(tmp_path: Path) -> None:
    judge, head = constant_target(), random_head("eagle", flags={})
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[0, WIDTH + 1] = 1  # what the target adds to the embedding
    write(fit(head, judge), tmp_path, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_head(tmp_path, judge).agreement == 1.0
    change(tmp_path, tensors=lambda held: held.update({"fc.weight": held["fc.weight"].roll(WIDTH, 1)}))
    with pytest.warns(HeadWarning, match="something else than it says; chosen: order feature first"):
        found = find_head(tmp_path, judge)
    assert found.agreement == 1.0 and torch.equal(found.fc.weight, head.fc.weight)


def test_a_head_that_never_agrees_with_the_target_gives_a_warning(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.warns(HeadWarning, match=r"agrees with .* on only \d+% of the tokens: .*\. It will hardly"):
        head = find_head(str(tmp_path), target())
    assert head.agreement is not None and head.agreement < 0.3
    assert head.config.taps == random_head().config.taps  # no other reading did any better


def test_the_command_line_prints_head_warnings_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "warnings.showwarning", partial(_show_warning, warnings.showwarning, set())
    )  # as a command does
    target().model.save_pretrained(tmp_path / "target")
    stored(tmp_path / "head")
    capsys.readouterr()
    engine = ModelOptions(target=str(tmp_path / "target"), drafter=str(tmp_path / "head"), device="cpu").load("beam")
    shown = capsys.readouterr()
    assert "of the tokens: it was made for another" in shown.err and shown.out == ""
    assert isinstance(engine.drafter, FeatureHeadDrafter)


# ---- what is refused


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda held: held.pop(name)


def put(**tensors: Tensor) -> Callable[[Tensors], Any]:
    return lambda held: held.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"),
    [
        ("eagle3", {}, drop("norm.weight"), "taken for a head of kind eagle3, lacks norm.weight$"),
        ("eagle3", {}, put(nonsense=torch.ones(1, 9)), "has nonsense, which this kind of head does not use$"),
        ("eagle", {}, put(layers__1__mlp__up_proj__weight=torch.ones(2)), "has layers.1.mlp.up_proj.weight, which"),
        ("eagle3-deep", {}, drop("layers.1.self_attn.q_proj.weight"), r"has layers\.1\.\S+(, \S+){7}, which"),
        ("eagle3", {}, put(norm__weight=torch.ones(5)), r"has norm.weight as \(5,\) instead of \(32,\)$"),
        ("eagle3", {}, put(norm__weight=torch.ones(32).long()), r"numbers in norm.weight \(torch.int64\)"),
        ("eagle3", {"intermediate_size": 12}, None, r"down_proj.weight as \(32, 48\) instead of \(32, 12\)"),
        ("eagle3", {"target_hidden_size": 40}, None, "fc.weight with 96 columns for 3 states of width 40"),
        ("eagle3", {AUX: [1, 2]}, None, "96 columns for 2 states of width 32"),
        ("eagle3", {AUX: "2,4"}, None, "which must be a list of layers"),
        ("eagle3", {AUX: ..., "eagle_config": ...}, None, "does not say which of the target's states it reads"),
        ("eagle3", {"hidden_size": ...}, None, "lacks hidden_size"),
        ("eagle3", {"vocab_size": "many"}, None, "says vocab_size: 'many', which must be a whole number"),
        ("eagle3", {"rms_norm_eps": None}, None, "says rms_norm_eps: None"),
        ("eagle3", {"hidden_act": "magic"}, None, "the activation 'magic'"),
        ("eagle3", {"rope_scaling": {"rope_type": "spiral"}}, None, r"rotary positions .* \(spiral\)"),
        ("eagle3", {"partial_rotary_factor": 1.5}, None, "says partial_rotary_factor: 1.5, which must be a number"),
        ("eagle3", {"partial_rotary_factor": 0.4}, None, "rotates 3 of 8 channels, which must be an even number"),
        ("eagle3", {"logit_scale": 0}, None, "says logit_scale: 0, which must be a number above 0"),
        ("eagle3", {"rope_theta": "big"}, None, "rope_theta: 'big'"),
        ("eagle3", {"eagle_config": [1]}, None, "not as a JSON object"),
        ("eagle3", {"speculators_model_type": "later"}, None, "is a later speculator; windfall reads eagle3 ones"),
        ("eagle3", {}, put(model__norm__weight=torch.ones(32)), "has norm.weight twice"),
        ("eagle3", {}, drop("fc.weight"), "lacks fc.weight"),
        ("griffin", {}, put(layers__1__self_attn__q_proj__weight=torch.ones(2)), "2 layers; a griffin head has one"),
        ("griffin", {}, drop("fc.mlp.up_proj.weight"), "of kind griffin, lacks fc.mlp.up_proj.weight"),
        ("eagle3-pruned", {}, drop("d2t"), "drafts 30 of 61 tokens and lacks d2t"),
        ("eagle3-pruned", {}, put(d2t=torch.zeros(29).long()), "d2t has 29 entries for 30 drafted tokens"),
        ("eagle3-pruned", {"draft_vocab_size": 31}, None, "d2t has 30 entries for 31"),
        ("eagle3-pruned", {}, put(d2t=torch.full((30,), 60)), "d2t must lead from each draft id to another"),
        ("eagle3-pruned", {}, put(d2t=-torch.arange(30)), "d2t must lead from each draft id to another"),
        ("eagle3-pruned", {}, put(d2t=torch.zeros(30)), "d2t must be a list of whole numbers"),
        ("eagle3-pruned", {}, put(t2d=torch.zeros(61).bool()), "d2t and t2d contradict each other"),
    ],
)  # fmt: skip
def test_defects_are_named(
    tmp_path: Path, kind: str, config: dict[str, Any], tensors: Callable[[Tensors], Any] | None, message: str
) -> None:
    change(stored(tmp_path, kind), config, tensors)
    with pytest.raises(InputError, match=message) as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_damaged_files(tmp_path: Path) -> None:
    weights = stored(tmp_path) / "model.safetensors"
    whole, config = weights.read_bytes(), (tmp_path / "config.json").read_text()
    for damaged, message in ((whole[:-100], "damaged or incomplete"), (b"", "is empty"), (b"x" * 99, "damaged")):
        weights.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            read(tmp_path)
    weights.unlink()
    with pytest.raises(InputError, match="has no weights"):
        read(tmp_path)
    weights.write_bytes(whole)
    for text, message in (("[1]", "must be a JSON object, not a list"), ("{", "cannot read the config.json")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            read(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(config)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK no archive")
    with pytest.raises(InputError, match=r"cannot read .*pytorch_model.bin"):
        read(tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="is not a table of tensors"):
        read(tmp_path)


def test_weights_with_nan_are_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    change(tmp_path, tensors=lambda held: held["fc.weight"].fill_(float("nan")))
    with pytest.raises(InputError, match="computes no finite numbers"):
        find_head(tmp_path, target())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, "reads hidden states of width 32; .* has 64"),
        ({"vocab_size": 50}, "drafts 61 tokens; .* has 50"),
        ({"vocab_size": 80}, "knows 61 tokens; .* has 80"),
        ({"num_hidden_layers": 2}, "reads layer 3; .* has 2 layers"),
    ],
)
def test_heads_of_another_target(tmp_path: Path, other: dict[str, int], message: str) -> None:
    stored(tmp_path)
    with pytest.raises(InputError, match=message):
        windfall.load(tiny(**other), str(tmp_path), "beam")


def test_a_padded_vocabulary_whose_drafted_tokens_fit(tmp_path: Path) -> None:
    """The embedding has more rows than the target; no drafted token is among them."""
    stored(tmp_path, "eagle3-pruned")

    def pad(held: Tensors) -> None:
        held["embed_tokens.weight"] = torch.cat([held["embed_tokens.weight"], torch.zeros(3, WIDTH)])
        held["t2d"] = torch.cat([held["t2d"], torch.zeros(3, dtype=torch.bool)])

    change(tmp_path, {"vocab_size": VOCABULARY + 3}, pad)
    found = fit(read(tmp_path), target())
    assert torch.equal(logits(found), logits(random_head("eagle3-pruned")))
    generates_the_same_text(found)
    change(tmp_path, {"vocab_size": VOCABULARY})  # some give the target's size beside padded rows
    assert torch.equal(logits(read(tmp_path)), logits(random_head("eagle3-pruned")))
    change(tmp_path, tensors=lambda held: held["d2t"][-1:].fill_(VOCABULARY + 1 - 29) and held["t2d"].fill_(True))
    with pytest.raises(InputError, match=r"drafts 64 tokens; .* has 61"):
        fit(read(tmp_path), target())


def test_a_scale_of_the_logits_is_borrowed_and_written(tmp_path: Path) -> None:
    for kind in ("eagle", "eagle3"):
        stored(tmp_path / kind, kind, light=True)
        change(tmp_path / kind, {"logit_scale": 0.25})
        head = read(tmp_path / kind)
        assert torch.allclose(logits(head), 0.25 * logits(random_head(kind)), rtol=1e-5, atol=1e-5)
        for light in (False, True):
            write(head, tmp_path / "again", dtype=torch.float32, light=light)
            assert torch.allclose(logits(read(tmp_path / "again")), logits(head), rtol=1e-5, atol=1e-5)


def test_a_narrower_head_needs_its_own_vocabulary_matrices(tmp_path: Path) -> None:
    config = random_head().config
    layer = type(config.layer)(**{**config.layer.to_dict(), "hidden_size": 16, "head_dim": 8})
    head = type(random_head())(config.__class__(**{**vars(config), "layer": layer}))
    write(head, tmp_path, light=True)
    with pytest.raises(InputError, match="16 wide and brings no embedding"):
        find_head(tmp_path, target())


def test_missing_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"there is no folder '\./no-such-head'"):
        read("./no-such-head")
    with pytest.raises(InputError, match="cannot reach the Hugging Face hub for 'nobody/no-head'"):
        find_head("nobody/no-head", target())
    with pytest.raises(InputError, match="not a int"):
        find_head(3, target())


# ---- which drafter


def test_models_still_draft_as_models(tmp_path: Path) -> None:
    tiny(num_hidden_layers=1).save_pretrained(tmp_path)
    assert isinstance(loading.as_drafter(str(tmp_path)), LMDrafter)
    assert isinstance(loading.as_drafter(tiny()), LMDrafter)
    assert isinstance(loading.as_drafter("/no/such/model"), LMDrafter)  # which then says so
    assert isinstance(loading.as_drafter(random_head()), FeatureHeadDrafter)
    with pytest.raises(InputError, match="is no draft head; here it must be one of griffin, eagle3, eagle"):
        FeatureHeadDrafter(model=tmp_path).attach(target())


# ---- the head that comes along


def test_the_bundled_head_is_for_one_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"there is no head for .*; train one with `windfall train head` or give"):
        FeatureHeadDrafter().attach(target())
    stored(tmp_path / "other", light=True)
    stored(tmp_path / "pruned", "eagle3-pruned", light=True, target=target())
    assert same(find_head(None, target()), random_head("eagle3-pruned"))
    generates_the_same_text("head")
    for dtype in (torch.bfloat16, torch.float16):
        FeatureHeadDrafter().attach(Target(tiny(num_hidden_layers=LAYERS, dtype=dtype), check=False))
    for different in (tiny(num_hidden_layers=LAYERS, seed=1), tiny(num_hidden_layers=LAYERS, vocab_size=62)):
        with pytest.raises(InputError, match="there is no head for"):
            FeatureHeadDrafter().attach(Target(different, check=False))


def test_a_few_changed_weights_change_the_fingerprint() -> None:
    model = tiny(num_hidden_layers=LAYERS)
    before = bundled.fingerprint(Target(model, check=False))
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.add_(0.05 * torch.randn(48, 32, generator=torch.Generator()))
    after = bundled.fingerprint(Target(model, check=False))
    assert before["weights"] != after["weights"]
    assert {**before, "weights": ""} == {**after, "weights": ""}
