"""Load a head from a path, hub id or module, and fit it to its target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.core.types import InputError
from windfall.heads.base import DraftHead
from windfall.heads.fitting import fit
from windfall.heads.kinds import KINDS, recognise

if TYPE_CHECKING:
    from windfall.model.target import Target


def find_head(head: Any, target: Target, drafter: str | None = None) -> DraftHead:
    """The head on the target's device and in its precision, with what it borrows from the target.

    A folder or hub id is taken in the reading that agrees best with the target; None gives the bundled head. `drafter`
    is the registry name of the drafter that needs it, if that matters.
    """
    from windfall.checkpoints.bundled import bundled_head
    from windfall.heads import formats, probe
    from windfall.heads.files import locate

    if head is None:
        bundled = bundled_head(target)
        if bundled is None:
            wanted = "train one with `windfall train head` or give --drafter PATH"
            raise InputError(f"there is no head for {target.name}; {wanted}")
        return _read(bundled, target)
    if isinstance(head, DraftHead):
        _check_kind(head.config.kind, drafter, type(head).__name__)
        return fit(head, target)
    if not isinstance(head, str | os.PathLike):
        raise InputError(f"a head is a folder, a hub id or a loaded DraftHead, not a {type(head).__name__}")
    folder, label = locate(head), os.fspath(head)
    kind = recognise(folder, label)
    _check_kind(kind, drafter, label)
    if kind is not None and KINDS[kind].drafter != "head":
        return _read(folder, target)
    return probe.choose(formats.read_checkpoint(folder, label, formats.Shape.of(target.decoder.config)), target)


def _read(folder: Path, target: Target) -> DraftHead:
    from windfall.heads import formats

    head: DraftHead = formats.read(folder, target.decoder.config)
    return fit(head, target)


def _check_kind(kind: str | None, drafter: str | None, label: str) -> None:
    own = KINDS[kind].drafter if kind and kind in KINDS else drafter
    if drafter not in (None, own):
        raise InputError(f"'{label}' is a {kind} head, which the drafter {own} takes, not {drafter}")
