"""The files of EAGLE-3 heads as vLLM's speculators project writes them."""

from __future__ import annotations

from typing import Any

from windfall.core.types import InputError
from windfall.heads.base import HeadConfig
from windfall.heads.formats.checkpoint import Axis
from windfall.heads.formats.config import layer_config
from windfall.heads.formats.eagle3 import AUX, Eagle3Reader, variants


class SpeculatorsReader(Eagle3Reader):
    def __post_init__(self) -> None:
        if self.config["speculators_model_type"] != "eagle3":
            self.refuse(f"is a {self.config['speculators_model_type']} speculator; windfall reads eagle3 ones")
        super().__post_init__()

    def other_taps(self, ids: list[int]) -> list[list[int]]:
        return []

    def default_residual(self) -> Axis:
        return Axis("norm_before_residual", [False, True])  # speculators assumes False, vLLM assumes True


def speculators_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    if config.target_hidden != config.layer.hidden_size:
        raise InputError("a speculators head has its target's width; write this one as eagle3")
    if config.flag("final_state"):
        raise InputError("a speculators head reads several of its target's states; write this one as eagle3")
    if config.flag("fc_bias") or (config.flag("fc_norm") and config.flag("norm_before_fc")):
        raise InputError("speculators has no fc bias and one norm before fc at most; write this head as eagle3")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size or vocabulary,
        **variants(config),
        "target_hidden_size": None,
        AUX: list(config.taps),
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": layer_config(config, vocabulary),
    }
