"""What the commands take: options are declared once, as fields of records, and shared by the commands."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import inspect
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windfall.cli import complete, defaults
from windfall.render import console

if TYPE_CHECKING:
    from windfall.core.types import GpuOptions
    from windfall.engine.engine import Engine, Prompt
    from windfall.model.target import Target
    from windfall.policies.base import TreePolicy
    from windfall.prompts.files import Asked

T = TypeVar("T")


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector: while libraries are imported and models loaded it costs a second and finds little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_libraries() -> None:
    """Import what every model needs, with a word on the terminal: it takes seconds."""
    with console.waiting("Importing PyTorch and transformers…"), uncollected():
        import windfall.engine.loading  # noqa: F401
        from windfall.checkpoints.find import import_classes

        import_classes()


@contextmanager
def loading_model() -> Iterator[None]:
    """Tell the user that a model is loading. The garbage collector then ignores the loaded objects: a round over all of
    them would take a tenth of a second or more while a text is being written."""
    with console.waiting("Loading the model…"), uncollected():
        yield
        gc.collect(1)  # what loading has left behind
    gc.freeze()
    atexit.register(gc.unfreeze)


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take whole records: their fields become its arguments and options.

    Where the command line leaves out an option of a record that is `configured`, the config file may set it.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        flat += _parameters(records[name]) if name in records else [own]

    from_file = {f.name for kind in records.values() if kind in CONFIGURED for f in dataclasses.fields(kind)}
    asks_context = "context" in hints
    if not asks_context:
        flat += [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]

    @functools.wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        if from_file:
            values |= defaults.fill({name: values[name] for name in from_file}, given_options(context))
        if any(issubclass(record, TargetOptions | ModelOptions) for record in records.values()):
            import_libraries()
        for name, record in records.items():
            values[name] = record(**{f.name: values.pop(f.name) for f in dataclasses.fields(record)})
        command(**values, **({"context": context} if asks_context else {}))

    run.__dict__["__signature__"] = inspect.Signature(flat)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def given_options(context: typer.Context) -> set[str]:
    """The names of the options that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


CONFIGURED: list[Any] = []  # records whose options the config file may set


def configured(record: type[T]) -> type[T]:
    """Let the config file set the options of this record."""
    CONFIGURED.append(record)
    return record


def _parameters(record: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=_annotation(f, hints[f.name])
        )
        for f in dataclasses.fields(record)
    ]


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default


def _annotation(f: dataclasses.Field[Any], hint: Any) -> Any:
    """What typer wants; fields made with `options.option` carry their own words."""
    if "help" not in f.metadata:
        return hint
    return Annotated[hint, typer.Option(f"--{f.name.replace('_', '-')}", help=f.metadata["help"])]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
System = Annotated[str | None, typer.Option("--system", help="A system message before the prompt.", metavar="TEXT")]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour drafted and accepted tokens apart from the target's own.")
]


@dataclass
class PromptOptions:
    """Where the prompt comes from and whether it is a chat message."""

    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.", show_default=False)
    ] = None
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Read the prompt from a file; `generate` answers every line of a .jsonl file."),
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")] = False
    system: System = None

    def read(self) -> Prompt:
        """A text, or chat messages where there is a system message."""
        from windfall.core.types import InputError

        self._check()
        if self.several:
            raise InputError(f"'{self.file}' holds prompts for `windfall generate`; give one prompt here")
        text = console.read_prompt(self.prompt, self.file)
        return text if self.system is None else [message("system", self.system), message("user", text)]

    @property
    def several(self) -> bool:
        """Whether the file is one of many prompts."""
        from windfall.prompts.files import SUFFIXES

        return self.file is not None and self.file.suffix in SUFFIXES

    def read_all(self) -> list[Asked]:
        """The lines of a file of prompts."""
        from windfall.core.types import InputError
        from windfall.prompts import files

        self._check()
        if self.prompt is not None:
            raise InputError("give a prompt or --file, not both")
        assert self.file is not None
        return files.read(self.file)

    def _check(self) -> None:
        from windfall.core.types import InputError

        if self.raw and self.system is not None:
            raise InputError("--system needs the chat template, which --raw leaves out; choose one")


def words(texts: list[str], option: str) -> list[str]:
    """The names in an option that takes several, separated by commas, and can be repeated."""
    from windfall.core.errors import InputError

    found = [word.strip() for text in texts for word in text.split(",")]
    if not all(found):
        raise InputError(f"write {option} as names separated by commas")
    return found


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _model(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Model", **more)


@configured
@dataclass
class TargetOptions:
    """Which target, and where it runs."""

    target: Annotated[
        str | None, _model("--target", "Folder, GGUF file or hub id of the model; none: the embedded one.")
    ] = None
    device: Annotated[str | None, _model("--device", "cpu, cuda, cuda:1, mps; none: the best there is.")] = None
    dtype: Annotated[str | None, _model("--dtype", "float32, bfloat16, float16; none: what suits the device.")] = None
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", "Run Python code that comes with the model.")] = (
        False
    )

    def load(self) -> Target:
        from windfall.engine import loading

        how: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        with loading_model():
            return loading.as_target(self.target, **how)


