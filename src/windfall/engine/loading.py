"""From names, paths, hub ids or ready objects to an Engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from windfall import registry
from windfall.checkpoints.bundled import bundled_head
from windfall.checkpoints.find import Loaded, load_fastest, pick_device, pick_dtype
from windfall.checkpoints.hub import cached
from windfall.checkpoints.quiet_libs import first_line
from windfall.core.options import checked, refuse_settings, require_flag
from windfall.core.types import GpuOptions, InputError
from windfall.drafters.base import Drafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.check_records import known_result, record_result
from windfall.engine.engine import Engine
from windfall.engine.memory import as_bytes
from windfall.engine.service import checked_requests
from windfall.heads.files import find, trained
from windfall.heads.kinds import KINDS, kind_of, recognise
from windfall.model.target import Target, refuse_offloaded, uncompiled
from windfall.policies.base import TreePolicy

DEFAULT_POLICY = "auto"


def load(
    target: Any = None,
    drafter: Any = None,
    policy: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    coupled: bool = True,
    *,
    drafter_options: Mapping[str, Any] | None = None,
    policy_options: Mapping[str, Any] | None = None,
    preset: str | None = None,
    graphs: bool | None = None,
    compile: bool = False,
    exact: bool = True,
    host_policies: bool = False,
    gpu_options: GpuOptions | None = None,
    max_requests: int | None = None,
    kv_memory: str | int | None = None,
    weights: str | None = None,
) -> Engine:
    """An engine that generates exactly what the target alone would.

    target: a folder, a GGUF file or a hub id, a transformers model, or a pair (model, tokenizer). None: the embedded
        model.
    drafter: a name from `windfall policies`, a Drafter, a draft head (folder, hub id or loaded), or a smaller model of
        the same tokenizer, given as `target` is. None: the bundled head for SmolLM2-135M-Instruct (the embedded model)
        in any precision, its GGUF files, and light fine-tunes of it; n-grams for any other target.
    policy: a name from `windfall policies` or a TreePolicy. None: `auto`. A drafter or policy of your own is
        `FILE.py:CLASS` or `MODULE:CLASS`.
    device, dtype: None: the best device there is, and the dtype that suits it; a loaded model stays as it is.
    trust_remote_code: run Python code that comes with the model.
    coupled: at temperature above 0, show the drafter the noise of the coming draws.
    drafter_options, policy_options: options by name, as `windfall policies` lists them.
    preset: the policy and options of a published method, or a JSON file that `windfall tune` wrote, instead of
        `policy`; `policy_options` override its options.
    graphs: on a GPU, run passes as CUDA graphs. None: where there is a GPU.
    compile: on a GPU, compile models without a fused forward and without sliding windows with torch.compile.
    exact: on a GPU, add the numbers of every row in one order, so that the text is plain decoding's in bfloat16 and
        float16, too. A model that does not support this runs without it, with a warning. False (`--fast`): add in
        another order where that is faster; a near-tie between two tokens may then resolve differently, so the text
        may differ from plain decoding's.
    host_policies: on a GPU, let every policy decide on the host.
    gpu_options: the last four as one record, instead of them.
    max_requests: the largest number of texts that run together. None: 8 on a CPU, 128 on other devices.
    kv_memory: memory for the KV caches of the texts that run together, such as "4GB" or a number of bytes; others
        wait. None: half of the memory that is free.
    weights: on a CPU, how the weights of the target's linear layers are stored: "bf16", "int8" (rounded, 32 to a
        scale), "file" (the numbers of a GGUF file) or "full" (in `dtype`). Smaller weights are faster; the text is that
        of the model with these weights. None: in float32 and with a C compiler, "file" for a GGUF file, and "bf16" for
        weights that are stored in bf16, which changes none of them; else "full".
    """
    words = {"graphs": graphs, "compile": compile, "exact": exact, "host_policies": host_policies}
    on_gpu = as_gpu_options(gpu_options, **words)
    for name, value in (("coupled", coupled), ("trust_remote_code", trust_remote_code)):
        require_flag(name, value)
    as_bytes(kv_memory)  # before the target: a wrong size costs no loading
    checked_requests(max_requests)
    settings = checked(drafter_options, "drafter_options")
    if drafter is None and target is None:
        drafter = default_drafter(None)
    made_drafter = None if drafter is None else as_drafter(drafter, **settings)
    made_policy = choose_policy(policy, policy_options, preset)  # before the target: a wrong name costs no loading
    if trust_remote_code and isinstance(made_drafter, LMDrafter):
        made_drafter.trust_remote_code = True
    how = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "weights": weights}
    made_target = as_target(target, **how)
    if made_drafter is None:
        made_drafter = as_drafter(default_drafter(made_target), **settings)
    engine = Engine(
        made_target, made_drafter, made_policy, coupled, on_gpu, max_requests=max_requests, kv_memory=kv_memory
    )
    attach_costs(engine, made_policy)
    return engine


def as_gpu_options(
    given: GpuOptions | None, *, graphs: Any, compile: Any, exact: Any, host_policies: Any
) -> GpuOptions:
    """How passes run on a GPU: as given, or from the four options by name."""
    named = GpuOptions(graphs, compile, exact, not require_flag("host_policies", host_policies))
    if given is None:
        return named
    if not isinstance(given, GpuOptions):
        raise InputError(f"gpu_options takes a windfall.GpuOptions, not {given!r}")
    if named != GpuOptions():
        raise InputError("give gpu_options, or graphs, compile, exact and host_policies, not both")
    return given


def choose_policy(
    policy: Any = None, policy_options: Mapping[str, Any] | None = None, preset: str | None = None
) -> TreePolicy:
    """A policy by name and options, or a preset, which names both."""
    settings = checked(policy_options, "policy_options")
    if preset is None:
        return as_policy(policy, **settings)
    if policy is not None:
        raise InputError("a preset names a policy and its options; give a preset or a policy, not both")
    if not isinstance(preset, str | os.PathLike):
        raise InputError(f"a preset is a name or a JSON file, not {preset!r}")
    chosen: TreePolicy = registry.preset(os.fspath(preset), **settings)
    return chosen


def attach_costs(engine: Engine, *policies: TreePolicy) -> None:
    """Give the engine the measured costs of passes on this machine, if one of these policies uses them."""
    if any(policy.uses_costs for policy in policies):
        from windfall.engine.profiling import attach

        attach(engine)


def default_drafter(target: Target | None) -> str:
    """The bundled head for the embedded model (None) and targets that it was made for; else n-grams of the text."""
    return "head" if target is None or bundled_head(target) else "ngram"


def as_target(target: Any, **how: Any) -> Target:
    ready = isinstance(target, Target | tuple) or hasattr(target, "forward")
    if ready and how.get("weights") is not None:
        raise InputError("weights are packed while a model is loaded; give its folder, GGUF file or hub id")
    if isinstance(target, Target):
        return target
    if ready:
        model, tokenizer = target if isinstance(target, tuple) else (target, None)
        return Target(_moved(model, how.get("device"), how.get("dtype")).eval(), tokenizer)
    if not isinstance(target, str | os.PathLike | None):
        raise InputError(f"a target is a folder, a GGUF file, a hub id or a loaded model, not {target!r}")
    return _checked(load_fastest(target, **how))


def _checked(loaded: Loaded) -> Target:
    """A target that scores a small tree correctly. The check runs once for each kind of model: that it passed is noted
    in the cache folder, unless a warning is due each time."""
    unknown = known_result(loaded.model, "checked") is None
    target = Target(loaded.model, loaded.tokenizer, loaded.name, check=unknown)
    if unknown and not target.rows_depend:
        record_result(loaded.model, "checked", loaded.name)
    return target


def as_drafter(drafter: Any, **settings: Any) -> Drafter:
    """A drafter by name and options, or from a draft head or model: loaded, a path or a hub id."""
    if isinstance(drafter, Drafter):
        refuse_settings(settings, "drafter", type(drafter).__name__)
        return drafter
    named = isinstance(drafter, str) and registry.is_drafter(drafter)
    if not named and "model" in settings:
        raise InputError("a drafter that is a model takes no option 'model'; give the model once")
    if settings.get("model") is not None:
        _require_model(settings["model"])
    if not named and isinstance(drafter, str | os.PathLike) and os.path.isdir(drafter):
        drafter = os.fspath(trained(Path(drafter)))
    made: Drafter = (
        registry.drafter(drafter, **settings)
        if named
        else registry.drafter(_kind_of_drafter(drafter), model=drafter, **settings)
    )
    return made


def _kind_of_drafter(model: Any) -> str:
    """The name of the drafter for this model: that of the head's kind, or `lm`."""
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
        if kind is None:
            _require_model(model)
    return KINDS[kind].drafter if kind else "lm"


