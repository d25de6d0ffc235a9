"""Public draft-head checkpoints, read and written: EAGLE-1/2 and EAGLE-3 as their projects write them, those of
speculators, and GRIFFIN's. Tensors are trusted over configs, and every one must have its place."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windfall.checkpoints.bundled import TARGET, fingerprint
from windfall.checkpoints.model_dir import readable
from windfall.checkpoints.quiet_libs import first_line, quiet
from windfall.core.types import InputError
from windfall.heads.base import FeatureHead, HeadConfig
from windfall.heads.files import locate, read_config, read_tensors, write_folder
from windfall.heads.kinds import KINDS, load, match, plain, recognise, refuse_unread

if TYPE_CHECKING:
    from windfall.model.target import Target

THETA = 10000.0  # what rope_theta is where nobody says
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMED = 8  # tensors that an error names at the most
LAYER = (  # keys of a layer's config that are written as they are
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
)
AUX = "eagle_aux_hidden_state_layer_ids"
FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
AXES = ("mrope_section", "mrope_interleaved")  # how positions in images share the channels
PARTIAL = "partial_rotary_factor"


class Shape(NamedTuple):
    """What reading a head takes from its target."""

    layers: int
    theta: float | None = None
    context: int | None = None

    @classmethod
    def of(cls, config: Any) -> Shape:
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None)
        return cls(config.num_hidden_layers, theta, getattr(config, "max_position_embeddings", None))


class Axis(NamedTuple):
    """Something on which projects differ."""

    name: str
    told: Sequence[Any]  # what the file can mean, likeliest first
    others: Sequence[Any] = ()  # what it means to other projects; taken where it surely agrees better


@dataclass(frozen=True)
class Reading:
    """One way to take a file."""

    config: HeadConfig
    choices: dict[str, Any]  # by axis


@dataclass
class Checkpoint:
    """A head's tensors, and the ways to take them."""

    label: str
    tensors: dict[str, Tensor]
    draft_tokens: Tensor | None
    told: list[Reading] = field(default_factory=list)  # what the file can mean; one, unless it is ambiguous
    others: list[Reading] = field(default_factory=list)  # what other projects would have meant by it

    @property
    def readings(self) -> list[Reading]:
        return [*self.told, *self.others]

    def build(self, reading: Reading) -> FeatureHead:
        """The head in this reading; all readings share their tensors."""
        with torch.device("meta"):
            head: FeatureHead = load(KINDS[reading.config.kind].head)(reading.config)
        tensors = swapped(self.tensors, head) if reading.choices["order"] == "feature first" else self.tensors
        check_tensors(head, tensors, self.label)
        head.load_state_dict(tensors, assign=True)
        head.draft_tokens = self.draft_tokens
        return head.eval()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self.tensors = {name: tensor.to(device, dtype) for name, tensor in self.tensors.items()}


# ---- reading


def read(source: str | os.PathLike[str], target: Any = None) -> Any:
    """The head in a folder or hub repository, in the likeliest reading; `target` is its target's transformers config.

    `windfall.heads.loading.find_head` also tries the other readings.
    """
    folder, label = locate(source), os.fspath(source)
    kind = recognise(folder, label)
    if kind is not None and KINDS[kind].drafter != "head":
        with readable(f"cannot read '{label}'", label):
            return load(KINDS[kind].reader)(folder, target)
    checkpoint = read_checkpoint(folder, label, None if target is None else Shape.of(target))
    return checkpoint.build(checkpoint.told[0])


def read_checkpoint(folder: Path, label: str, shape: Shape | None) -> Checkpoint:
    """A feature head's files, with every way to take them."""
    config, tensors = read_config(folder, label), plainly_named(read_tensors(folder, label), label)
    kind = match(config, set(tensors))
    refuse_unread(kind, config, set(tensors), label)
    if kind is None or KINDS[kind].drafter != "head":
        known = [name for name, entry in KINDS.items() if entry.drafter == "head"]
        other = "no draft head" if kind is None else f"a {kind} head, which drafter {KINDS[kind].drafter} takes"
        raise InputError(f"'{label}' is {other}; here it must be one of {', '.join(known)}")
    with readable(f"cannot read '{label}'", label):
        draft_tokens = draft_vocabulary(config, tensors, label)
        parse = Parser(kind, config, tensors, label, shape)
        parse.tidy()
        found = Checkpoint(label, tensors, draft_tokens)
        found.told, found.others = parse.readings(None if draft_tokens is None else len(draft_tokens))
    return found


