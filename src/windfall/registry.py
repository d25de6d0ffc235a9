"""The names of policies, drafters and presets; classes are imported when they are used.

Other packages add policies and drafters with entry points; users name their own as `FILE.py:CLASS` or `MODULE:CLASS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from windfall import plugins
from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.files import parse_json

POLICIES = {
    "auto": "windfall.policies.auto:Auto",
    "none": "windfall.policies.none:NoSpeculation",
    "chain": "windfall.policies.chain:Chain",
    "specinfer": "windfall.policies.papers.specinfer:SpecInfer",
    "static": "windfall.policies.static:Static",
    "sequoia": "windfall.policies.papers.sequoia:Sequoia",
    "gt-static": "windfall.policies.papers.gt_static:GTStatic",
    "gt": "windfall.policies.papers.gt:GT",
    "opt-tree": "windfall.policies.papers.opt_tree:OptTree",
    "optimal": "windfall.policies.optimal:Optimal",
    "fixed-tree": "windfall.policies.papers.fixed_tree:FixedTree",
    "beam": "windfall.policies.beam:Beam",
    "salf": "windfall.policies.papers.salf:Salf",
    "talon": "windfall.policies.papers.talon:Talon",
    "dynatree": "windfall.policies.papers.dynatree:DynaTree",
    "ddd": "windfall.policies.papers.ddd:DDD",
    "svip": "windfall.policies.papers.svip:SVIP",
    "gammatune": "windfall.policies.papers.gammatune:GammaTune",
    "disco": "windfall.policies.papers.disco:Disco",
    "specdecpp": "windfall.policies.papers.specdecpp:SpecDecPlusPlus",
    "c2t": "windfall.policies.papers.c2t:C2T",
    "ltd": "windfall.policies.papers.ltd:LTD",
    "tetris": "windfall.policies.papers.tetris:Tetris",
    "batch-gt": "windfall.policies.papers.batch_gt:BatchGT",
    "smart": "windfall.policies.papers.smart:Smart",
    "survival": "windfall.policies.papers.survival:Survival",
    "bandit": "windfall.policies.bandit:Bandit",
}
DRAFTERS = {
    "ngram": "windfall.drafters.ngram:NGramDrafter",
    "self": "windfall.drafters.self_skip:SelfDrafter",
    "lm": "windfall.drafters.lm:LMDrafter",
    "head": "windfall.drafters.feature_head:FeatureHeadDrafter",
    "block": "windfall.drafters.block:BlockDrafter",
    "medusa": "windfall.drafters.medusa:MedusaDrafter",
    "hydra": "windfall.drafters.hydra:HydraDrafter",
}
PRESETS: dict[str, tuple[str, dict[str, Any], str]] = {  # published settings: policy, options, source
    "eagle-1": ("static", {"shape": "eagle-1"}, "EAGLE's release, mc_sim_7b_63: 25 nodes"),
    "medusa": ("static", {"shape": "medusa"}, "Medusa's release, mc_sim_7b_63: 63 nodes"),
    "eagle-2": ("beam", {"depth": 6, "k": 10, "nodes": 60}, "EAGLE-2's evaluation scripts: depth 5, total_token 60"),
    "eagle-3": ("beam", {"depth": 8, "k": 10, "nodes": 60}, "EAGLE-3's class defaults: depth 7, total_token 60"),
    "hf-assisted": ("chain", {"depth": 20, "confidence": 0.4}, "transformers 4.45 and later, the default"),
    "hf-heuristic": ("chain", {"depth": 5, "schedule": "heuristic"}, "transformers before 4.45, the default"),
    "specinfer": ("specinfer", {"widths": "1,1,3,1,1,1,1,1"}, "SpecInfer's vector as usually quoted"),
    "sequoia-demo": ("sequoia", {"nodes": 128, "depth": 9}, "Sequoia's demo: 128 nodes, 10 levels with the root"),
    "gt-vicuna-7b": ("gt", {"c": 0.11}, "the GT paper's c for Vicuna 7B with EAGLE heads"),
    "gt-vicuna-13b": ("gt", {"c": 0.08}, "the GT paper's c for Vicuna 13B with EAGLE heads"),
    "gt-vicuna-33b": ("gt", {"c": 0.05}, "the GT paper's c for Vicuna 33B with EAGLE heads"),
    "gt-medusa-plus": ("gt", {"c": 0.01, "nodes": 64, "each": True}, "the GT paper's Table 7: Medusa+ and c = 0.01"),
    "opt-tree": ("opt-tree", {"nodes": 60, "threshold": 0.5, "depth": 10}, "OPT-Tree's release: 50 to 60 nodes"),
    "specexec": ("optimal", {"beams": 128, "width": 32, "steps": 32, "decay": 0.95}, "SpecExec's release, any budget"),
    "fixed-wikitext2": (
        "fixed-tree",
        {"depth": 8, "breadth": 3, "tau": 0.1, "nodes": 256},
        "DynaTree's tuned baseline",
    ),
    "dynatree-wikitext2": ("dynatree", {"max_depth": 8}, "DynaTree's appendix; tau and the rhos from its release"),
    "dynatree-pg19": ("dynatree", {"max_depth": 9}, "DynaTree's appendix; tau and the rhos from its release"),
    "salf": ("salf", {"nodes": 60, "width": 10, "th": 0.6}, "SALF & TALF, its default for every model"),
    "salf-deepseek": ("salf", {"nodes": 60, "width": 10, "th": 0.5}, "SALF & TALF, Table 4: best for DeepSeek-R1 8B"),
    "talon": ("talon", {"nodes": 60, "k": 10, "mu": 0.03}, "TALON, its default for every model"),
    "talon-qwen3-8b": ("talon", {"nodes": 60, "k": 10, "mu": 0.01}, "TALON, Figure 13: best for Qwen3 8B"),
    "talon-dsl-8b": ("talon", {"nodes": 60, "k": 10, "mu": 0.04}, "TALON, Figure 13: best for DeepSeek-R1-Distill 8B"),
    "ddd-ltd": ("ddd", {"depth": 12, "nodes": 60}, "LTD's baseline: checks after 5, 7, 9, threshold -0.3"),
    "svip-ltd": ("svip", {"depth": 12, "nodes": 60}, "LTD's baseline: factor 0.15, threshold 0.3"),
    "gammatune-ltd": ("gammatune", {"depth": 12, "start": 8, "nodes": 60}, "LTD's baseline: 4 to 12, eta 0.2"),
}
REQUIRED = {  # methods of a user's class; of each group at least one
    "policy": [["plan", "grow", "budget"]],
    "drafter": [["start"], ["expand"], ["commit"], ["retain"]],
}
GROUPS = {"policy": "windfall.policies", "drafter": "windfall.drafters"}  # entry-point groups


def policies() -> list[str]:
    return list(_table("policy"))


def drafters() -> list[str]:
    return list(_table("drafter"))


def policy_class(name: str) -> type:
    return _find("policy", name)


def drafter_class(name: str) -> type:
    return _find("drafter", name)


def policy(name: str, /, **settings: Any) -> Any:
    """A policy by name, `policy("beam", depth=4)`, or from a user's class, `policy("my.py:Mine", least=0.2)`."""
    return options.build(policy_class(name), settings, f"policy {name}")