def _require_model(model: Any) -> None:
    """Refuse what is no path, hub id, loaded model or head, or pair of a model and its tokenizer."""
    if not (isinstance(model, str | os.PathLike | tuple) or hasattr(model, "forward")):
        raise InputError(f"a drafter is a name, a folder, a hub id or a loaded head or model, not {model!r}")


def as_policy(policy: Any, **settings: Any) -> TreePolicy:
    """A policy by name and options."""
    if isinstance(policy, TreePolicy):
        refuse_settings(settings, "policy", type(policy).__name__)
        return policy
    if not isinstance(policy, str | None):
        raise InputError(f"a policy is a name or a TreePolicy, not {policy!r}")
    made: TreePolicy = registry.policy(DEFAULT_POLICY if policy is None else policy, **settings)
    return made


def _moved(model: Any, device: str | torch.device | None, dtype: str | torch.dtype | None) -> Any:
    """A loaded model, moved to another device or dtype if the caller asks for one."""
    model = uncompiled(model)
    refuse_offloaded(model)
    place = model.device if device is None else pick_device(device)
    kind = model.dtype if dtype is None else pick_dtype(dtype, place)
    changes = {"device": place} if place != model.device else {}
    changes |= {"dtype": kind} if kind != model.dtype else {}
    try:
        return model.to(**changes) if changes else model
    except (ValueError, NotImplementedError) as error:  # some quantised models stay as they are
        wanted = " and ".join(map(str, changes.values()))
        raise InputError(f"cannot move {type(model).__name__} to {wanted}: {first_line(error)}") from error