def plainly_named(tensors: dict[str, Tensor], label: str) -> dict[str, Tensor]:
    """Under the names of `FeatureHead`s; what every engine computes itself is left out."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if plain(name) in named:
            raise InputError(f"'{label}' has {plain(name)} twice, once as {name}")
        named[plain(name)] = tensor
    return named


def draft_vocabulary(config: Mapping[str, Any], tensors: dict[str, Tensor], label: str) -> Tensor | None:
    """[Vd] target id of each draft id; None: the whole vocabulary. Takes d2t and t2d out of the tensors."""
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    whole, reduced = vocabulary_size(config, tensors, label), config.get("draft_vocab_size")
    listed = whole if offsets is None else offsets.numel()
    rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else reduced or listed
    if offsets is None:
        if rows != whole:
            raise InputError(f"'{label}' drafts {rows} of {whole} tokens and lacks d2t, which says which")
        return None
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise InputError(f"'{label}': d2t must be a list of whole numbers, not {_shown(offsets)}")
    if len(offsets) != rows or reduced not in (None, rows):
        raise InputError(f"'{label}': d2t has {len(offsets)} entries for {reduced or rows} drafted tokens")
    tokens = torch.arange(len(offsets)) + offsets.long()
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < whole or len(set(tokens.tolist())) != len(tokens):
        raise InputError(f"'{label}': d2t must lead from each draft id to another of the target's {whole} tokens")
    if mask is not None and (mask.dim() != 1 or len(mask) <= tokens.max() or not bool(mask.bool()[tokens].all())):
        raise InputError(f"'{label}': d2t and t2d contradict each other")
    return None if torch.equal(tokens, torch.arange(whole)) else tokens


def vocabulary_size(config: Mapping[str, Any], tensors: Mapping[str, Tensor], label: str) -> int:
    """How many of the target's tokens the head knows: the rows of its embedding, which may be padded, if it has one."""
    own = tensors.get("embed_tokens.weight")
    return _whole(layer_of(config), "vocab_size", label) if own is None or own.dim() != 2 else len(own)


def layer_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the head's own layer."""
    wrapped = config.get("transformer_layer_config") or (config.get("model_type") == "eagle" and config.get("model"))
    return dict(wrapped if isinstance(wrapped, dict) else config)


