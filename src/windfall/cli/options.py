"""Records of options that several commands share: prompt, target, drafter, policy and sampling."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.cli.config_file import configurable, made_with
from windfall.cli.declare import argument, ignore_eos_option, option, system_option
from windfall.core.errors import InputError, UserNote
from windfall.core.options import split_settings
from windfall.engine.load_options import BatchLimits, ModelChoice, PolicyChoice, TargetChoice
from windfall.prompts import files
from windfall.prompts.reading import read_prompt
from windfall.render import console

if TYPE_CHECKING:
    from windfall.bench.methods import DrafterSpec
    from windfall.core.types import GpuOptions
    from windfall.engine.engine import Engine, Prompt
    from windfall.model.target import Target
    from windfall.policies.base import TreePolicy


@dataclass
class PromptOptions:
    """The source of the prompt, and whether it is a chat message."""

    prompt: str | None = argument(None, "The prompt. With - or without a prompt, standard input is read.")
    file: Path | None = option(None, "Read the prompt from this file; `generate` answers each line of a .jsonl file.")
    raw: bool = option(False, "Do not apply the chat template.")
    system: str | None = system_option()

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise InputError("--system needs the chat template, which --raw leaves out; choose one")

    def read(self) -> Prompt:
        """One prompt: a text, or chat messages if there is a system message."""
        if self.has_many:
            raise InputError(f"'{self.file}' holds prompts for `windfall generate`; give one prompt here")
        text = read_prompt(self.prompt, self.file)
        return text if self.system is None else [message("system", self.system), message("user", text)]

    @property
    def has_many(self) -> bool:
        """Whether the file holds several prompts."""
        return self.file is not None and self.file.suffix in files.SUFFIXES

    def read_many(self) -> list[files.PromptLine]:
        """The lines of a file of prompts."""
        if self.prompt is not None:
            raise InputError("give a prompt or --file, not both")
        assert self.file is not None
        return files.read(self.file)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@configurable
@dataclass
class TargetOptions(TargetChoice):
    """The target model and where it runs."""

    PANEL = "Model"

    @staticmethod
    def prepare() -> None:
        """Import what every model needs. It takes seconds, so a message is shown on a terminal."""
        with console.waiting("Importing PyTorch and transformers…"), uncollected():
            import windfall.engine.loading  # noqa: F401
            from windfall.checkpoints.find import import_classes

            import_classes()

    def load_target(self) -> Target:
        from windfall.engine import loading

        with loading_model():
            return loading.as_target(self.target, **self.placement)


@configurable
@dataclass
class BatchOptions(BatchLimits):
    """How many texts are generated together."""

    PANEL = "Batch"


@configurable
@dataclass
class ModelOptions(TargetOptions, ModelChoice):
    """The target, the drafter, and how they run."""

    drafter_settings: list[str] = option(
        [], "Set an option of the drafter. Repeatable.", "--drafter-set", metavar="NAME=VALUE"
    )
    exact: bool = option(False, "The default: without --fast, the text is plain decoding's.", hidden=True)

    def __post_init__(self) -> None:
        if self.exact and self.fast:
            raise InputError("--exact and --fast contradict each other; choose one")

    def load(self, policy: Any = None, batch: BatchOptions | None = None) -> Engine:
        """The engine; names and settings are checked before the weights are read."""
        from windfall.engine import loading

        self.check_drafter()
        settings = split_settings(self.drafter_settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserNote)
            with loading_model():
                limits = {} if batch is None else batch.limits
                engine = loading.load(policy=policy, drafter_options=settings, **self.model_keywords, **limits)
        for each in caught:
            if issubclass(each.category, UserNote):
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)
        if reason := engine.gpu_unavailable:
            console.note(f"CUDA graphs are not used, because {reason}")
        return engine

    @property
    def reference(self) -> str | None:
        """The value of --target that names the same model in any working directory."""
        local = self.target is not None and Path(self.target).exists()
        return str(Path(str(self.target)).resolve()) if local else self.target

    @property
    def gpu_options(self) -> GpuOptions:
        from windfall.engine.loading import as_gpu_options

        return as_gpu_options(None, **self.on_gpu)

    def drafter_name(self, target: Target) -> str:
        """The drafter that was named, or else the default for the loaded target."""
        from windfall.engine.loading import default_drafter

        return self._early_drafter or default_drafter(target)

    def drafter_spec(self, target: Target) -> DrafterSpec:
        """The drafter and its settings, as benchmarks name them."""
        from windfall.bench.methods import DrafterSpec

        return DrafterSpec(self.drafter_name(target), split_settings(self.drafter_settings))

    def check_drafter(self) -> None:
        """Check the drafter and its settings, as far as that needs no target."""
        from windfall.bench.methods import DrafterSpec

        def check(settings: dict[str, str]) -> None:
            if self._early_drafter is not None:
                DrafterSpec(self._early_drafter, settings).check()

        made_with(self.drafter_settings, "drafter_options", check)

    @property
    def _early_drafter(self) -> str | None:
        """The drafter, if it is known before the target is loaded."""
        from windfall.engine.loading import default_drafter

        return default_drafter(None) if self.drafter is None and self.target is None else self.drafter


@configurable
@dataclass
class PolicyOptions(PolicyChoice):
    """The policy that shapes the draft trees."""

    PANEL = "Policy"

    settings: list[str] = option([], "Set an option of the policy. Repeatable.", "--set", metavar="NAME=VALUE")

    def make(self) -> TreePolicy:
        from windfall.engine import loading

        def made(settings: dict[str, str]) -> TreePolicy:
            return loading.choose_policy(self.policy, settings, self.preset)

        return made_with(self.settings, "policy_options", made)

    @property
    def name(self) -> str:
        from windfall.engine.loading import DEFAULT_POLICY

        return self.preset or self.policy or DEFAULT_POLICY


@configurable
@dataclass
class SamplingOptions:
    """How tokens are sampled; the defaults are those of SamplingParams."""

    PANEL = "Sampling"

    max_new_tokens: int = option(256, "Maximum length of the answer.")
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.")
    top_k: int = option(0, "Sample from the k likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Sample from the likeliest tokens whose probabilities add up to this.")
    min_p: float = option(0.0, "Minimum probability of a token, relative to the likeliest token.")
    repetition_penalty: float = option(1.0, "Divide the logits of tokens that occurred before by this.")
    presence_penalty: float = option(0.0, "Subtract this from the logits of tokens in the answer.")
    frequency_penalty: float = option(0.0, "Subtract this for each time a token occurs in the answer.")
    logit_bias: list[str] = option([], "Add a value to the logit of a token. Repeatable.", metavar="ID=VALUE")
    stop: list[str] = option([], "Stop before this text. Repeatable.", metavar="TEXT")
    ignore_eos: bool = ignore_eos_option()
    seed: int | None = option(None, "Random seed; the same seed gives the same text. Default: a new seed, printed.")

    def keywords(self, **more: Any) -> dict[str, Any]:
        """The keywords of Engine.generate, and `more` of them, with all checks that need no model."""
        from windfall.core.types import SamplingParams

        values = {**dataclasses.asdict(self), **more}
        values["eos"] = () if values.pop("ignore_eos") else None
        values["stop"] = tuple(self.stop)
        values["logit_bias"] = dict(map(_parse_bias, self.logit_bias))
        SamplingParams(**values)
        return values


def _parse_bias(item: str) -> tuple[int, float]:
    token, _, value = item.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"write --logit-bias as ID=VALUE, for example 42=-100, not '{item}'") from None


# ---- loading


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector: it takes a second while libraries and models are loaded, and frees little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def loading_model() -> Iterator[None]:
    """Show that a model is loading, and exclude the loaded objects from garbage collection: a collection over all of
    them would interrupt the text for a tenth of a second or more."""
    with console.waiting("Loading the model…"), uncollected():
        yield
        gc.collect(1)  # temporary objects of the loading
    gc.freeze()
    atexit.register(gc.unfreeze)
