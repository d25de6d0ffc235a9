"""Check that windfall generates exactly what transformers does, for every causal-LM architecture of transformers.

    python tests/sweep.py                    all architectures except those in --state FILE
    python tests/sweep.py llama gemma3_text  these
    python tests/sweep.py --write            all of them, and the result as docs/models.md

Each architecture is a tiny random model (see helpers/architectures.py) in its own process. It is `equal` if plain
decoding and trees of several drafters and policies give the tokens and logits of `model.generate`, `refused` if
windfall refuses the model in one line, and a `finding` if anything differs or fails. Findings set the exit code to 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.architectures import VOCABULARY, build, class_name, names
from windfall import registry
from windfall.core.types import GpuOptions, InputError
from windfall.engine.engine import Engine
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.interface import InterfaceForward
from windfall.engine.gpu.modules import MaskedForward
from windfall.model import decoder
from windfall.model.target import TEST_WINDOW, Target

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SECONDS = 300  # for an architecture
NEW = 12  # tokens to generate
PROMPTS = (18, 14)  # lengths; both longer than the windows
KINDS = ("equal", "refused", "not built", "finding")
FEWEST = PROMPTS[0] + NEW + 8  # tokens that a model has to take
PRECISION = 2e-3  # of the largest logit
TREES: dict[str, tuple[str, dict[str, Any]]] = {  # drafter: policy
    "self": ("beam", {"depth": 3, "k": 3, "nodes": 10}),
    "lm": ("specinfer", {"widths": "2,2,1"}),
    "ngram": ("chain", {}),
}


FORWARDS = {FusedForward: "fused", InterfaceForward: "windfall's attention", MaskedForward: "mask"}


@dataclass
class Result:
    name: str
    kind: str  # one of KINDS
    why: str = ""
    forward: str = ""  # how a GPU runs its passes


class Difference(Exception):
    """Windfall's text or logits are not transformers'."""


def check(name: str) -> Result:
    """Build a tiny model of this architecture and compare windfall with transformers on it."""
    try:
        model = build(name)
    except Exception as error:
        return Result(name, "not built", _line(error))
    try:
        target = Target(model)
        if target.context and target.context < FEWEST:
            forward = compare(build(name, window=2 * FEWEST))
            return Result(name, "equal", "up to its window: longer texts are refused", forward)
        forward = compare(model, target)
    except InputError as refusal:
        return Result(name, "refused", str(refusal).rpartition(f"{type(model).__name__} ")[2])
    except Difference as difference:
        return Result(name, "finding", str(difference))
    except Exception as error:
        return Result(name, "finding", f"{_line(error)} ({_place(error)})")
    return Result(name, "equal", forward=forward)


def compare(model: Any, target: Target | None = None) -> str:
    """Raise a Difference where windfall's texts are not those of `model.generate`, or not the same for all trees.

    Returns how a GPU runs the model's passes.
    """
    target = target or Target(model)
    texts = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in PROMPTS]
    wanted = [reference(model, text) for text in texts]
    engines = {"none": Engine(target, registry.drafter("ngram"), registry.policy("none"))}
    for drafter, (policy, settings) in TREES.items():
        shaper = registry.policy(policy, **settings)
        engines[f"{policy} with {drafter}"] = Engine(target, _drafter(drafter, target), shaper)
    for label, engine in engines.items():
        _compare_greedy(label, engine, texts[0], *wanted[0])
    several = engines["beam with self"].generate_batch(texts, max_new_tokens=NEW)
    for answer, (tokens, _) in zip(several, wanted, strict=True):
        _same("two texts together", answer.token_ids, tokens)
    with _short_chunks():
        _same("prefill in chunks", _ids(engines["none"], texts[0]), wanted[0][0])
    sampled = _ids(engines["none"], texts[0], temperature=1.0, seed=3)
    for label in ("beam with self", "specinfer with lm"):
        _same(f"{label}, sampled", _ids(engines[label], texts[0], temperature=1.0, seed=3), sampled)
    return _compare_in_fixed_buffers(target, texts, wanted)


def _compare_in_fixed_buffers(target: Target, texts: list[list[int]], wanted: list[Any]) -> str:
    """The same for passes as a GPU runs them, but for the CUDA graphs."""
    policy, settings = TREES["self"]
    gpu_options = GpuOptions(True, exact=False, pages=True)  # exact passes take long on a CPU
    engine = Engine(target, registry.drafter("lm"), registry.policy(policy, **settings), gpu_options=gpu_options)
    if engine.gpu_runner is None:
        return f"host loop: {engine.gpu_unavailable}"
    _compare_greedy("fixed buffers, policy on the host", engine, texts[0], *wanted[0])
    _same("fixed buffers", _ids(engine, texts[0]), wanted[0][0])
    several = engine.generate_batch(texts, max_new_tokens=NEW, eos=())
    for answer, (tokens, _) in zip(several, wanted, strict=True):
        _same("two texts on pages", answer.token_ids, tokens)
    forward = FORWARDS[type(engine.gpu_runner.gpu_target.forward)]
    return f"{forward}, no pages" if engine.batch_fallback else forward


def reference(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """What `model.generate` writes greedily, and its logits [tokens, V]."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def _compare_greedy(label: str, engine: Engine, prompt: list[int], wanted: list[int], logits: torch.Tensor) -> None:
    """The same tokens, and the logits they were drawn from."""
    seen: list[torch.Tensor] = []

    def watch(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores

    tokens = _ids(engine, prompt, processors=(watch,))
    count = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), len(wanted) - 1) + 1
    gaps = (torch.cat(seen)[:count] - logits[:count]).abs().amax(-1) / logits.abs().max()
    if gaps.max() > PRECISION:
        at = int((gaps > PRECISION).nonzero()[0])
        raise Difference(f"{label}: logits of token {at} are off by {gaps[at]:.1%}")
    _same(label, tokens, wanted)