@dataclass
class Parser:
    """From a config and tensors to the readings of a head."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    label: str
    shape: Shape | None

    def __post_init__(self) -> None:
        self.layer = layer_of(self.config)
        self.nested = self.config.get("eagle_config") or {}
        self.speculators = "speculators_model_type" in self.config
        if self.config.get("speculators_model_type", "eagle3") != "eagle3":
            self._refuse(f"is a {self.config['speculators_model_type']} speculator; windfall reads eagle3 ones")
        if not isinstance(self.nested, dict):
            self._refuse("says eagle_config, but not as a JSON object")
        said = self.config | self.nested
        self.final_state = self.kind == "eagle3" and said.get("use_aux_hidden_state") is False
        scaled = self.layer.get("logit_scale", self.config.get("logit_scale")) is not None
        self.logit_scale = self._number("logit_scale", 1.0) if scaled else 1.0

    def tidy(self) -> None:
        """Take out tensors that no engine reads, and let the head's own vocabulary include `logit_scale`."""
        for name in list(self.tensors):
            later = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
            unread = later and f"layers.{later[1]}.input_layernorm.weight" in self.tensors
            if unread or (self.final_state and name.startswith("fc.")):
                del self.tensors[name]
        own = self.tensors.get("lm_head.weight")
        if own is not None and own.is_floating_point() and self.logit_scale != 1:
            self.tensors["lm_head.weight"] = (own.float() * self.logit_scale).to(own.dtype)
            self.logit_scale = 1.0

    def readings(self, drafted: int | None) -> tuple[list[Reading], list[Reading]]:
        order = Axis("order", ["embedding first"], ["feature first"])
        axes = [self._taps(), self._residual(), self._output(), self._theta(), order]
        told = self._product(axes, [axis.told for axis in axes], drafted)
        every = self._product(axes, [(*axis.told, *axis.others) for axis in axes], drafted)
        known = [reading.choices for reading in told]
        return told, [reading for reading in every if reading.choices not in known]

    def _product(self, axes: list[Axis], values: list[Sequence[Any]], drafted: int | None) -> list[Reading]:
        names = [axis.name for axis in axes]
        choices = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
        return [Reading(self._head_config(chosen, drafted), chosen) for chosen in choices]

    def _head_config(self, chosen: dict[str, Any], drafted: int | None) -> HeadConfig:
        return HeadConfig(
            kind=self.kind,
            layer=self._layer_config(chosen["rope_theta"]),
            target_hidden=self._target_hidden(),
            taps=tuple(chosen["taps"]),
            vocab_size=vocabulary_size(self.config, self.tensors, self.label),
            draft_vocab_size=drafted,
            flags={**self._flags(), **{name: chosen[name] for name in ("norm_before_residual", "norm_output")}},
            windows=self._windows(),
            logit_scale=self.logit_scale,
        )

    # -- what differs between projects

    def _taps(self) -> Axis:
        """Which states it reads. Boundary k lies after k layers: the output of layer i is boundary i + 1."""
        if self.kind != "eagle3" or self.final_state:
            return Axis("taps", [[-1]])
        plainly, inside = self.config.get(AUX), self.nested.get(AUX)
        ids = self._ids(plainly if plainly is not None else inside)
        if ids is None:
            usual = self._usual_taps()
            return Axis("taps", [usual], self._possible([[i + 1 for i in usual], [i - 1 for i in usual]]))
        if plainly is not None:
            return Axis("taps", [ids], [] if self.speculators else self._possible([[i + 1 for i in ids]]))
        return Axis("taps", self._possible([[i + 1 for i in ids], ids]) or [ids])

    def _usual_taps(self) -> list[int]:
        if self.shape is None:
            self._refuse("does not say which of the target's states it reads; read it together with its target")
        layers = self.shape.layers if self.shape else 0
        usual = [2, layers // 2, layers - 3]
        if not 2 < usual[1] < usual[2] or self._count() != 3:
            self._refuse(f"does not say which {self._count()} of its target's {layers} layers it reads")
        return usual

    def _possible(self, options: Iterable[list[int]]) -> list[list[int]]:
        deepest = self.shape.layers if self.shape else None
        return [ids for ids in options if min(ids) >= 0 and (deepest is None or max(ids) <= deepest)]

    def _residual(self) -> Axis:
        given = self.config.get("norm_before_residual")
        if given is not None or self.kind != "eagle3":
            return Axis("norm_before_residual", [bool(given)])
        if self.speculators:  # itself says False where the key is missing, vLLM says True
            return Axis("norm_before_residual", [False, True])
        return Axis("norm_before_residual", [False], [True])

    def _output(self) -> Axis:
        """Whether the next step reads the normed state; EAGLE-3.1 heads do, and their files may not say so."""
        given = (self.config | self.nested).get("norm_output")
        if given is not None or self.kind != "eagle3":
            return Axis("norm_output", [bool(given)])
        return Axis("norm_output", [False], [True])

    def _theta(self) -> Axis:
        given = self._rope().get("rope_theta") or self.layer.get("rope_theta")
        if given is not None:
            if not isinstance(given, int | float) or given <= 0:
                self._refuse(f"says rope_theta: {given!r}, which must be a number above 0")
            return Axis("rope_theta", [float(given)])
        target = self.shape.theta if self.shape else None
        return Axis("rope_theta", [THETA] if target in (None, THETA) else [THETA, float(target or THETA)])

    # -- what the file says

    def _ids(self, given: Any) -> list[int] | None:
        if given is None:
            return None
        if not isinstance(given, list) or not given or not all(isinstance(i, int) and i >= 0 for i in given):
            self._refuse(f"says {AUX}: {given!r}, which must be a list of layers")
        return list(given)

    def _count(self) -> int:
        """How many states it reads."""
        if self.final_state:
            return 1
        ids = self._ids(self.config.get(AUX) if self.config.get(AUX) is not None else self.nested.get(AUX))
        norms = sum(name.startswith("fc_norm.") for name in self.tensors)
        return len(ids) if ids else self.config.get("num_aux_hidden_states") or norms or 3

    def _target_hidden(self) -> int:
        width = self._whole("hidden_size")
        if self.kind != "eagle3" or self.final_state:
            return width
        fused, taps = self._columns("fc.weight"), self._count()
        told = self.config.get("target_hidden_size") or fused // taps
        if told * taps != fused:
            self._refuse(f"has an fc.weight with {fused} columns for {taps} states of width {told}")
        return int(told)

    def _flags(self) -> dict[str, bool]:
        has, said = self.tensors.__contains__, self.config | self.nested
        if self.kind == "eagle" and said.get("eagle_fc_bias", self.layer.get("bias")) and not has("fc.bias"):
            self._refuse("says that fc has a bias, and lacks fc.bias")
        return {
            "fc_bias": has("fc.bias"),
            "fc_norm": has("fc_norm.0.weight") or bool(said.get("fc_norm") or said.get("use_aux_norm")),
            "norm_before_fc": has("input_norm.weight") or bool(said.get("norm_before_fc")),
            "final_state": self.final_state,
            "own_embedding": has("embed_tokens.weight"),
            "own_vocabulary": has("lm_head.weight"),
        }

    def _layer_config(self, theta: float) -> LlamaConfig:
        heads, width = self._whole("num_attention_heads"), self._whole("hidden_size")
        rope, context = self._rope(), self.shape and self.shape.context
        has = self.tensors.__contains__
        attention, queries = "layers.0.self_attn.", self._rows("layers.0.self_attn.q_proj.weight")
        values = {
            "hidden_size": width,
            "intermediate_size": self._whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("num_key_value_heads", heads),
            "num_hidden_layers": self._layers(),
            "head_dim": queries // heads,
            "max_position_embeddings": self._whole("max_position_embeddings", context or 2048),
            "rms_norm_eps": self._number("rms_norm_eps", 1e-6),
            "hidden_act": self._activation(),
            "vocab_size": self._whole("vocab_size"),
            "attention_bias": has(f"{attention}q_proj.bias"),
            "mlp_bias": has("layers.0.mlp.gate_proj.bias"),
            "rope_parameters": {**rope, "rope_theta": theta},
        }
        rotated = int(values["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        if rotated < 2 or rotated % 2:
            self._refuse(f"rotates {rotated} of {values['head_dim']} channels, which must be an even number above 0")
        if self.kind == "griffin" and values["num_hidden_layers"] != 1:
            self._refuse(f"has {values['num_hidden_layers']} layers; a griffin head has one")
        try:
            with quiet():
                config = LlamaConfig(**values)
        except Exception as error:
            raise InputError(f"the config.json of '{self.label}' cannot be used: {first_line(error)}") from error
        config.qk_norm, config.o_bias = has(f"{attention}q_norm.weight"), has(f"{attention}o_proj.bias")
        return config

    def _windows(self) -> tuple[int | None, ...]:
        """By layer: `sliding_window` in layers that `layer_types` calls sliding, or, without that list, in those from
        `max_window_layers` on if `use_sliding_window` is true."""
        layers, kinds = self._layers(), self.layer.get("layer_types")
        used = self.layer.get("use_sliding_window")
        if self.layer.get("sliding_window") is None or used is False or (kinds is None and used is None):
            return ()
        if kinds is None:
            first = self.layer.get("max_window_layers") or 0
            kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) < layers:
            self._refuse(f"says layer_types: {kinds!r}, which must name the attention of its {layers} layers")
        if odd := [kind for kind in kinds[:layers] if kind not in (FULL, SLIDING)]:
            self._refuse(f"has a layer of type {odd[0]!r}; windfall knows {FULL} and {SLIDING}")
        window = self._whole("sliding_window")
        found = tuple(window if kind == SLIDING else None for kind in kinds[:layers])
        return found if any(found) else ()

    def _layers(self) -> int:
        """As many as there are tensors for: configs may give the target's number."""
        count = 1
        while f"layers.{count}.self_attn.q_proj.weight" in self.tensors:
            count += 1
        return count

    def _rope(self) -> dict[str, Any]:
        """Its rotary positions. Those of several axes (mrope) are all the same in a text, which makes them plain."""
        found = self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}
        if not isinstance(found, dict):
            self._refuse("says rope_scaling, but not as a JSON object")
        kind = found.get("rope_type") or found.get("type") or "default"
        kind = "default" if kind == "mrope" else kind
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            self._refuse(f"has rotary positions of a kind that windfall does not know ({kind})")
        rope = {key: value for key, value in copy.deepcopy(found).items() if key not in (*AXES, PARTIAL, "type")}
        share = found.get(PARTIAL) if found.get(PARTIAL) is not None else self.layer.get(PARTIAL)
        if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
            self._refuse(f"says {PARTIAL}: {share!r}, which must be a number above 0 and up to 1")
        return {**rope, "rope_type": kind, **({PARTIAL: share} if share not in (None, 1) else {})}

    def _activation(self) -> str:
        name = self.layer.get("hidden_act", "silu")
        if name not in ACT2FN:
            self._refuse(f"has the activation {name!r}, which transformers does not know")
        return str(name)

    def _columns(self, name: str) -> int:
        return int(self._matrix(name).shape[1])

    def _rows(self, name: str) -> int:
        return int(self._matrix(name).shape[0])

    def _matrix(self, name: str) -> Tensor:
        found = self.tensors.get(name)
        if found is None or found.dim() != 2:
            self._refuse(f"lacks {name}" if found is None else f"has a {name} of shape {tuple(found.shape)}")
        return self.tensors[name]

    def _whole(self, key: str, default: int | None = None) -> int:
        return _whole(self.layer, key, self.label, default)

    def _number(self, key: str, default: float) -> float:
        value = self.layer.get(key, self.config.get(key, default))
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self._refuse(f"says {key}: {value!r}, which must be a number above 0")
        return float(value)

    def _refuse(self, reason: str) -> None:
        raise InputError(f"'{self.label}' {reason}")


def _whole(layer: Mapping[str, Any], key: str, label: str, default: int | None = None) -> int:
    value = layer.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the config.json of '{label}' lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"the config.json of '{label}' says {key}: {value!r}, which must be a whole number above 0")
    return value