@configured
@dataclass
class ModelOptions:
    """Which target and drafter, and where they run."""

    target: Annotated[
        str | None, _model("--target", "Folder, GGUF file or hub id of the model; none: the embedded one.")
    ] = None
    drafter: Annotated[
        str | None,
        _model(
            "--drafter",
            "Drafter by name (see `windfall policies`), FILE.py:CLASS, a draft head, or a smaller model.",
            autocompletion=complete.drafters,
        ),
    ] = None
    drafter_settings: Annotated[
        list[str], _model("--drafter-set", "An option of the drafter; repeatable.", metavar="NAME=VALUE")
    ] = field(default_factory=list)
    device: Annotated[str | None, _model("--device", "cpu, cuda, cuda:1, mps; none: the best there is.")] = None
    dtype: Annotated[str | None, _model("--dtype", "float32, bfloat16, float16; none: what suits the device.")] = None
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", "Run Python code that comes with the model.")] = (
        False
    )
    uncoupled: Annotated[bool, _model("--uncoupled", "Hide the sampling noise from the drafter, as in the papers.")] = (
        False
    )

    no_graphs: Annotated[bool, _model("--no-graphs", "On a GPU, launch kernels one by one.")] = False
    compile: Annotated[
        bool, _model("--compile", "On a GPU, torch.compile models without a fused forward; the first pass takes long.")
    ] = False

    exact: Annotated[
        bool, _model("--exact", "On a GPU, round every row as plain decoding does, in half precision, too; slower.")
    ] = False

    host_policies: Annotated[
        bool, _model("--host-policies", "On a GPU, let every policy decide on the host, also those with a plan.")
    ] = False

    def load(self, policy: Any = None) -> Engine:
        """The engine; names and settings are checked before the weights are read."""
        from windfall.core.errors import HeadWarning
        from windfall.core.options import split_settings
        from windfall.engine import loading

        settings = split_settings(self.drafter_settings)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", HeadWarning)
            with loading_model():
                engine = loading.load(
                    self.target,
                    self.drafter,
                    policy,
                    self.device,
                    self.dtype,
                    self.trust_remote_code,
                    drafter_options=settings,
                    coupled=not self.uncoupled,
                    **self.gpu_words,
                )
        for each in told:
            if issubclass(each.category, HeadWarning):
                console.note(str(each.message))
        if reason := engine.gpu_unavailable:
            console.note(f"passes are launched kernel by kernel, because {reason}")
        return engine

    @property
    def gpu_words(self) -> dict[str, Any]:
        """How passes run on a GPU, in the words of `windfall.load`."""
        graphs = False if self.no_graphs else None
        return {"graphs": graphs, "compile": self.compile, "exact": self.exact, "host_policies": self.host_policies}

    @property
    def launch(self) -> GpuOptions:
        from windfall.engine.loading import as_gpu_options

        return as_gpu_options(None, **self.gpu_words)

    @property
    def drafter_name(self) -> str:
        from windfall.engine.loading import default_drafter

        return self.drafter or default_drafter(self.target)


def _policy(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Policy", **more)


@configured
@dataclass
class PolicyOptions:
    """Which policy shapes the trees."""

    policy: Annotated[
        str | None,
        _policy(
            "--policy",
            "Tree policy by name (see `windfall policies`), or FILE.py:CLASS.",
            autocompletion=complete.policies,
        ),
    ] = None
    preset: Annotated[
        str | None,
        _policy(
            "--preset",
            "Policy and settings of a published method, or of a `tune` file.",
            autocompletion=complete.presets,
        ),
    ] = None
    settings: Annotated[list[str], _policy("--set", "An option of the policy; repeatable.", metavar="NAME=VALUE")] = (
        field(default_factory=list)
    )

    def make(self) -> TreePolicy:
        from windfall.core.options import split_settings
        from windfall.engine import loading

        return loading.choose_policy(self.policy, split_settings(self.settings), self.preset)

    @property
    def name(self) -> str:
        from windfall.engine.loading import DEFAULT_POLICY

        return self.preset or self.policy or DEFAULT_POLICY


def _sampling(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Sampling", **more)


@configured
@dataclass
class SamplingOptions:
    """How tokens are drawn; the defaults are those of SamplingParams."""

    max_new_tokens: Annotated[int, _sampling("--max-new-tokens", "Length of the answer at the most.")] = 256
    temperature: Annotated[float, _sampling("--temperature", "0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("--top-k", "Draw from the k likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _sampling("--top-p", "Draw from the likeliest tokens that make up this mass.")] = 1.0
    min_p: Annotated[float, _sampling("--min-p", "Least probability, relative to the likeliest token's.")] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", "Divides logits of seen tokens; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", "Taken off the logits of tokens in the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", "The same, for each time a token occurred.")
    ] = 0.0
    logit_bias: Annotated[
        list[str], _sampling("--logit-bias", "Added to a token's logit; repeatable.", metavar="ID=VALUE")
    ] = field(default_factory=list)
    stop: Annotated[list[str], _sampling("--stop", "End before this text; repeatable.", metavar="TEXT")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", "Go on after the model's end of text.")] = False
    seed: Annotated[int | None, _sampling("--seed", "Same seed, same text; none: a fresh one, which is reported.")] = (
        None
    )

    def keywords(self) -> dict[str, Any]:
        """The keywords of Engine.generate, checked as far as no model is needed."""
        from windfall.core.types import SamplingParams

        values = dataclasses.asdict(self)
        values["eos"] = () if values.pop("ignore_eos") else None
        values["stop"] = tuple(self.stop)
        values["logit_bias"] = dict(map(_bias, self.logit_bias))
        SamplingParams(**values)
        return values


def _bias(item: str) -> tuple[int, float]:
    from windfall.core.types import InputError

    token, _, value = item.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"write --logit-bias as ID=VALUE, for example 42=-100, not '{item}'") from None
