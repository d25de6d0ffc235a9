"""`windfall export`: write a draft head in the layout of another engine."""

from __future__ import annotations

from pathlib import Path

from windfall.cli.declare import argument, option
from windfall.cli.options import TargetOptions
from windfall.core.errors import InputError
from windfall.core.files import check_writable
from windfall.render import console


def export(
    model: TargetOptions,
    head: str | None = argument(
        None, "Head: a folder, the output of `windfall train head`, or a hub id. Default: that of the embedded model."
    ),
    out: Path = option(..., "New folder to write."),
    format: str = option("vllm", "Layout: vllm, speculators, or the name of the head's kind, such as eagle3."),
) -> None:
    """Write a draft head for another engine, with all matrices that it borrows from its target.

    The files are in bfloat16. windfall reads them, too.
    """
    from windfall.heads import formats
    from windfall.heads.files import locate
    from windfall.heads.kinds import recognise
    from windfall.heads.loading import find_head

    formats.check_format(format, None if head is None else recognise(locate(head), head))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out is a new folder, and '{out}' exists; choose another name")
    check_writable(out)
    target = model.load_target()
    found = find_head(head, target)
    formats.write(found, out, format=format, target=target)
    tokens = found.config.draft_vocab_size or found.config.vocab_size
    console.note(f"a head of kind {found.config.kind} that drafts {tokens:,} tokens is in {out}")
