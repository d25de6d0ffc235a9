"""Policies and drafters that users write themselves, named `FILE.py:CLASS` or `MODULE:CLASS`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from windfall.core.errors import InputError

SUFFIX = ".py"


def is_reference(name: str) -> bool:
    """Whether a name has the form `FILE.py:CLASS` or `MODULE:CLASS`."""
    place, _, cls = name.rpartition(":")
    return cls.isidentifier() and (place.endswith(SUFFIX) or all(part.isidentifier() for part in place.split(".")))


def find_class(name: str, base: type, required: Sequence[Sequence[str]] = ()) -> type:
    """The class with the name `FILE.py:CLASS` or `MODULE:CLASS`.

    It must be a subclass of `base`, and override at least one method of each group in `required`.
    """
    place, _, wanted = name.rpartition(":")
    module = _load_file(Path(place).expanduser()) if place.endswith(SUFFIX) else _load_module(place)
    found = getattr(module, wanted, None)
    if found is None:
        known = ", ".join(key for key, value in vars(module).items() if _is_own(value, base, module)) or "none"
        raise InputError(f"'{place}' has no class '{wanted}'; its {base.__name__} classes: {known}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InputError(f"'{wanted}' in '{place}' must be a subclass of {base.__module__}.{base.__name__}")
    if undeclared := [key for key, value in vars(found).items() if isinstance(value, dataclasses.Field)]:
        raise InputError(f"'{wanted}' in '{place}' has the option '{undeclared[0]}', so it needs @dataclass")
    for names in required:
        if all(getattr(found, name) is getattr(base, name) for name in names):
            raise InputError(f"'{wanted}' in '{place}' needs a method {' or '.join(names)}")
    return found


def _is_own(value: object, base: type, module: ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__


def _load_file(file: Path) -> ModuleType:
    """The module in a file; a changed file is imported again."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read '{file}': {error.strerror}") from error
    digest = hashlib.sha256(bytes(file.resolve()) + content).hexdigest()[:12]
    name = f"windfall_file_{digest}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module here
    try:
        with _importing(str(file), file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    with _importing(name, Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def _importing(label: str, folder: Path) -> Iterator[None]:
    """Let modules in `folder` be imported; any error becomes an InputError with the line number."""
    path = str(folder.resolve())
    sys.path.insert(0, path)
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"cannot import '{label}': {_describe(error, label)}") from error
    finally:
        sys.path.remove(path)


def _describe(error: BaseException, label: str) -> str:
    message = str(error).strip().split("\n")[0]
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind} in line {error.lineno}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(label).name]
    at = f" in line {lines[-1]}" if lines else ""
    return f"{kind}{at}: {message}" if message else f"{kind}{at}"
