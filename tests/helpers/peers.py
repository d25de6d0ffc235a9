"""Draft heads as other projects write them, with random weights, and what they draft by those projects' own code or,
where that is not installed, by a plain computation written from the definition of their layout."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from helpers.tiny import SHAPE, VOCABULARY, tiny
from windfall.heads.base import FeatureHead
from windfall.heads.fitting import fit
from windfall.heads.probe import rollout
from windfall.model.target import Target

LAYERS = 8  # of the target
WIDTH: int = SHAPE["hidden_size"]  # type: ignore[assignment]
HEADS, SHARED = 4, 2
STEPS, COLUMNS = 3, 7
Tensors = dict[str, Tensor]
Config = dict[str, Any]

# ---- a target, a text and what is drafted after it


@cache
def target() -> Target:
    return Target(tiny(num_hidden_layers=LAYERS))


def embedding() -> Tensor:
    return target().model.get_input_embeddings().weight.detach()


def vocabulary() -> Tensor:
    return target().model.get_output_embeddings().weight.detach()


def text(taps: int = 3) -> tuple[Tensor, Tensor]:
    """States [COLUMNS, taps * H] and tokens, one more than there are states."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(COLUMNS, taps * WIDTH, generator=generator)
    return features, torch.randint(VOCABULARY, (COLUMNS + 1,), generator=generator)


@torch.no_grad()
def drafted(head: FeatureHead) -> list[Tensor]:
    """The head's logits [rows, Vd] in every step whose tokens are in the text."""
    fit(head, target())
    guesses = rollout(head, *text(len(head.config.taps)), STEPS)
    return [head.logits(guess.state[0, : COLUMNS - step]) for step, guess in enumerate(guesses)]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative to the largest logit."""
    assert [level.shape for level in ours] == [level.shape for level in theirs]
    scale = max(float(level.abs().max()) for level in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / scale


# ---- files


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, inputs: int, wide: int = 48, dim: int = WIDTH // HEADS) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * dim, inputs),
        f"{prefix}self_attn.k_proj.weight": (SHARED * dim, inputs),
        f"{prefix}self_attn.v_proj.weight": (SHARED * dim, inputs),
        f"{prefix}self_attn.o_proj.weight": (WIDTH, HEADS * dim),
        f"{prefix}mlp.gate_proj.weight": (wide, WIDTH),
        f"{prefix}mlp.up_proj.weight": (wide, WIDTH),
        f"{prefix}mlp.down_proj.weight": (WIDTH, wide),
        f"{prefix}post_attention_layernorm.weight": (WIDTH,),
    }


def eagle3_shapes(prefix: str = "midlayer.", taps: int = 3, drafted: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
    return {
        **({"fc.weight": (WIDTH, taps * WIDTH)} if taps else {}),
        f"{prefix}input_layernorm.weight": (WIDTH,),
        f"{prefix}hidden_norm.weight": (WIDTH,),
        **layer_shapes(prefix, 2 * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (drafted, WIDTH),
    }


def layer_config(**more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        **more,
    }


def put(folder: Path, config: Config, tensors: Tensors, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
    return folder


def some_tokens(count: int) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a smaller vocabulary."""
    chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[:count].sort().values
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[chosen] = True
    return chosen - torch.arange(count), mask


# ---- the definitions, one row at a time


