"""Files are written completely or not at all, with the permissions of the user's umask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_file, replace_text
from windfall.heads import files


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_are_those_of_any_new_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        replace_file(tmp_path / "a", lambda file: save_file({"x": torch.zeros(1)}, file))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    def fail(file: Path) -> None:
        file.write_text("half")
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "a", "whole")
    with pytest.raises(InputError, match=r"cannot write '.*a': No space left on device"):
        replace_file(tmp_path / "a", fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "whole"
    with pytest.raises(InputError, match="cannot make the folder"):
        make_folder(tmp_path / "a")


def test_config_and_weights_are_never_from_different_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config, weights = tmp_path / files.CONFIG, {"x": torch.zeros(1)}
    files.write_folder(tmp_path, {"kind": "old"}, weights)
    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", stop)
        with pytest.raises(KeyboardInterrupt):
            files.write_folder(tmp_path, {"kind": "old"}, weights)
        assert config.is_file()
        with pytest.raises(KeyboardInterrupt):
            files.write_folder(tmp_path, {"kind": "new"}, weights)
    assert not config.is_file()
