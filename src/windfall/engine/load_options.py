"""Options of `windfall.load` that the command line and Ray offer, each declared once. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.core.options import option


@dataclass
class TargetChoice:
    """The target model and where it runs."""

    target: str | None = option(None, "Target model: folder, GGUF file or hub id. Default: the embedded model.")
    device: str | None = option(None, "cpu, cuda, cuda:1 or mps. Default: the best device available.")
    dtype: str | None = option(None, "float32, bfloat16 or float16. Default: depends on the device.")
    weights: str | None = option(
        None,
        "On a CPU, store the target's weights as bf16, int8, file (the numbers of a GGUF file) or full (as --dtype). "
        "Fewer bits per weight make decoding faster. The text is that of the model with these weights. Default: file "
        "for GGUF files that support it, bf16 for known models whose weights are stored in bf16, else full.",
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")

    @property
    def placement(self) -> dict[str, Any]:
        """The keywords of `windfall.load` that say how the target is loaded."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "weights": self.weights,
        }


@dataclass
class ModelChoice(TargetChoice):
    """The target, the drafter, and how they run."""

    drafter: str | None = option(
        None,
        "Drafter: a name (see `windfall policies`), FILE.py:CLASS, a draft head, or a smaller model. Default: head "
        "for SmolLM2-135M-Instruct (in any precision, as GGUF, or lightly fine-tuned); ngram for any "
        "other model.",
    )
    uncoupled: bool = option(False, "Draft without the sampling noise of the target, as in the papers.")
    no_graphs: bool = option(False, "On a GPU, do not use CUDA graphs.")
    compile: bool = option(False, "On a GPU, use torch.compile for models without fused kernels; slow to start.")
    fast: bool = option(
        False,
        "On a GPU, use another order of additions where that is faster. In half precision a near-tie between two "
        "tokens may then resolve differently, so the text may differ from plain decoding's.",
    )
    host_policies: bool = option(False, "On a GPU, run every policy on the host.")

    @property
    def on_gpu(self) -> dict[str, Any]:
        """The keywords of `windfall.load` that say how passes run on a GPU."""
        graphs = False if self.no_graphs else None
        return {"graphs": graphs, "compile": self.compile, "exact": not self.fast, "host_policies": self.host_policies}

    @property
    def model_keywords(self) -> dict[str, Any]:
        """The keywords of `windfall.load` for these options."""
        names = {"target": self.target, "drafter": self.drafter, "coupled": not self.uncoupled}
        return {**names, **self.placement, **self.on_gpu}


@dataclass
class BatchLimits:
    """How many texts are generated together."""

    max_requests: int | None = option(
        None, "Largest number of texts that run together. Default: 8 on a CPU, 128 on other devices."
    )
    kv_memory: str | None = option(
        None,
        "Memory for the KV caches of texts that run together, such as 4GB. Default: half of the free memory.",
        metavar="SIZE",
    )

    @property
    def limits(self) -> dict[str, Any]:
        """The keywords of `windfall.load` for these options."""
        return {"max_requests": self.max_requests, "kv_memory": self.kv_memory}


@dataclass
class PolicyChoice:
    """The policy that shapes the draft trees."""

    policy: str | None = option(None, "Tree policy: a name (see `windfall policies`), or FILE.py:CLASS. Default: auto.")
    preset: str | None = option(
        None, "Policy and settings of a published method, or a file that `windfall tune` wrote."
    )
