"""The files of DFlash, DFlash 2, DSpark and JetSpec heads: speculators', and those of z-lab, SpecForge, DeepSpec.

What tensors tell is taken from them: the kind and rank of the pair score, the convolution, the number of layers. The
confidence head of DSpark is not read, because windfall calibrates what it drafts.
"""

from __future__ import annotations

import re
from typing import Any

from windfall.heads.block import BlockConfig
from windfall.heads.formats.block_reader import BlockReader

RENAMED = (  # names of other projects → names of the module
    (r"candidate_selector\.predecessor_codebook(\.weight)?", "pair.before"),
    (r"candidate_selector\.successor_codebook(\.weight)?", "pair.after"),
    (r"candidate_selector\.hidden_projection\.(\w+)", r"pair.hidden.\1"),
    (r"(markov_head\.)?markov_w1\.weight", "pair.before"),
    (r"(markov_head\.)?markov_w2\.weight", "pair.after"),
    (r"markov_head\.gate_proj\.(\w+)", r"pair.gate.\1"),
    (r"markov_head\.joint_proj\.(\w+)", r"pair.joint.\1"),
)
UNUSED = ("confidence_head.", "verifier_norm.", "verifier_lm_head.")
MARKS = {
    "selector": "pair.hidden.weight",
    "gated": "pair.gate.weight",
    "rnn": "pair.joint.weight",
    "markov": "pair.before",
}
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")  # z-lab, NVIDIA, JetSpec
ZLAB_BLOCK, TOP_K = 16, 16  # what files mean that do not say


class DFlashReader(BlockReader):
    def __post_init__(self) -> None:
        for name in list(self.tensors):
            tensor = self.tensors.pop(name)
            if not name.startswith(UNUSED):
                self.tensors[_renamed(name)] = tensor
        super().__post_init__()
        inner = self.config.get("dflash_config") or {}
        if not isinstance(inner, dict):
            self.refuse("says dflash_config, but not as a JSON object")
        self.said = {**self.config, **inner}
        self.type = self.config.get("speculators_model_type")
        if self.type is not None and not isinstance(self.config.get("transformer_layer_config"), dict):
            self.refuse("lacks transformer_layer_config")

    def block_config(self, drafted: int | None) -> BlockConfig:
        self._scale_logits()
        windows, causal = self._windows(), self._causal_layers()
        width = self.positive_int("hidden_size")
        return self.made(
            self._taps(),
            drafted,
            {
                "bidirectional": causal is not None,
                "predict_anchor": self._predicts_anchor(),
                "anchor_windows": self.type is not None,
                "fc_norm": "fc_norm.0.weight" in self.tensors,
            },
            block=self._size("block_size", ZLAB_BLOCK if self.type is None else 8),
            candidates=self._size("selector_top_k", TOP_K),
            **self._pair(),
            **self._convolution(width),
            mask_token=self._mask_token(),
            windows=windows,
            causal_layers=causal or (),
            embedding_scale=self._number("input_embedding_scale") or 1.0,
            softcap=None if self.type else self._number("final_logit_softcapping"),
        )

    def _taps(self) -> list[int]:
        """speculators counts states, the others the layers whose outputs are read; -1 is the embedding.

        A last layer's output is what transformers returns: the state after the final norm.
        """
        if self.type is not None:
            return self.whole_numbers("aux_hidden_state_layer_ids", self.said.get("aux_hidden_state_layer_ids"))
        last = self.shape.layers if self.shape else self.said.get("num_target_layers")
        given = self.said.get("target_layer_ids")
        if given is None and last is not None:
            given = _spread(last, self.layers())
        ids = self.whole_numbers("target_layer_ids", given, lowest=-1)
        return [-1 if i + 1 == last else i + 1 for i in ids]

    def _predicts_anchor(self) -> bool:
        """Whether the first row predicts a token, as in DSpark; in DFlash it does not."""
        for key in ("sample_from_anchor", "shift_label"):
            if self.said.get(key) is not None:
                return bool(self.said[key])
        named = str(self.config.get("architectures"))
        return self.type == "dspark" or self.said.get("projector_type") == "dspark" or "DSpark" in named

    def _causal_layers(self) -> tuple[int, ...] | None:
        """The layers in which rows see no later rows: those with windows, unless the file says otherwise. None: all."""
        sliding = tuple(layer for layer, window in enumerate(self._windows()) if window is not None)
        if self.type is not None:
            return () if self.said.get("sliding_window_non_causal") else sliding
        said = [self.said[key] for key in CAUSAL_KEYS if self.said.get(key) is not None]
        if "JetSpec" in str(self.config.get("architectures")) or self.said.get("head_type") == "causal":
            said = [True]
        if not said:
            return sliding
        return None if any(said) else ()

    def _pair(self) -> dict[str, Any]:
        kind = next((kind for kind, name in MARKS.items() if name in self.tensors), None)
        if kind is None:
            return {"pair": "none"}
        return {"pair": kind, "rank": self.matrix("pair.before").shape[1]}

    def _convolution(self, width: int) -> dict[str, int]:
        if "layers.0.attention_conv.base_kernel" not in self.tensors:
            return {}
        base, rows = self.tensors["layers.0.attention_conv.base_kernel"], self._conv_rows()
        taps = base.shape[1] if base.dim() == 3 else 0
        groups = rows // (2 * taps) if taps else 0
        if not groups or width % groups or rows != 2 * taps * groups:
            self.refuse(f"has a convolution of shapes {tuple(base.shape)} and {rows} rows, which do not fit together")
        return {"conv_taps": taps, "conv_group": width // groups}

    def _conv_rows(self) -> int:
        return self.matrix("layers.0.attention_conv.kernel_projection.weight").shape[0]

    def _mask_token(self) -> int:
        found = self.said.get("mask_token_id")
        if type(found) is not int:
            self.refuse(f"says mask_token_id: {found!r}, which must be a token")
        return found

    def _scale_logits(self) -> None:
        """z-lab's `output_multiplier` is our `logit_scale`; it is part of a vocabulary of the head's own."""
        factor = self._number("output_multiplier")
        own = self.tensors.get("lm_head.weight")
        if factor is None or self.type is not None:
            return
        if own is None:
            self.logit_scale *= factor
        else:
            self.tensors["lm_head.weight"] = (own.float() * factor).to(own.dtype)

    def _size(self, key: str, default: int) -> int:
        found = self.said.get(key, default)
        if type(found) is not int or found < 1:
            self.refuse(f"says {key}: {found!r}, which must be a whole number above 0")
        return found

    def _number(self, key: str) -> float | None:
        """A number above 0; None if the file does not say it, or says 0."""
        found = self.said.get(key)
        if found is None or found == 0:
            return None
        if not isinstance(found, int | float) or isinstance(found, bool) or found < 0:
            self.refuse(f"says {key}: {found!r}, which must be a number above 0")
        return float(found)


def _spread(target_layers: int, count: int) -> list[int]:
    """The layers that a head reads if its file does not say it: from the second to the third from last, evenly."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + place * (target_layers - 4) / (count - 1)) for place in range(count)]


def _renamed(name: str) -> str:
    for pattern, becomes in RENAMED:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, becomes, name)
    return name
