"""`windfall tree`, `policies` and `doctor`: draw a draft tree, list policies and drafters, check the installation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from windfall import registry
from windfall.cli import config_file
from windfall.cli.declare import argument, complete, json_option, option
from windfall.cli.options import ModelOptions, PolicyOptions, PromptOptions, SamplingOptions
from windfall.cli.session import check_chat, with_seed
from windfall.core.errors import InputError
from windfall.core.files import replace_text
from windfall.core.options import describe
from windfall.core.wording import counted
from windfall.plugins import is_reference
from windfall.render import console


def tree(
    source: PromptOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    cycle: int | None = option(None, "Number of the cycle, from 1. Default: the cycle that accepted most.", min=1),
    svg: Path | None = option(None, "Write the drawing to this SVG file instead."),
) -> None:
    """Draw the draft tree of one cycle: the drafted, verified and accepted tokens."""
    from windfall.render import tree_drawing

    if svg is not None and svg.suffix.lower() != ".svg":
        raise InputError(f"--svg writes an SVG file, and the name '{svg}' does not end in .svg")
    prompt, keywords = source.read(), with_seed(sampling.keywords(), announce=True)
    engine = model.load(policy.make())
    if source.system is not None:
        check_chat(engine)
    steps, tokens = [], 0
    with console.progress("Decoding") as progress:
        for step in engine.stream(prompt, raw=source.raw, **keywords):
            steps.append(step)
            tokens += len(step.tokens)
            progress(tokens / keywords["max_new_tokens"])
    if cycle and cycle > len(steps):
        raise InputError(f"the text has {counted(len(steps), 'cycle')}; there is no cycle {cycle}")
    chosen = steps[cycle - 1] if cycle else max(steps, key=lambda step: step.accepted)
    if svg is None:
        console.stdout().print(tree_drawing.draw(chosen, engine.target.tokenizer))
        console.stdout().print(Text(tree_drawing.summary(chosen)))
    else:
        replace_text(svg, tree_drawing.svg(chosen, engine.target.tokenizer))
        console.note(str(svg))


def policies(
    name: str | None = argument(
        None,
        "A policy, drafter or preset, or a policy of your own as FILE.py:CLASS. Default: all.",
        autocompletion=complete("policies", "drafters", "presets"),
    ),
    json: bool = json_option(),
    drafters: bool = option(False, "List the drafters only."),
) -> None:
    """List policies, drafters and presets, with the options that --set and --drafter-set take."""
    with console.waiting("Importing the policies…"):
        from windfall.engine import loading

        names = [] if drafters else registry.policies()
        names += [name] if name is not None and is_reference(name) else []
        known = {
            "policies": _entries(names, registry.policy_class, loading.DEFAULT_POLICY),
            "drafters": _entries(registry.drafters(), registry.drafter_class, loading.default_drafter(None)),
            "presets": [] if drafters else [_preset(*entry) for entry in registry.PRESETS.items()],
        }
    found = {kind: [e for e in entries if name in (None, e["name"])] for kind, entries in known.items()}
    if not any(found.values()):
        choices = ", ".join(dict.fromkeys(entry["name"] for entries in known.values() for entry in entries))
        raise InputError(f"there is no policy, drafter or preset '{name}'; choose from {choices}")
    if json:
        console.print_json(found, indent=2)
        return
    for kind, entries in found.items():
        if entries:
            console.print_catalogue(kind.capitalize(), entries)


def _entries(names: list[str], find: Callable[[str], type], default: str) -> list[dict[str, Any]]:
    classes = {name: find(name) for name in names}
    return [
        {"name": name, "default": name == default, "summary": _summary(cls), "options": describe(cls)}
        for name, cls in classes.items()
    ]


def _preset(name: str, entry: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    policy, settings, source = entry
    flags = " ".join(f"--set {key}={value}" for key, value in settings.items())
    summary = f"--policy {policy} {flags} ({source})"
    about = {"name": name, "default": False, "summary": summary, "options": []}
    return {**about, "policy": policy, "settings": settings, "source": source}


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def doctor(json: bool = json_option()) -> None:
    """Check the installation: versions, devices, the embedded model, and that speculation changes no token."""
    from windfall.bench.inspect.doctor import examine

    checks = [check._asdict() for check in examine(config_file.describe)]
    ok = all(check["ok"] for check in checks if check["needed"])
    if json:
        console.print_json({"ok": ok, "checks": checks}, indent=2)
    else:
        console.print_checks(checks)
    if not ok:
        raise typer.Exit(1)
