"""GGUF files that we read come out byte for byte as transformers' reader has them; the others are left to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from helpers.gguf import SHAPE, write_gguf
from windfall.checkpoints import gguf as conversion
from windfall.checkpoints.quiet_libs import quiet

LARGER = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 2, "tie_word_embeddings": True}
Kind = Callable[[str], str]


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny(transformers.LlamaConfig(**LARGER))


def by_rank(small: str, large: str) -> Kind:
    """Norms and biases in one type, matrices in another, as llama.cpp does."""
    return lambda name: small if "norm" in name or name.endswith(".bias") else large


def mixed(name: str) -> str:
    return "Q8_0" if name.startswith("token_embd") else by_rank("F32", "Q4_1")(name)


def convert(file: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    with quiet():
        conversion._convert_gguf(file, folder)
    return {made.name: made.read_bytes() for made in folder.iterdir()}


def never(file: Path) -> Any:
    raise AssertionError("left to transformers")


def check_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our reading of a file, which asks nothing of transformers' reader, and the reader's."""
    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_read_by_transformers", never)
        ours = convert(file, file.parent / "ours")
    monkeypatch.setattr(conversion, "ARCHITECTURES", ())
    monkeypatch.setattr(conversion, "_read_once", lambda *_: nullcontext())
    theirs = convert(file, file.parent / "theirs")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= ours.keys()
    assert ours == theirs


@pytest.mark.parametrize(
    "kind",
    [mixed, by_rank("F32", "F16"), by_rank("F16", "BF16"), *(by_rank("F32", kind) for kind in ("F32", "Q4_0", "Q5_1"))],
    ids=["Q4_1+Q8_0", "F16", "BF16", "F32", "Q4_0", "Q5_1"],
)
def test_quantisations(llama: Any, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, kind)
    check_same(tmp_path / "tiny.gguf", monkeypatch)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**LARGER | {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        transformers.Qwen2Config(**LARGER),
        transformers.Qwen3Config(**LARGER),
        transformers.Phi3Config(**LARGER),
    ],
    ids=["llama", "qwen2", "qwen3", "phi3"],
)
def test_architectures(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"attention.key_length": config.head_dim} if config.model_type == "qwen3" else {}
    write_gguf(tmp_path / "tiny.gguf", tiny(config), mixed, **more)
    check_same(tmp_path / "tiny.gguf", monkeypatch)


def test_frequencies_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(transformers.LlamaConfig(**LARGER))
    model.model.rope_freqs = torch.nn.Linear(8, 1, bias=False)
    write_gguf(tmp_path / "tiny.gguf", model)
    check_same(tmp_path / "tiny.gguf", monkeypatch)


def known(file: Path) -> bool:
    """Whether we read the file ourselves."""
    with quiet(), conversion.opened(file) as contents:
        return conversion.matched(contents) is not None


def test_unknown_files_are_left_to_transformers(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, mixed)
    assert known(file)
    for table in ("ARCHITECTURES", "QUANTISATIONS"):
        with monkeypatch.context() as patched:
            patched.setattr(conversion, table, tuple(set(getattr(conversion, table)) - {"llama", "Q4_1"}))
            assert not known(file)
    write_gguf(file, llama, **{"attention.head_count_kv": None})  # transformers then leaves the rows as they are
    assert not known(file)
    write_gguf(file, llama, vocab_size=65)  # another shape
    assert not known(file)
    write_gguf(file, llama, block_count=3)  # a layer is missing
    assert not known(file)
    write_gguf(file, tiny(transformers.LlamaConfig(**LARGER, attention_bias=True)))  # tensors that llama has not
    assert not known(file)


def test_header_is_read_once(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, opened = gguf.GGUFReader, []

    class Counting(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            opened.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    write_gguf(tmp_path / "tiny.gguf", llama)
    convert(tmp_path / "tiny.gguf", tmp_path / "made")
    assert len(opened) == 1
    assert gguf.GGUFReader is Counting


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    file, reads = tmp_path / "model.gguf", []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))

    def convert(source: Path, folder: Path) -> None:
        (folder / "weights").write_text("converted")

    def converted() -> Path:
        return conversion.converted(file, "some[name]", convert)

    file.write_bytes(b"GGUF one")
    first = converted()
    assert converted() == first and reads == [file]
    os.utime(file, ns=(1, 1))
    assert converted() == first, "the same content has the same conversion"
    assert converted() == first and len(reads) == 2
    file.write_bytes(b"GGUF two")
    assert converted() != first and len(reads) == 3
    (first / conversion.CACHE_MARKER).write_text("damaged")
    file.write_bytes(b"GGUF one")
    assert converted() == first and conversion.is_complete(first)
