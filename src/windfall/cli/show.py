"""`windfall tree`, `policies` and `doctor`: what happens in a cycle, what there is, and whether it works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from windfall.cli import complete
from windfall.cli.options import Json, ModelOptions, PolicyOptions, PromptOptions, SamplingOptions, takes_records
from windfall.cli.session import check_chat, with_seed
from windfall.core.files import replace_text
from windfall.core.wording import counted
from windfall.render import console


@takes_records
def tree(
    source: PromptOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    cycle: Annotated[
        int | None, typer.Option("--cycle", help="Which cycle, from 1; none: the one that accepted most.", min=1)
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the drawing to this SVG file instead.")] = None,
) -> None:
    """Draw the draft tree of one cycle: what was drafted, verified and accepted."""
    from windfall.core.errors import InputError
    from windfall.render import tree_drawing

    if svg is not None and svg.suffix.lower() != ".svg":
        raise InputError(f"--svg writes an SVG file, and '{svg}' is named otherwise")
    prompt, keywords = source.read(), with_seed(sampling.keywords(), tell=True)
    engine = model.load(policy.make())
    if source.system is not None:
        check_chat(engine)
    steps, written = [], 0
    with console.progress("Decoding") as told:
        for step in engine.stream(prompt, raw=source.raw, **keywords):
            steps.append(step)
            written += len(step.tokens)
            told(written / keywords["max_new_tokens"])
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
    name: Annotated[
        str | None,
        typer.Argument(
            help="One policy, drafter or preset; or a policy of your own, FILE.py:CLASS.",
            show_default=False,
            autocompletion=complete.everything,
        ),
    ] = None,
    json: Json = False,
    drafters: Annotated[bool, typer.Option("--drafters", help="Only the drafters.")] = False,
) -> None:
    """List policies and drafters, with the options that --set and --drafter-set take, and presets of policies."""
    with console.waiting("Looking…"):
        from windfall import registry
        from windfall.core.errors import InputError
        from windfall.engine import loading
        from windfall.plugins import is_reference

        plain = [] if drafters else registry.policies()
        plain += [name] if name is not None and is_reference(name) else []
        known = {
            "policies": _entries(plain, registry.policy_class, loading.DEFAULT_POLICY),
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
            console.catalogue(kind.capitalize(), entries)


def _entries(names: list[str], find: Callable[[str], type], default: str) -> list[dict[str, Any]]:
    from windfall.core.options import describe

    classes = {name: find(name) for name in names}
    return [
        {"name": name, "default": name == default, "summary": _summary(cls), "options": describe(cls)}
        for name, cls in classes.items()
    ]


def _preset(name: str, entry: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    policy, settings, source = entry
    given = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return {
        "name": name,
        "default": False,
        "summary": f"--policy {policy} {given} ({source})",
        "options": [],
        "policy": policy,
        "settings": settings,
        "source": source,
    }


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def doctor(json: Json = False) -> None:
    """Check this installation: versions, devices, the embedded model, and that speculation changes no token."""
    from windfall.bench.inspect.doctor import examine

    checks = [check._asdict() for check in examine()]
    ok = all(check["ok"] for check in checks if check["needed"])
    if json:
        console.print_json({"ok": ok, "checks": checks}, indent=2)
    else:
        console.checklist(checks)
    if not ok:
        raise typer.Exit(1)
