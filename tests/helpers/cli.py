"""Runs the command line with a tiny model."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
import tokenizers
import transformers
from typer.testing import CliRunner, Result

from helpers.tiny import VOCABULARY, tiny
from windfall.cli import app
from windfall.engine.engine import Engine, Stream

SPECIAL = ["<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHARACTERS = (string.ascii_letters + " .,\n")[: VOCABULARY - len(SPECIAL)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STATS = {"tokens", "cycles", "target_passes", "draft_passes", "rows", "tau", "delta", "seconds"}
STATS |= {"tokens_per_second", "ttft", "tpot", "time"}
SHORT = ["--max-new-tokens", "12", "--ignore-eos"]


def character_tokenizer(template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    return word_tokenizer(SPECIAL, [*CHARACTERS], template)


def word_tokenizer(
    special: list[str], others: list[str], template: str | None = TEMPLATE
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with these tokens that splits text into characters."""
    vocabulary = {token: place for place, token in enumerate([*special, *others])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(special)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>")
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny(num_hidden_layers=2).save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


def windfall(*arguments: object, input: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=input, catch_exceptions=False)
    assert "Traceback" not in result.output
    return result


def refused(*arguments: object, input: str | bytes | None = None) -> str:
    """The one-line error message for bad input."""
    result = windfall(*arguments, input=input)
    assert result.exit_code == 2
    assert result.stdout == ""
    error = result.stderr.removeprefix("Measuring what passes cost here (first run only)…\n")
    assert re.fullmatch(r"windfall: [^\n]+\n", error), error
    return error.removeprefix("windfall: ").rstrip()


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every text end with Ctrl-C after this many steps."""
    stream = Engine.stream

    def cut(whole: Stream):
        for place, step in enumerate(whole):
            if place == steps:
                raise KeyboardInterrupt
            yield step

    def short(self: Engine, prompt: object, **options: object) -> Stream:
        whole = stream(self, prompt, **options)
        return Stream(cut(whole), whole.prompt_tokens, whole.seed)

    monkeypatch.setattr(Engine, "stream", short)
