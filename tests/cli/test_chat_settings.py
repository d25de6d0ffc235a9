"""`/set` in a chat: sampling options are listed, changed and restored."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from windfall.cli.chat_settings import changed, listed, restored, setting
from windfall.cli.options import SamplingOptions
from windfall.core.errors import InputError


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature 0.7", "temperature", 0.7),
        ("--top-p=0.9", "top_p", 0.9),
        ("top_k = 5", "top_k", 5),
        ("ignore-eos on", "ignore_eos", True),
        ('stop "two words" END', "stop", ["two words", "END"]),
        ("logit-bias 42=-100 7=1", "logit_bias", ["42=-100", "7=1"]),
        ("seed 3", "seed", 3),
    ],
)
def test_any_sampling_option_can_be_set_and_reset(text: str, name: str, value: object) -> None:
    options = changed(SamplingOptions(), text)
    assert asdict(options) == {**asdict(SamplingOptions()), name: value}
    assert changed(options, f"{name} default") == SamplingOptions()
    assert restored(json.loads(json.dumps(asdict(options)))) == options


def test_options_are_listed_by_their_flags() -> None:
    lines = listed(SamplingOptions(top_k=7, stop=["a b"])).split("\n")
    assert len(lines) == len(asdict(SamplingOptions()))
    assert any(re.match(r"top-k +7 +Sample from the k likeliest", line) for line in lines)
    assert any(re.match(r"stop +'a b' +Stop before this text\.$", line) for line in lines)
    assert "Repeatable" not in "".join(lines)
    assert setting(SamplingOptions(), "min_p") == "min-p 0.0"


@pytest.mark.parametrize("saved", [{"colour": 1}, {"top_k": True}, {"stop": "abc"}, {"temperature": "1"}, {"top_p": 7}])
def test_wrong_saved_settings_are_refused(saved: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(saved))):
        restored(saved)