def drafter(name: str, /, **settings: Any) -> Any:
    """A drafter by name, `drafter("ngram", min_match=3)`, or from a user's class, `drafter("my.py:Mine")`."""
    return options.build(drafter_class(name), settings, f"drafter {name}")


def presets() -> list[str]:
    return list(PRESETS)


def preset(name: str, /, **settings: Any) -> Any:
    """A policy with published settings, `preset("eagle-2")`, or with those in a JSON file that `windfall tune` wrote;
    `settings` override them."""
    if name.endswith(".json"):
        chosen, published = read_preset(name)
    elif name in PRESETS:
        chosen, published, _ = PRESETS[name]
    else:
        raise InputError(f"there is no preset '{name}'; choose from {', '.join(PRESETS)}, or give a JSON file")
    return policy(chosen, **published | settings)


def read_preset(file: str) -> tuple[str, dict[str, Any]]:
    """The policy and its settings in a file that `windfall tune` wrote."""
    try:
        given = parse_json(Path(file).read_text("utf-8"))
        return str(given["policy"]), dict(given["settings"])
    except OSError as error:
        raise InputError(f"cannot read '{file}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"'{file}' is not a preset file as `windfall tune` writes it, with a policy and its settings"
        ) from error


def _table(kind: str) -> dict[str, str]:
    own = POLICIES if kind == "policy" else DRAFTERS
    return own | _entry_points(GROUPS[kind]) | own  # built-in names come first, and cannot be replaced


@cache
def _entry_points(group: str) -> dict[str, str]:
    """What installed packages register. Reading their metadata takes milliseconds, so it is done once."""
    return {each.name: each.value for each in entry_points(group=group)}


def is_drafter(name: str) -> bool:
    """Whether this is the name of a drafter, not a path or hub id of a head or model."""
    return name in drafters() or plugins.is_reference(name)


def split_name(parts: Sequence[str]) -> tuple[str, list[str]]:
    """The name of a policy or drafter and its settings, from the parts of a method between colons."""
    name = ":".join(parts[:2])
    known = parts[0] in {*policies(), *drafters(), *PRESETS}
    if len(parts) > 1 and not known and plugins.is_reference(name):
        return name, list(parts[2:])
    return parts[0], list(parts[1:])


def _find(kind: str, name: str) -> type:
    table = _table(kind)
    if name not in table and plugins.is_reference(name):
        return plugins.find_class(name, _base(kind), REQUIRED[kind])
    if name not in table:
        raise InputError(f"there is no {kind} '{name}'; choose from {', '.join(table)}, or give FILE.py:CLASS")
    module, _, attribute = table[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def _base(kind: str) -> type:
    from windfall.drafters.base import Drafter
    from windfall.policies.base import TreePolicy

    return TreePolicy if kind == "policy" else Drafter
