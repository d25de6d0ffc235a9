"""`--out` of commands that measure: a file is replaced only if it is a result of the same command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.cli import refused
from windfall.bench.serving import load
from windfall.bench.speed import speed
from windfall.bench.throughput import throughput
from windfall.cli import bench_serve, bench_speed, bench_throughput
from windfall.cli.session import check_result_file
from windfall.core.errors import InputError

COMMANDS = ("audit", "tune", "bench speed", "bench throughput", "bench serve http://127.0.0.1:9")
RESULTS = [
    ("bench speed", bench_speed.RESULT_KEYS, speed.Result("tiny", {}, {}).as_dict()),
    ("bench throughput", bench_throughput.RESULT_KEYS, throughput.Result("tiny", {}, {}).as_dict()),
    ("bench serve", bench_serve.RESULT_KEYS, load.Result("http://127.0.0.1:9", "tiny", {}, {}).as_dict()),
]


@pytest.mark.parametrize("content", ["my notes\n", '{"settings": {}}', "[1]", b"\xff\x00"])
@pytest.mark.parametrize("command", COMMANDS)
def test_other_files_are_not_replaced(
    command: str, content: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("windfall.engine.loading.as_target")  # no model is loaded
    out = tmp_path / "out.json"
    out.write_bytes(content if isinstance(content, bytes) else content.encode())
    before, name = out.read_bytes(), command.partition(" http")[0]
    said = refused(*command.split(), "--out", out)
    assert said == f"'{out}' exists and is not a result of `windfall {name}`; choose another --out"
    assert out.read_bytes() == before and [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize(("command", "keys", "result"), RESULTS)
def test_results_of_the_same_command_are_replaced(
    command: str, keys: Sequence[str], result: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.json"
    check_result_file(out, command, keys)
    out.write_text("")
    check_result_file(out, command, keys)
    for _, _, each in RESULTS:
        out.write_text(json.dumps(each))
        if each is result:
            check_result_file(out, command, keys)
        else:
            with pytest.raises(InputError, match=f"is not a result of `windfall {command}`"):
                check_result_file(out, command, keys)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"'{tmp_path}/file'"):
        check_result_file(tmp_path / "file" / "out.json", "audit", ())
