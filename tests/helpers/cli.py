"""Runs the command line with a small folder as the model."""

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

SPECIAL = ["<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


CHARACTERS = (string.ascii_letters + " .,\n")[: VOCABULARY - len(SPECIAL)]


TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


SHORT = ["--max-new-tokens", "20", "--ignore-eos"]


def character_tokenizer(template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    vocabulary = {token: place for place, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>")
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny().save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


def windfall(*arguments: object, input: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=input, catch_exceptions=False)
    assert "Traceback" not in result.output
    return result


def refused(*arguments: object, input: str | bytes | None = None) -> str:
    """The one line that bad input is answered with, if only once the model is loaded."""
    result = windfall(*arguments, input=input)
    assert result.exit_code == 2
    assert result.stdout == ""
    said = result.stderr.removeprefix("Measuring what passes cost here (first run only)…\n")
    assert re.fullmatch(r"windfall: [^\n]+\n", said), said
    return said.removeprefix("windfall: ").rstrip()
