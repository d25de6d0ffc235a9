"""From names, paths, hub ids or ready objects to an Engine."""

from __future__ import annotations

import os
from typing import Any

import torch

from windfall import registry
from windfall.drafters.base import Drafter
from windfall.drafters.lm import LMDrafter
from windfall.engine import Engine
from windfall.heads.files import find
from windfall.heads.kinds import KINDS, kind_of, recognise
from windfall.hub import cached
from windfall.models import load_model, pick_device, pick_dtype
from windfall.policies.base import TreePolicy
from windfall.records import InputError, Launch
from windfall.target import Target

DEFAULT_POLICY = "auto"


def load(
    target: Any = None,
    drafter: Any = None,
    policy: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    coupled: bool = True,
    launch: Launch | None = None,
) -> Engine:
    """An engine that generates exactly what the target alone would.

    target: a folder, GGUF file or hub id, a transformers model, or a pair (model, tokenizer); none: the embedded model.
    drafter: a name from `registry.drafters()`, a Drafter, a draft head (a folder, a hub id or a loaded one), or what
    `target` takes, for a smaller model of the same tokenizer. policy: a name from `registry.policies()` or a
    TreePolicy. A ready model stays where it is unless `device` or `dtype` says otherwise. `coupled`: at temperature
    above 0 the drafter sees the coming noise. `launch`: how passes run on a GPU. Without a drafter, the embedded
    model's own head, else n-grams.
    """
    proposer = as_drafter(default_drafter(target) if drafter is None else drafter)
    shaper = as_policy(policy)  # first: a wrong name costs no loading
    if trust_remote_code and isinstance(proposer, LMDrafter):
        proposer.trust_remote_code = True
    judge = as_target(target, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    return make_engine(judge, proposer, shaper, coupled, launch)


def make_engine(
    target: Target,
    drafter: Drafter,
    policy: TreePolicy,
    coupled: bool = True,
    launch: Launch | None = None,
) -> Engine:
    """An engine that knows what passes cost here, if its policy asks for it."""
    engine = Engine(target, drafter, policy, coupled, launch)
    attach_costs(engine, policy)
    return engine


def attach_costs(engine: Engine, *policies: TreePolicy) -> None:
    """Tell the engine what passes cost here, if one of these policies asks for it."""
    if any(policy.uses_costs for policy in policies):
        from windfall.profiling import attach

        attach(engine)


def default_drafter(target: Any) -> str:
    """The embedded model has a head of its own; for any other, n-grams of the text cost nothing to try."""
    return "head" if target is None else "ngram"


def as_target(target: Any, **how: Any) -> Target:
    if isinstance(target, Target):
        return target
    if isinstance(target, tuple) or hasattr(target, "forward"):
        model, tokenizer = target if isinstance(target, tuple) else (target, None)
        return Target(_moved(model, how.get("device"), how.get("dtype")).eval(), tokenizer)
    if not isinstance(target, str | os.PathLike | None):
        raise InputError(f"a target is a folder, a GGUF file, a hub id or a loaded model, not {target!r}")
    loaded = load_model(target, **how)
    return Target(loaded.model, loaded.tokenizer, loaded.name)


def as_drafter(drafter: Any, **settings: Any) -> Drafter:
    """A drafter by name and settings; a head or a model, loaded or by path or hub id, drafts by its own kind."""
    if isinstance(drafter, Drafter):
        return drafter
    named = isinstance(drafter, str) and drafter in registry.drafters()
    made: Drafter = (
        registry.drafter(drafter, **settings)
        if named
        else registry.drafter(_kind_of_drafter(drafter), model=drafter, **settings)
    )
    return made


def _kind_of_drafter(model: Any) -> str:
    """The drafter that serves this model: a head's own, by what its files say, or `lm`."""
    if isinstance(model, str | os.PathLike):
        if str(model).isidentifier() and not os.path.exists(model) and cached(str(model)) is None:
            names = ", ".join(registry.drafters())
            raise InputError(
                f"there is no drafter '{model}'; there are {names}; or give a folder or hub id (owner/name)"
            )
        folder = find(os.fspath(model))
        kind = None if folder is None else recognise(folder, os.fspath(model))
    else:
        kind = kind_of(model)
        if kind is None and not (isinstance(model, tuple) or hasattr(model, "forward")):
            raise InputError(f"a drafter is a name, a folder, a hub id or a loaded head or model, not {model!r}")
    return KINDS[kind].drafter if kind else "lm"


def as_policy(policy: Any, **settings: Any) -> TreePolicy:
    """A policy by name and settings."""
    if isinstance(policy, TreePolicy):
        return policy
    made: TreePolicy = registry.policy(DEFAULT_POLICY if policy is None else policy, **settings)
    return made


def _moved(model: Any, device: str | torch.device | None, dtype: str | torch.dtype | None) -> Any:
    """A ready model, elsewhere or in another dtype if somebody says so."""
    place = model.device if device is None else pick_device(device)
    kind = model.dtype if dtype is None else pick_dtype(dtype, place)
    return model if (place, kind) == (model.device, model.dtype) else model.to(device=place, dtype=kind)