def check_tensors(head: FeatureHead, tensors: Mapping[str, Tensor], label: str) -> None:
    """Every tensor of a head, and no other, in its shape and as floating-point numbers."""
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    faults = []
    if missing := sorted(wanted.keys() - tensors.keys()):
        faults.append(f"lacks {_listed(missing)}")
    if unused := sorted(tensors.keys() - wanted.keys()):
        faults.append(f"has {_listed(unused)}, which this kind of head does not use")
    shapes = [
        f"{name} as {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in sorted(wanted.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if shapes:
        faults.append(f"has {_listed(shapes)}")
    if odd := sorted(name for name in wanted.keys() & tensors.keys() if tensors[name].dtype not in FLOATS):
        faults.append(f"must have floating-point numbers in {_listed([f'{n} ({tensors[n].dtype})' for n in odd])}")
    if faults:
        raise InputError(f"'{label}', taken for a head of kind {head.config.kind}, {'; it '.join(faults)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def swapped(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    """As a project would have written them that puts the feature before the embedding."""
    width = head.config.layer.hidden_size
    names = {"eagle": ["fc.weight"], "griffin": ["fc.fc.weight", "fc.mlp.up_proj.weight"]}.get(
        head.config.kind, [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    )
    turned = {name: tensors[name].roll(width, 1) for name in names if name in tensors and tensors[name].dim() == 2}
    return {**tensors, **turned}


# ---- writing

FORMATS = {"eagle": "eagle", "eagle3": "eagle3", "speculators": "eagle3", "griffin": "griffin"}  # → kind


def write(
    head: FeatureHead,
    folder: str | os.PathLike[str],
    format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    light: bool = False,
    target: Target | None = None,
) -> None:
    """Write a head as other engines read it; `format` is its kind, or speculators for an eagle3 head.

    What it borrows from its target is written too, unless `light`; `target` adds its name and fingerprint.
    """
    kind = head.config.kind
    if KINDS[kind].drafter != "head" and format in (None, kind):
        load(KINDS[kind].writer)(head, folder)
        return
    format = format or kind
    if FORMATS.get(format) != kind:
        fitting = [name for name, own in FORMATS.items() if own == kind] or [kind]
        raise InputError(f"a head of kind {kind} cannot be written as '{format}'; choose from {', '.join(fitting)}")
    if format == "speculators":
        _check_speculators(head.config)
    tensors = _tensors(head, light)
    vocabulary = len(tensors["embed_tokens.weight"]) if "embed_tokens.weight" in tensors else head.config.vocab_size
    config = _CONFIGS[format](head.config, vocabulary, str(dtype).removeprefix("torch."))
    if "lm_head.weight" not in tensors and head.config.logit_scale != 1:
        config["logit_scale"] = head.config.logit_scale
    if target is not None:
        config[TARGET] = {"name": target.name, **fingerprint(target)}
        if format == "speculators":
            named = {"name_or_path": _source(target), "architectures": [type(target.model).__name__]}
            config["speculators_config"]["verifier"] = named
    saved = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in tensors.items()}
    if format == "eagle3":
        saved = {_midlayer(name): tensor for name, tensor in saved.items()}
    write_folder(Path(folder), config, {**saved, **_mapping(head, vocabulary, light)})


def _source(target: Target) -> str:
    """Where speculators, which loads the target too, finds it: on the hub, or in its folder."""
    return target.name if "/" in target.name else getattr(target.model, "name_or_path", "") or target.name


def _tensors(head: FeatureHead, light: bool) -> dict[str, Tensor]:
    """The head's own, and what it borrows where the format has a place for it."""
    tensors = dict(head.state_dict())
    if light:
        return tensors
    borrowed = head._shared
    if not borrowed and (head.embed_tokens is None or (head.lm_head is None and head.config.kind == "eagle3")):
        raise InputError("a head that borrows from its target is written beside it: fit it first, or write it light")
    if head.embed_tokens is None:
        tensors["embed_tokens.weight"] = borrowed["embedding"]
    if head.lm_head is None and head.config.kind == "eagle3":
        if borrowed["bias"] is not None:
            raise InputError("the target's vocabulary head has a bias, which eagle3 has no place for; write it light")
        tensors["lm_head.weight"] = borrowed["vocabulary"]
    return tensors


def _mapping(head: FeatureHead, vocabulary: int, light: bool) -> dict[str, Tensor]:
    """Which tokens are drafted, as the public formats say it; a light head says it in half the bytes."""
    if head.draft_tokens is None:
        return {}
    tokens = head.draft_tokens.cpu().long()
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[tokens] = True
    offsets = tokens - torch.arange(len(tokens))
    return {"d2t": offsets.int() if light else offsets, "t2d": mask}


def _midlayer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _layer(config: HeadConfig, vocabulary: int) -> dict[str, Any]:
    """The head's own layer as transformers writes it."""
    layer = config.layer
    rope = {key: value for key, value in layer.rope_parameters.items() if key not in ("rope_theta", "type", PARTIAL)}
    share = layer.rope_parameters.get(PARTIAL)
    return {
        "model_type": "qwen3" if getattr(layer, "qk_norm", False) else "llama",
        **{key: getattr(layer, key) for key in LAYER},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        **({} if share is None else {PARTIAL: share}),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **_sliding(config),
    }


def _sliding(config: HeadConfig) -> dict[str, Any]:
    """The windows of its layers as speculators writes them."""
    sizes = {window for window in config.windows if window is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise InputError(f"layers with different windows ({', '.join(map(str, sorted(sizes)))}) cannot be written")
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    return {"sliding_window": sizes.pop(), "use_sliding_window": True, "layer_types": kinds}


def _eagle_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    named = {"architectures": ["LlamaForCausalLM"], "torch_dtype": dtype}
    bias = {"bias": config.flag("fc_bias")} if config.kind == "eagle" else {"qkv_bias": config.layer.attention_bias}
    return {**named, **_layer(config, vocabulary), **bias}


def _eagle3_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Layers as boundaries (vLLM) at the top, as outputs (SGLang, ModelOpt) inside `eagle_config`."""
    outputs = [tap - 1 for tap in config.taps]
    nested = {"use_aux_hidden_state": True, AUX: outputs} if min(outputs) >= 0 else None
    nested = {"use_aux_hidden_state": False} if config.flag("final_state") else nested
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": dtype,
        **_layer(config, vocabulary),
        "draft_vocab_size": config.draft_vocab_size or vocabulary,
        "target_hidden_size": config.target_hidden,
        **_variants(config),
        **({} if config.flag("final_state") else {AUX: list(config.taps)}),
        **({"eagle_config": nested} if nested else {}),
    }


def _variants(config: HeadConfig) -> dict[str, bool]:
    return {name: config.flag(name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}


def _check_speculators(config: HeadConfig) -> None:
    if config.target_hidden != config.layer.hidden_size:
        raise InputError("a speculators head has its target's width; write this one as eagle3")
    if config.flag("final_state"):
        raise InputError("a speculators head reads several of its target's states; write this one as eagle3")
    if config.flag("fc_bias") or (config.flag("fc_norm") and config.flag("norm_before_fc")):
        raise InputError("speculators has no fc bias and one norm before fc at the most; write this head as eagle3")


def _speculators_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size or vocabulary,
        **_variants(config),
        "target_hidden_size": None,
        AUX: list(config.taps),
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": _layer(config, vocabulary),
    }


_CONFIGS = {
    "eagle": _eagle_config,
    "griffin": _eagle_config,
    "eagle3": _eagle3_config,
    "speculators": _speculators_config,
}
