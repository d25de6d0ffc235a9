"""docs/train-a-head.md: its commands, one after another, on a tiny model."""

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

PAGE = (ROOT / "docs" / "train-a-head.md").read_text("utf-8")
QUICK = {  # options that make a command short; the last one counts
    "doctor": "",
    "train data": "--self-prompts 24 --max-new-tokens 16 --held-out 0.2",
    "train head": "",
    "generate": "--max-new-tokens 8 --policy chain",
    "diagnose": "--max-new-tokens 8",
    "bench run": "--max-new-tokens 8 --repeats 1",
    "report": "",
    "serve": "",
    "bench serve": "--requests 2 --max-new-tokens 4 --concurrency 2",
}


def commands(text: str) -> dict[str, list[str]]:
    """The windfall commands of a text, without their comments, in its order."""
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("windfall ")]
    return {" ".join(each[: 2 if each[0] in ("train", "bench") else 1]): each for each in words}


def request() -> dict[str, object]:
    """What the page sends with curl."""
    (body,) = re.findall(r"-d '(.*?)'", PAGE)
    found: dict[str, object] = json.loads(body)
    return found


@pytest.mark.filterwarnings("ignore:.*seems to mean something else")  # the head has learned nothing in two steps
def test_the_commands_of_the_page_work(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = commands(PAGE.partition("## With a GPU for a limited time")[0])
    assert [*known] == [*QUICK]

    def run(name: str) -> str:
        words = [str(folder) if word == "$MODEL" else word for word in known[name]]
        line = shlex.join(words).replace("--minutes 30", "--steps 2").replace("--vocabulary 32768", "")
        done = windfall(*shlex.split(line), *shlex.split(QUICK[name]))
        assert done.exit_code == 0, done.output
        return done.stdout

    run("train data")
    run("train head")
    assert (tmp_path / "my-head" / "best").is_dir()
    assert run("generate")
    assert run("diagnose")
    (tmp_path / "eval.jsonl").write_text('{"prompt": "Name a river."}\n')
    assert "ngram/auto" in run("bench run")
    run("report")
    assert (tmp_path / "RUN" / "report.html").is_file()
    served = known["serve"]
    assert [word for word in served if word.startswith("--") and word not in serve_options()] == []
    head = served[served.index("--drafter") + 1]
    with load(str(folder), drafter=head, policy="chain") as engine, running(engine) as url:
        answer = http().post(f"{url}/v1/chat/completions", json=request())
        assert answer.status_code == 200 and answer.json()["usage"]["speculation"]["drafted_tokens"] > 0
        known["bench serve"] = [url if word.startswith("http") else word for word in known["bench serve"]]
        assert "tokens/s" in run("bench serve")


def test_both_sessions_train_the_same_head() -> None:
    """The second session resumes the first with the same options."""
    sessions = re.findall(
        r"^windfall train head .*?[^\\]\n", PAGE.partition("## With a GPU")[2], re.DOTALL | re.MULTILINE
    )
    first, second = (shlex.split(each.replace("\\\n", " ")) for each in sessions)
    place = first.index("--pause-after")
    assert second[: place + 1] + second[place + 2 :] == [*first[: place + 1], "--resume"]