def normed(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return weight * x / (x.pow(2).mean() + eps).sqrt()


def turned(x: Tensor, position: int, theta: float, channels: int) -> Tensor:
    """Channel i and channel i + channels / 2 of a head turn together, by an angle that falls with i."""
    out, half = x.clone(), channels // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / channels)
        left, right = x[..., i], x[..., i + half]
        out[..., i] = left * math.cos(angle) - right * math.sin(angle)
        out[..., i + half] = right * math.cos(angle) + left * math.sin(angle)
    return out


@dataclass
class Reference:
    """What a one-stream decoder layer computes for the row of column t in a step, given the rows that it sees."""

    weights: Tensors
    theta: float = 10000.0
    rotated: float = 1.0  # share of a head's channels
    seen: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer, step, column → k, v

    def attend(self, layer: str, x: Tensor, step: int, t: int) -> Tensor:
        w, place = self.weights, f"{layer}self_attn."
        parts = [w[f"{place}{part}_proj.weight"] @ x for part in "qkv"]
        q, k, v = (part.view(-1, w[f"{place}q_proj.weight"].shape[0] // HEADS) for part in parts)
        channels = int(q.shape[1] * self.rotated)
        q, k = turned(q, t + step, self.theta, channels), turned(k, t + step, self.theta, channels)
        self.seen[layer, step, t] = k, v
        rows = [self.seen[layer, 0, column] for column in range(t + 1)]
        rows += [self.seen[layer, later, t] for later in range(1, step + 1)]
        out = []
        for head in range(HEADS):
            shared = head // (HEADS // SHARED)
            keys, values = (torch.stack([row[part][shared] for row in rows]) for part in (0, 1))
            out.append(torch.softmax(keys @ q[head] / math.sqrt(q.shape[1]), 0) @ values)
        return w[f"{place}o_proj.weight"] @ torch.cat(out)

    def feed(self, layer: str, x: Tensor) -> Tensor:
        w, y = self.weights, normed(x, self.weights[f"{layer}post_attention_layernorm.weight"])
        gated = silu(w[f"{layer}mlp.gate_proj.weight"] @ y) * (w[f"{layer}mlp.up_proj.weight"] @ y)
        return x + w[f"{layer}mlp.down_proj.weight"] @ gated

    def levels(self, taps: int, row: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]) -> list[Tensor]:
        """`row` makes of a feature and an embedding, in a step and a column, logits and the feature to go on from."""
        features, tokens = text(taps)
        states, out = list(features), []
        for step in range(STEPS):
            made = [row(states[t], embedding()[tokens[t + 1 + step]], step, t) for t in range(COLUMNS - step)]
            out.append(torch.stack([logits for logits, _ in made]))
            states = [state for _, state in made]
        return out


def eagle3_levels(
    weights: Tensors, taps: int = 3, residual_normed: bool = False, output_normed: bool = False, **how: float
) -> list[Tensor]:
    """Under plain names; `layers.1.` and so on are ordinary layers."""
    scale = how.pop("scale", 1.0)
    made = Reference(weights, **how)
    count = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))

    def row(feature: Tensor, embedded: Tensor, step: int, t: int) -> tuple[Tensor, Tensor]:
        if step == 0 and "fc_norm.0.weight" in weights:
            parts = feature.split(WIDTH)
            feature = torch.cat([normed(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        if step == 0 and "fc.weight" in weights:
            feature = weights["fc.weight"] @ feature
        inner = normed(feature, weights["layers.0.hidden_norm.weight"])
        both = torch.cat([normed(embedded, weights["layers.0.input_layernorm.weight"]), inner])
        x = (inner if residual_normed else feature) + made.attend("layers.0.", both, step, t)
        x = made.feed("layers.0.", x)
        for layer in (f"layers.{i}." for i in range(1, count)):
            x = x + made.attend(layer, normed(x, weights[f"{layer}input_layernorm.weight"]), step, t)
            x = made.feed(layer, x)
        out = normed(x, weights["norm.weight"])
        return scale * (weights["lm_head.weight"] @ out), out if output_normed else x

    return made.levels(taps, row)


def eagle_levels(weights: Tensors) -> list[Tensor]:
    made = Reference(weights)

    def row(feature: Tensor, embedded: Tensor, step: int, t: int) -> tuple[Tensor, Tensor]:
        x = weights["fc.weight"] @ torch.cat([embedded, feature]) + weights.get("fc.bias", 0)
        x = made.feed("layers.0.", x + made.attend("layers.0.", x, step, t))
        return vocabulary() @ x, x

    return made.levels(1, row)


def griffin_levels(weights: Tensors) -> list[Tensor]:
    made = Reference(weights)

    def row(feature: Tensor, embedded: Tensor, step: int, t: int) -> tuple[Tensor, Tensor]:
        x = weights["fc.fc.weight"] @ torch.cat([embedded, feature]) + weights["fc.fc.bias"]
        seen = normed(x, weights["fc.post_attention_layernorm.weight"])
        both = torch.cat([normed(y, weights["fc.mlp.input_layernorm.weight"]) for y in (seen, embedded)])
        x = x + weights["fc.mlp.down_proj.weight"] @ silu(weights["fc.mlp.up_proj.weight"] @ both)
        x = x + made.attend("layers.0.", x, step, t)
        y = normed(x, weights["layers.0.post_attention_layernorm.weight"])
        gated = silu(weights["layers.0.mlp.gate_proj.weight"] @ y) * (weights["layers.0.mlp.up_proj.weight"] @ y)
        guess, on = (torch.cat([x, x]) + weights["layers.0.mlp.down_proj.weight"] @ gated).split(WIDTH)
        return vocabulary() @ guess, on

    return made.levels(1, row)


def medusa_levels(weights: Tensors, block: str, vocabulary: str) -> list[Tensor]:
    """Each head by itself: a residual block on the final state, and a vocabulary."""

    def row(head: int, x: Tensor) -> Tensor:
        x = x + silu(weights[f"{block.format(head)}.weight"] @ x + weights[f"{block.format(head)}.bias"])
        return weights[vocabulary.format(head)] @ x

    return [torch.stack([row(head, x) for x in text(1)[0]]) for head in range(STEPS)]


@torch.no_grad()
def medusa_drafted(head: Any) -> list[Tensor]:
    return list(head.logits(head.states(text(1)[0])))


def hydra_levels(weights: Tensors) -> list[Tensor]:
    """Head i reads the final state and the embeddings of the i + 1 tokens after it, side by side."""
    features, tokens = text(1)

    def row(head: int, t: int) -> Tensor:
        x = torch.cat([features[t], *(embedding()[token] for token in tokens[t + 1 : t + 2 + head])])
        block, straight = f"hydra_mlp.{head}.0.linear", f"hydra_mlp.{head}.0.res_connection"
        inner = silu(weights[f"{block}.weight"] @ x + weights[f"{block}.bias"])
        x = weights[f"{straight}.weight"] @ x + weights[f"{straight}.bias"] + inner
        return weights[f"hydra_lm_head.{head}.weight"] @ x + weights[f"hydra_lm_head.{head}.bias"]

    return [torch.stack([row(head, t) for t in range(COLUMNS - head)]) for head in range(STEPS)]


@torch.no_grad()
def hydra_drafted(head: Any) -> list[Tensor]:
    features, tokens = text(1)
    fit(head, target())
    windows = [tokens[1:].unfold(0, place + 1, 1) for place in range(STEPS)]
    states = [head.states(place, features[: len(own)], own) for place, own in enumerate(windows)]
    return [head.head_logits(place, state) for place, state in enumerate(states)]


# ---- the projects' layouts


@dataclass(frozen=True)
class Layout:
    """A project's way to write a kind of head."""

    project: str
    kind: str
    build: Callable[[], tuple[Config, Tensors]]
    levels: Callable[[Tensors], list[Tensor]]  # by the definition, from the tensors under plain names
    ours: Callable[[Any], list[Tensor]] = drafted
    weights: str = "model.safetensors"

    def put(self, folder: Path) -> Path:
        return put(folder, *self.build(), self.weights)


def _plain(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _eagle3(config: Config, shapes: dict[str, tuple[int, ...]], drafted: int = VOCABULARY) -> tuple[Config, Tensors]:
    tensors = random_tensors(shapes)
    if drafted != VOCABULARY:
        tensors["d2t"], tensors["t2d"] = some_tokens(drafted)
    return layer_config(**config), tensors


def _eagle(wrapped: bool) -> tuple[Config, Tensors]:
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,), **layer_shapes("layers.0.", WIDTH)}
    config, tensors = layer_config(bias=True), random_tensors(shapes)
    if wrapped:
        config = {"model_type": "eagle", "model": config, "eagle_fc_bias": True, "architectures": ["EAGLEModel"]}
    return config, {f"model.{name}" if wrapped else name: tensor for name, tensor in tensors.items()}


def _griffin() -> tuple[Config, Tensors]:
    shapes = {
        "fc.fc.weight": (WIDTH, 2 * WIDTH),
        "fc.fc.bias": (WIDTH,),
        "fc.post_attention_layernorm.weight": (WIDTH,),
        "fc.mlp.input_layernorm.weight": (WIDTH,),
        "fc.mlp.up_proj.weight": (48, 2 * WIDTH),
        "fc.mlp.down_proj.weight": (WIDTH, 48),
        **layer_shapes("layers.0.", WIDTH),
        "layers.0.mlp.down_proj.weight": (2 * WIDTH, 48),
    }
    return layer_config(qkv_bias=False), random_tensors(shapes)


def _medusa(block: str, vocabulary: str, config: Config) -> tuple[Config, Tensors]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(STEPS):
        shapes |= {f"{block.format(head)}.weight": (WIDTH, WIDTH), f"{block.format(head)}.bias": (WIDTH,)}
        shapes[vocabulary.format(head)] = (VOCABULARY, WIDTH)
    return {"vocab_size": VOCABULARY, **config}, random_tensors(shapes)


def _hydra() -> tuple[Config, Tensors]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(STEPS):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.0.{part}.weight"] = (WIDTH, (head + 2) * WIDTH)
            shapes[f"hydra_mlp.{head}.0.{part}.bias"] = (WIDTH,)
        shapes |= {f"hydra_lm_head.{head}.weight": (VOCABULARY, WIDTH), f"hydra_lm_head.{head}.bias": (VOCABULARY,)}
    config = {"hydra_num_heads": STEPS, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    return {**config, "hidden_state_offset": 0, "vocab_size": VOCABULARY}, random_tensors(shapes)


RELEASE, SERVED = ("{}.0.linear", "{}.1.weight"), ("blocks.{}.layers.0", "lm_heads.{}.weight")
AUX = "eagle_aux_hidden_state_layer_ids"
NESTED = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
FORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY, "tie_word_embeddings": False}
MODELOPT = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY, "head_dim": WIDTH // HEADS}
TWO = {**eagle3_shapes("layers.0."), **layer_shapes("layers.1.", WIDTH)}
TWO |= {f"layers.1.{name}.weight": (WIDTH,) for name in ("input_layernorm", "hidden_norm")}
NORMS = {f"aux_norm_{place}.weight": (WIDTH,) for place in ("low", "mid", "high")}


def _normed_levels(tensors: Tensors) -> list[Tensor]:
    names = {f"aux_norm_{place}.weight": f"fc_norm.{i}.weight" for i, place in enumerate(("low", "mid", "high"))}
    return eagle3_levels({names.get(name, name): tensor for name, tensor in tensors.items()}, output_normed=True)


LAYOUTS = (
    Layout("SafeAILab", "EAGLE-1", lambda: _eagle(False), eagle_levels),
    Layout("vLLM", "EAGLE-1, wrapped", lambda: _eagle(True), eagle_levels),
    Layout("GRIFFIN", "GRIFFIN", _griffin, griffin_levels),
    Layout(
        "Medusa",
        "Medusa-1",
        lambda: _medusa(*RELEASE, {"medusa_num_heads": STEPS, "medusa_num_layers": 1}),
        lambda tensors: medusa_levels(tensors, *RELEASE),
        medusa_drafted,
        "medusa_lm_head.safetensors",
    ),
    Layout(
        "vLLM",
        "Medusa-1",
        lambda: _medusa(*SERVED, {"model_type": "medusa", "num_heads": STEPS, "num_hidden_layers": 1}),
        lambda tensors: medusa_levels(tensors, *SERVED),
        medusa_drafted,
    ),
    Layout("Hydra", "Hydra", _hydra, hydra_levels, hydra_drafted, "hydra_lm_head.safetensors"),
    Layout(
        "SafeAILab",
        "EAGLE-3, num_hidden_layers 40",
        lambda: _eagle3({"draft_vocab_size": 30, "num_hidden_layers": 40}, eagle3_shapes(drafted=30), 30),
        eagle3_levels,
    ),
    Layout(
        "SpecForge, SGLang",
        "EAGLE-3",
        lambda: _eagle3({**FORGE, "draft_vocab_size": 30, "pretraining_tp": 1}, eagle3_shapes(drafted=30), 30),
        eagle3_levels,
    ),
    Layout(
        "SpecForge, SGLang",
        "EAGLE-3.1 (aux norms, norm_output)",
        lambda: _eagle3({**FORGE, "use_aux_norm": True, "norm_output": True}, {**eagle3_shapes(), **NORMS}),
        _normed_levels,
    ),
    Layout(
        "AngelSlim",
        "EAGLE-3, mrope of a text",
        lambda: _eagle3({"draft_vocab_size": 30, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
                        eagle3_shapes(drafted=30), 30),
        eagle3_levels,
    ),
    Layout(
        "ModelOpt",
        "EAGLE-3, nested layer ids",
        lambda: _eagle3({**MODELOPT, "eagle_config": {**NESTED, "use_aux_hidden_state": True, AUX: [1, 3, 4]}},
                        eagle3_shapes("layers.0.")),
        eagle3_levels,
    ),
    Layout(
        "ModelOpt",
        "EAGLE-3, final state only (gpt-oss)",
        lambda: _eagle3({**MODELOPT, "eagle_config": {**NESTED, "use_aux_hidden_state": False, AUX: []}},
                        eagle3_shapes("layers.0.", taps=0)),
        lambda tensors: eagle3_levels(tensors, taps=1),
    ),
    Layout("ModelOpt", "EAGLE-3, two layers", lambda: _eagle3(MODELOPT, TWO), eagle3_levels),
    Layout(
        "vLLM",
        "EAGLE-3, logit_scale and partial_rotary_factor",
        lambda: _eagle3({**MODELOPT, "architectures": ["Eagle3LlamaForCausalLM"], "logit_scale": 0.25,
                         "partial_rotary_factor": 0.5}, eagle3_shapes("model.layers.0.")),
        lambda tensors: eagle3_levels(tensors, scale=0.25, rotated=0.5),
    ),
)  # fmt: skip


def by_definition(layout: Layout) -> list[Tensor]:
    _, tensors = layout.build()
    with torch.no_grad():
        return layout.levels({name: tensor for name, tensor in _plain(tensors).items() if name not in ("d2t", "t2d")})


# ---- speculators, by its own code

MISSING = "speculators is not installed: pip install --no-deps speculators==0.9.0 loguru"


def has_speculators() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("speculators", "loguru"))


@cache
def speculators() -> Any:
    """The package. Its models need one name of its training data code, which would import openai and datasets."""
    module = "speculators.train.data"
    if module not in sys.modules:
        stand_in = ModuleType(module)
        stand_in.BatchType = dict  # type: ignore[attr-defined]
        sys.modules[module] = stand_in
    importlib.import_module("loguru").logger.disable("speculators")
    return importlib.import_module("speculators")


def verifier(folder: Path) -> Path:
    """The target as a folder, which speculators loads beside a head."""
    if not folder.exists():
        target().model.save_pretrained(folder)
    return folder


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
VARIANTS: dict[str, tuple[Config, Config]] = {  # of a speculators config, and of its layer
    "llama": ({}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {}),
    "norm_output": ({"norm_output": True}, {}),
    "target_hidden_size": ({"target_hidden_size": WIDTH}, {}),
    "embed_requires_grad": ({"embed_requires_grad": True}, {}),
    "draft vocabulary": ({"draft_vocab_size": 30}, {}),
    "four layers read": ({AUX: [1, 2, 4, 7]}, {}),
    "two layers": ({}, {"num_hidden_layers": 2}),
    "biases": ({}, {"attention_bias": True, "mlp_bias": True}),
    "wide heads, rope": ({}, {"head_dim": 16, "rope_parameters": LINEAR}),
    "qwen3": ({"norm_before_residual": True, "fc_norm": True, "norm_output": True, "draft_vocab_size": 30},
              {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 2}),
}  # fmt: skip


def make_speculator(variant: str, place: Path) -> Any:
    """One of speculators' own models, with random weights."""
    from transformers import LlamaConfig, Qwen3Config

    flags, layer = VARIANTS[variant]
    package, given = speculators(), layer_config(**layer)
    layer_class = Qwen3Config if given.pop("model_type") == "qwen3" else LlamaConfig
    greedy = importlib.import_module("speculators.proposals").GreedyTokenProposalConfig(speculative_tokens=STEPS)
    about = package.SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[greedy],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig(name_or_path=str(verifier(place)), architectures=["LlamaForCausalLM"]),
    )
    given.pop("architectures")
    if "rope_parameters" in given:
        given.pop("rope_theta")
    inner = layer_class(**given)
    inner._attn_implementation = "eager"
    config = package.Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        speculators_config=about,
        **{"draft_vocab_size": VOCABULARY, AUX: [2, 4, 5], **flags},
    )
    model = package.Eagle3DraftModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            small = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.2)
            parameter.copy_(small + (parameter.dim() == 1))
    if model.d2t is not None:
        offsets, mask = some_tokens(len(model.d2t))
        model.load_vocab_mappings(mask, offsets)
    return model


def load_speculator(folder: Path) -> Any:
    config = speculators().SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators().SpeculatorModel.from_pretrained(str(folder), config=config).eval()


@torch.no_grad()
def speculator_levels(model: Any, taps: int) -> list[Tensor]:
    features, tokens = text(taps)
    caught: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: caught.append(out[0]))
    one = torch.zeros(1, COLUMNS, dtype=torch.long)
    model(features[None], tokens[None, 1:], one, position_ids=torch.arange(COLUMNS)[None], ttt_steps=STEPS)
    hook.remove()
    return [level[: COLUMNS - step] for step, level in enumerate(caught)]