def _same(label: str, tokens: list[int], wanted: list[int]) -> None:
    if tokens != wanted:
        at = next(
            (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted))
        )
        raise Difference(f"{label}: token {at} of {len(wanted)} differs")


def _ids(engine: Engine, prompt: list[int], **sampling: Any) -> list[int]:
    return engine.generate(prompt, max_new_tokens=NEW, eos=(), **sampling).token_ids


def _drafter(name: str, target: Target) -> Any:
    """The drafter of this name; where the model's layers cannot be left out, the model drafts for itself."""
    drafter = registry.drafter(name)
    try:
        drafter.attach(target)
    except InputError:
        return registry.drafter("lm")
    return drafter


class _short_chunks:
    def __enter__(self) -> None:
        self.usual, decoder.MAX_PREFILL_ROWS = decoder.MAX_PREFILL_ROWS, 6

    def __exit__(self, *_: object) -> None:
        decoder.MAX_PREFILL_ROWS = self.usual


def _line(error: BaseException) -> str:
    """The first sentence of what an error says."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {text}"[:240]


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def isolated(name: str, seconds: float = SECONDS) -> Result:
    """`check` in a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return Result(name, "finding", f"no result within {seconds:.0f} seconds")
        return ours.recv()
    except EOFError:
        process.join()
        return Result(name, "finding", f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _report(name: str, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    pipe.send(check(name))


def sweep(chosen: list[str], known: dict[str, Result]) -> Iterator[Result]:
    torch.set_num_threads(1)  # a process with threads cannot be forked safely
    check("llama")  # imports what all of them need, before the processes part
    for i, name in enumerate(chosen, 1):
        start = time.perf_counter()
        result = known.get(name) or isolated(name)
        seconds = time.perf_counter() - start
        print(
            f"{i:3}/{len(chosen)} {name:26} {result.kind:10} {seconds:5.1f} s  {result.forward} {result.why}",
            flush=True,
        )
        yield result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures (transformers' model types); none: all")
    parser.add_argument("--write", action="store_true", help="write the result as docs/models.md")
    parser.add_argument("--state", type=Path, help="keep results in this file, and skip those it has")
    asked = parser.parse_args(arguments)
    if unknown := sorted(set(asked.names) - set(names())):
        parser.error(f"transformers has no causal LM of the type {unknown[0]}")
    if asked.write and asked.names:
        parser.error("--write needs all architectures; name none")
    known = _read(asked.state)
    results = []
    for result in sweep(asked.names or names(), known):
        results.append(result)
        if asked.state:
            known[result.name] = result
            asked.state.write_text(json.dumps([asdict(r) for r in known.values()], indent=1))
    counts = {kind: sum(r.kind == kind for r in results) for kind in KINDS}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if asked.write:
        PAGE.write_text(page(results), "utf-8")
    return int(counts["finding"] > 0)


def _read(state: Path | None) -> dict[str, Result]:
    if state is None or not state.exists():
        return {}
    return {entry["name"]: Result(**entry) for entry in json.loads(state.read_text())}


INTRODUCTION = """# Models

windfall supports decoder-only transformers models whose layers keep one key and one value per token, with full,
sliding-window or chunked attention. Any other model is refused with a one-line error message. This page is generated by
`python tests/sweep.py --write`. The script builds a tiny random model of every causal-LM architecture of transformers
{version}, with windows shorter than the text, and compares windfall with `model.generate` on a CPU in float32:

- **equal** ({equal}): plain decoding and trees of three drafters and policies give the tokens and the logits of
  `model.generate`. Sampling gives the same tokens with and without trees. So do two texts decoded together, and prompts
  processed in several passes.
- **refused** ({refused}): windfall refuses the model, for the reason in the table.
- **not built** ({not_built}): no tiny model could be built.

Every model is also checked when it is loaded for the first time, including those with their own code: the logits
of a small tree must equal those that the model computes for each path of the tree without windfall. Models with windows
are checked again with windows of {short} tokens. If a model does not respect them, windfall accepts only texts up to
the length of its window.

- A model compiled with `torch.compile(model)` runs uncompiled, because trees change their shape from pass to pass and
  each new shape would be compiled again.
- Weights must be on a device. A model that accelerate offloads to the CPU or to disk is refused.
- A model that can also be an encoder (BERT and similar) must be loaded with `is_decoder=True`.

## Forward passes on a GPU

The column *GPU* says how a GPU runs a model's passes. All ways except *host loop* use CUDA graphs, if the model's code
can be captured.

- **fused** ({fused}): windfall's own *fused forward pass*, with few kernels. Exact passes need it. It supports
  - **dense models**: `LlamaForCausalLM`, `MistralForCausalLM`, `MinistralForCausalLM`, `Qwen2ForCausalLM`,
    `Qwen3ForCausalLM`, `Phi3ForCausalLM` (also Phi-4-mini), `GemmaForCausalLM`, `Gemma2ForCausalLM`,
    `Gemma3ForCausalLM`, the text part of `Gemma3ForConditionalGeneration`, `SmolLM3ForCausalLM`, `Olmo2ForCausalLM`,
    `Olmo3ForCausalLM`, `GraniteForCausalLM`, `CohereForCausalLM`, `Cohere2ForCausalLM`, `GlmForCausalLM`,
    `Glm4ForCausalLM`, `Starcoder2ForCausalLM`, `Exaone4ForCausalLM`, `Ernie4_5ForCausalLM`, `SeedOssForCausalLM`,
    `ArceeForCausalLM`, `CwmForCausalLM` and `HeliumForCausalLM`;
  - **mixtures of experts**: `GptOssForCausalLM`, `Qwen3MoeForCausalLM`, `MixtralForCausalLM`, `OlmoeForCausalLM` and
    `MellumForCausalLM`.
- **windfall's attention** ({interface}): the model's own code, in which windfall replaces the attention function
  through transformers' attention interface. Windows, chunks, soft caps and attention sinks are those of the model.
  Before the first text, windfall compares the logits of a small tree with those of the model's own attention.
- **mask** ({mask}): the model's own code and attention, which reads the KV cache under an explicit mask. These models
  do not use the attention interface, or change keys and values after the KV cache.
- **host loop** ({host}): the model's own code, kernel by kernel from Python, which is slower.

Several requests run together on a paged KV cache, except where the column says *no pages*. Models whose rotary angles
depend on the length of the text (dynamic RoPE, and LongRoPE outside Phi-3's family) run in the host loop.
"""

QUANTISED = """## Quantised models

A quantised checkpoint is loaded as transformers loads it: give its folder or hub id, or a model that you loaded with
`quantization_config`. transformers needs the library in the table. If it is missing, a one-line error names it. On a
GPU, models of the families above run in the fused forward pass, and their quantised layers compute their own products.
The same holds for layers with a LoRA adapter that is not merged (`model.load_adapter`, needs peft).

| kind | library | rows of a pass |
|---|---|---|
| bitsandbytes, 4 bits | `bitsandbytes` | are independent |
| bitsandbytes, 8 bits (LLM.int8) | `bitsandbytes` | depend on each other, through large inputs |
| GPTQ | `optimum`, `gptqmodel` | are independent |
| AWQ | `gptqmodel` | are independent |
| fp8 (`quant_method: fp8`) | `kernels` | are independent, if inputs have a scale for each row or block |
| compressed-tensors, torchao, quanto | of the same name | are independent, unless one scale is for all inputs |

Without a GPU, transformers dequantises fp8 checkpoints.

- **The text** is that of the quantised model, which is not that of the original one. With drafts it equals the plain
  decoding of the quantised model.
- **Exact passes.** The rounding of a row may depend on the number of rows. windfall therefore calls each layer with 32
  rows, or with more where this gives the same bits. Before the first text, it tests every layer on random rows: alone,
  together with other rows, and at other positions in the batch. If the results differ, the model runs without exact
  passes, and a warning names the layers, in float32 too. The table says what to expect. This test decides.
- **Time.** In exact passes, a single row takes as long as 32 rows in these layers. With `--fast`, the layers are called
  with the rows of the pass only.
- **On a CPU** the layers run their own code.
- **CUDA graphs.** windfall captures the layers once before the first text. If that fails, for example because a layer
  waits for the device, all passes are launched kernel by kernel, and a warning gives the reason.
- **Precision.** Layers that are not quantised keep the precision of the checkpoint. With some kinds this holds even if
  `dtype` asks for another one.
- **Not on the fast path.** Quantised experts and quantised embeddings run in the model's own forward pass. Draft heads
  need the target's embedding and vocabulary matrix in full precision, as most quantised checkpoints have them.
"""


def page(results: list[Result]) -> str:
    """The results as Markdown."""
    kinds = {kind: [r for r in results if r.kind == kind] for kind in KINDS}
    counts = {kind.replace(" ", "_"): len(found) for kind, found in kinds.items()}
    ways = {"fused": "fused", "interface": "windfall's attention", "mask": "mask", "host": "host loop"}
    counts |= {name: sum(r.forward.startswith(start) for r in results) for name, start in ways.items()}
    parts = [INTRODUCTION.format(version=transformers.__version__, short=TEST_WINDOW, **counts), QUANTISED]
    for kind, found in kinds.items():
        if found:
            columns = ["model type", "class", *(["GPU", "remark"] if kind == "equal" else ["reason"])]
            cells = [[r.name, class_name(r.name), *([r.forward] if kind == "equal" else []), r.why] for r in found]
            lines = [columns, ["---"] * len(columns), *cells]
            parts.append("\n".join([f"## {kind.capitalize()}\n", *(f"| {' | '.join(line)} |" for line in lines), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
