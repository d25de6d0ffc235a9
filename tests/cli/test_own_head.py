"""docs/own-head.md: its commands, one after another, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.cli import folder as folder
from helpers.cli import windfall
from helpers.deploy import ROOT, serve_options
from helpers.serving import http, running
from windfall.engine.loading import load

QUICK = {  # options that make a command short; the last one counts
    "data": "--self-prompts 24 --max-new-tokens 16 --held-out 0.2",
    "head": "",
    "generate": "--max-new-tokens 8 --policy chain",
    "serve": "",
    "doctor": "",
    "bench": "--requests 2 --max-new-tokens 4 --concurrency 2",
}


def commands() -> list[list[str]]:
    """The windfall commands of the page, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "own-head.md").read_text("utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("windfall ")]


def request() -> dict[str, object]:
    """What the page sends with curl."""
    (body,) = re.findall(r"-d '(.*?)'", (ROOT / "docs" / "own-head.md").read_text("utf-8"))
    found: dict[str, object] = json.loads(body)
    return found


@pytest.mark.filterwarnings("ignore:.*seems to mean something else")  # the head has learned nothing in two steps
def test_the_commands_of_the_page_work(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {next(word for word in words if word in QUICK): words for words in commands()}
    assert [*known] == ["doctor", "data", "head", "generate", "serve", "bench"]

    def run(name: str) -> str:
        words = [str(folder) if word == "$MODEL" else word for word in known[name]]
        line = shlex.join(words).replace("--minutes 30", "--steps 2")
        done = windfall(*shlex.split(line), *shlex.split(QUICK[name]))
        assert done.exit_code == 0, done.output
        return done.stdout

    run("data")
    run("head")
    assert (tmp_path / "my-head" / "best").is_dir()
    assert run("generate")
    served = known["serve"]
    assert [word for word in served if word.startswith("--") and word not in serve_options()] == []
    head = served[served.index("--drafter") + 1]
    with load(str(folder), drafter=head, policy="chain") as engine, running(engine) as url:
        answer = http().post(f"{url}/v1/chat/completions", json=request())
        assert answer.status_code == 200 and answer.json()["usage"]["speculation"]["drafted_tokens"] > 0
        known["bench"] = [url if word.startswith("http") else word for word in known["bench"]]
        assert "tokens/s" in run("bench")
