"""Plain steps and verify passes of models of known shapes with random weights, against the time to read their weights.

python benchmarks/shapes.py [NAME…] [--rows 1,16,32,64] [--length 200] [--layers N] [--json FILE]

Without NAME: all shapes. The floor is the number of bytes that a step must read, divided by the memory's bandwidth,
which a large copy measures. Of a mixture of experts, it counts only the experts that one row chooses: k of E in each
layer. A verify pass reads more, since its rows choose different ones: with random weights, and so nearly random
choices, about E * (1 - (1 - k / E) ** rows) experts.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import transformers
from provenance import publish

from windfall import registry
from windfall.bench.speed.passes import bandwidth
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.host_policy import GraphTarget
from windfall.model.target import Target
from windfall.render import console

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "Llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen2.5-1.5b": (
        "Qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32_768,
        },
    ),
    "llama-3.1-8b": (
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "mistral-7b": (
        "Mistral",
        {
            "vocab_size": 32_768,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
    ),
    "qwen3-8b": (
        "Qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "phi-4-mini": (
        "Phi3",
        {
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "sliding_window": 262_144,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 48,
                "long_factor": [8.0] * 48,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "smollm3-3b": (
        "SmolLM3",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "granite-3.3-8b": (
        "Granite",
        {
            "vocab_size": 49_159,
            "hidden_size": 4096,
            "intermediate_size": 12_800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131_072,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0,
        },
    ),
    "olmo-2-7b": (
        "Olmo2",
        {
            "vocab_size": 100_352,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "glm-4-9b": (
        "Glm4",
        {
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 13_696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
    "command-r7b": (
        "Cohere2",
        {
            "vocab_size": 256_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2-3b": (
        "Starcoder2",
        {
            "vocab_size": 49_152,
            "hidden_size": 3072,
            "intermediate_size": 12_288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "sliding_window": 4096,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "gemma-3-4b": (
        "Gemma3",
        {
            "vocab_size": 262_208,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 8192,
        },
    ),
    "gpt-oss-20b": (
        "GptOss",
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
}
STEPS = 64
LEVELS = 7  # of trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,16,32,64")
    parser.add_argument("--length", type=int, default=200, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [int(each) for each in options.rows.split(",")]
    options.bandwidth = bandwidth(torch.device(options.device)) / 1e12
    found = []
    with console.progress("Timing…") as progress:
        names = options.names or list(SHAPES)
        for place, name in enumerate(names):
            found.append(measure(name, rows, options))
            progress((place + 1) / len(names))
    publish({"shapes": found, "length": options.length, "bandwidth_tb_s": options.bandwidth}, options.json)


def measure(name: str, rows: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Floor, step and passes of one shape, in microseconds."""
    model = random_model(name, options.layers, options.device)
    bytes_read = step_bytes(model)
    floor = bytes_read / options.bandwidth / 1e6
    prompt = torch.randint(1000, (options.length,)).tolist()
    made: dict[str, Any] = {"name": name, "bytes": bytes_read, "floor_us": floor}
    for mode, exact in (("fast", False), ("exact", True)):
        engine = Engine(
            Target(model), NGramDrafter(), registry.policy("none"), gpu_options=GpuOptions(True, exact=exact)
        )
        assert engine.gpu_runner is not None, f"{name} does not run in fixed buffers"
        step = step_time(engine, prompt)
        passes = {str(count): pass_time(engine.gpu_runner.gpu_target, prompt, count) for count in rows}
        made[mode] = {"step_us": step, "of_floor": step / floor, "verify_us": passes}
        del engine
    return made


def random_model(name: str, layers: int | None, device: str) -> Any:
    """A bf16 model of this shape with small random weights."""
    family, shape = SHAPES[name]
    if layers is not None:
        shape = {**shape, "num_hidden_layers": layers}
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**shape)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval()
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    embeddings = model.model.embed_tokens
    if hasattr(embeddings, "embed_scale"):
        embeddings.embed_scale = torch.tensor(config.hidden_size**0.5, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model


def step_bytes(model: Any) -> int:
    """Bytes of weights that one row reads."""
    config, total = model.config.get_text_config(), 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name or config.tie_word_embeddings:
            share = config.num_experts_per_tok / len(parameter) if ".experts." in name else 1
            total += parameter.nbytes * share
    return int(total)


def step_time(engine: Engine, prompt: list[int]) -> float:
    """Microseconds of a plain step, the difference between texts of two lengths; prefill cancels out."""

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(prompt, max_new_tokens=tokens, eos=())
        return time.perf_counter() - start

    seconds(STEPS)
    return median(seconds(2 * STEPS) - seconds(STEPS) for _ in range(5)) / STEPS * 1e6


@torch.inference_mode()
def pass_time(gpu_target: Any, prompt: list[int], rows: int) -> float:
    """Microseconds of a verify pass over a tree of this many rows."""
    target = GraphTarget(gpu_target)
    target.prefill([prompt])
    size = gpu_target.send_rows(tree_of(rows))
    columns = gpu_target.columns(size)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gpu_target.score(size, columns)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gpu_target.score(size, columns)
    times = []
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return median(times)


def tree_of(rows: int) -> DraftTree:
    """A tree of about LEVELS levels of equal size, in which the first nodes of a level have most children."""
    tree, first, size = DraftTree.root(0), 0, 1
    while (total := first + size) < rows:
        count = min(max(2, rows // LEVELS), rows - total)
        ranks = torch.arange(count)
        parents = first + (ranks * ranks * size) // (count * count)
        tree = tree.extend(parents, ranks, torch.zeros(count), ranks)
        first, size = total, count
    return tree


if __name__ == "__main__":
    main()
