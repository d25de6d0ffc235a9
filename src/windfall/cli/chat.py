"""`windfall chat`: a conversation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from windfall.cli.options import (
    ModelOptions,
    PolicyOptions,
    SamplingOptions,
    ShowDrafts,
    System,
    given_options,
    takes_records,
)
from windfall.cli.session import Session, check_chat, record
from windfall.core.errors import InputError
from windfall.render import console

if TYPE_CHECKING:
    from windfall.cli.conversations import Autosave, Conversation
    from windfall.core.stats import Stats
    from windfall.engine.engine import Generation


class Command(NamedTuple):
    """What can be typed after a slash."""

    takes: str  # as /help shows it; optional in brackets
    help: str


COMMANDS = {
    "help": Command("", "show this list"),
    "set": Command("[NAME VALUE]", "change a sampling option: /set temperature 0.7; alone: show all options"),
    "system": Command("[TEXT]", 'change the system message ("": none); alone: show it'),
    "save": Command("FILE", "save the conversation to a file"),
    "load": Command("FILE", "continue the conversation in a file"),
    "retry": Command("", "answer the last message anew, with a new seed where tokens are sampled"),
    "clear": Command("", "start a new conversation"),
    "stats": Command("", "show the figures of the answers"),
    "exit": Command("", "leave; Ctrl-D does the same"),
}
KEYS = (
    "Enter sends, Alt-Enter or Esc Enter makes a new line, and pasted text stays one message.\n"
    'A message of several lines can also stand between two lines of """. The up arrow brings back earlier messages.\n'
    "Ctrl-C stops an answer, which stays as far as it came, or clears what is typed; Ctrl-D leaves."
)


@takes_records
def chat(
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    system: System = None,
    show_drafts: ShowDrafts = False,
    resume: Annotated[bool, typer.Option("--continue", "-c", help="Continue the last conversation.")] = False,
    load: Annotated[
        Path | None, typer.Option("--load", help="Continue the conversation in this file.", metavar="FILE")
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep neither conversation nor history.")] = False,
    *,
    context: typer.Context,
) -> None:
    """Talk with the model. Type /help for the commands; Ctrl-D leaves."""
    from windfall.cli.chat_input import at_terminal, messages
    from windfall.cli.conversations import read

    file = _file_to_continue(resume, load)
    saved = None if file is None else read(file)
    if saved is not None:
        given = given_options(context)
        model = model if "target" in given else replace(model, target=saved.target)
        sampling = _continued(saved, sampling, given, file)
    keywords = sampling.keywords()
    engine = model.load(policy.make())
    check_chat(engine)
    engine.params(**keywords)
    record(engine, keywords)
    history, autosave = _keeping(no_save)
    names = {"drafter": model.drafter_name, "policy": policy.name}
    talk = Chat(Session(engine, names, keywords, coloured=show_drafts), sampling, system, _reference(model), autosave)
    if at_terminal():
        talk.greet()
    if saved is not None and file is not None:
        talk.resume(saved, file, system)
    for text in messages(history, completions):
        if not talk.take(text):
            break


def _file_to_continue(resume: bool, load: Path | None) -> Path | None:
    from windfall.cli.conversations import last

    if resume and load is not None:
        raise InputError("--continue takes the last conversation, --load the one in a file; choose one")
    return last() if resume else load


def _continued(saved: Conversation, flags: SamplingOptions, given: set[str], file: Path | None) -> SamplingOptions:
    """The saved sampling options, with those that were given on the command line in their place."""
    from windfall.cli.chat_settings import restored

    try:
        options = restored(saved.sampling)
    except InputError as error:
        raise InputError(f"'{file}': {error}") from None
    return replace(options, **{name: value for name, value in asdict(flags).items() if name in given})


def _reference(model: ModelOptions) -> str | None:
    """What --target has to be for the same model, in any working directory."""
    local = model.target is not None and Path(model.target).exists()
    return str(Path(str(model.target)).resolve()) if local else model.target


def _keeping(no_save: bool) -> tuple[Path | None, Autosave | None]:
    """The history's file and what saves the conversation; neither where that is not wanted or not possible."""
    from windfall.cli.conversations import Autosave, prepare

    if no_save:
        return None, None
    try:
        return prepare(), Autosave()
    except InputError as error:
        console.note(f"this conversation is not kept: {error} (WINDFALL_DATA can name another folder)")
        return None, None


def _short(path: Path) -> str:
    """A path for a reader, with ~ for the home folder."""
    home = os.path.expanduser("~")
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


# ---- what is typed


def split_command(text: str) -> tuple[str, str] | None:
    """`/set top-k 5` → its name and what follows; None for a message, which a path such as /usr/bin may begin."""
    match = re.fullmatch(r"/([A-Za-z]+)(?:\s+(.*?))?\s*", text, re.DOTALL)
    return (match[1].lower(), match[2] or "") if match else None


def completions(text: str) -> list[str]:
    """Words that can take the place of the last one of this text."""
    from windfall.cli.chat_settings import names

    start, space, word = text.rpartition(" ")
    commands = [f"/{name} " if command.takes else f"/{name}" for name, command in COMMANDS.items()]
    choices = [f"{name} " for name in names()] if start == "/set" else [] if space else commands
    return [choice for choice in choices if choice.startswith(word) and (word or space)]


# ---- the conversation


class Chat:
    """A conversation under way: takes messages and commands, prints answers and keeps them."""

    def __init__(
        self,
        session: Session,
        sampling: SamplingOptions,
        system: str | None = None,
        target: str | None = None,
        autosave: Autosave | None = None,
    ) -> None:
        from windfall.cli.conversations import Conversation

        self.session, self.sampling, self.autosave = session, sampling, autosave
        self.conversation = Conversation(session.engine.target.name, target, system, (), asdict(sampling))
        self.answers: list[Stats] = []

    def greet(self) -> None:
        names = self.session.names
        console.note(f"{self.conversation.model} · drafter {names['drafter']} · policy {names['policy']}")
        if self.autosave is not None:
            console.note(f"Conversations are kept in {_short(self.autosave.file.parent)}, except with --no-save")
        console.note("Enter sends, Alt-Enter makes a new line, /help lists the commands, Ctrl-D leaves")

    def take(self, text: str) -> bool:
        """One message or command; whether the conversation goes on."""
        command = split_command(text)
        if command is not None and command[0] == "exit" and not command[1]:
            return False
        try:
            if command is not None:
                self.obey(*command)
            elif text.strip():
                self.ask(text)
        except InputError as error:
            console.fail(str(error))
        except KeyboardInterrupt:
            console.note("interrupted")
        return True

    def obey(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            raise InputError(f"there is no /{name}; there are {', '.join(f'/{each}' for each in COMMANDS)}")
        takes = COMMANDS[name].takes
        if argument and not takes:
            raise InputError(f"/{name} takes nothing after it")
        if not argument and takes and not takes.startswith("["):
            raise InputError(f"/{name} takes a file name: /{name} {takes}")
        command: Callable[..., None] = getattr(self, name)
        command(*([argument] if takes else []))

    # answers

    def ask(self, text: str) -> None:
        """Answer a message; an answer that Ctrl-C cuts short stays in the conversation as it is."""
        self._answer(self.conversation.plus("user", text), self.session)

    def retry(self) -> None:
        asked = self.conversation.unanswered()
        if not asked.messages:
            raise InputError("there is no message to answer yet")
        before = self.conversation.messages[len(asked.messages) :]
        sampled = not self.session.engine.params(**self.session.sampling).greedy
        fresh = {"seed": None} if sampled else {}
        self._answer(asked, replace(self.session, sampling={**self.session.sampling, **fresh}))
        if not sampled and self.conversation.messages[len(asked.messages) :] == before:
            console.note("the same answer, since temperature 0 is deterministic; /set temperature 0.7 samples")

    def _answer(self, asked: Conversation, session: Session) -> None:
        prompt = asked.prompt()
        room = self._room(prompt)
        generation = session.answer(prompt)
        self.conversation = asked.plus("assistant", generation.text)
        self.answers.append(generation.stats)
        self._tell_limit(generation, room)
        self._keep()

    def _room(self, prompt: list[dict[str, str]]) -> int | None:
        """Tokens that an answer can have; None: any number."""
        target = self.session.engine.target
        if target.context is None:
            return None
        length = len(self.session.engine.tokenize(prompt))
        if length >= target.context:
            limit = f"{target.name} takes {target.context - 1} at most"
            raise InputError(f"the conversation would have {length} tokens; {limit} (/clear starts anew)")
        return target.context - length

    def _tell_limit(self, generation: Generation, room: int | None) -> None:
        """Why an answer ends in the middle, where it does."""
        if generation.finish_reason != "length":
            return
        if room is not None and generation.stats.tokens >= room:
            console.note("the context is full; /clear starts anew")
        else:
            console.note(f"cut at max-new-tokens {self.sampling.max_new_tokens}; /set max-new-tokens N allows more")

    def _keep(self) -> None:
        if self.autosave is not None:
            self.autosave.save(self.conversation)

    # commands

    def help(self) -> None:
        typed = {f"/{name} {command.takes}".rstrip(): command.help for name, command in COMMANDS.items()}
        width = max(map(len, typed))
        self._print("\n".join([*(f"{each:<{width}}  {help}" for each, help in typed.items()), KEYS]))

    def set(self, argument: str) -> None:
        from windfall.cli import chat_settings

        if not argument:
            self._print(chat_settings.shown(self.sampling))
            return
        if re.search(r"[\s=]", argument):
            self._take_sampling(chat_settings.changed(self.sampling, argument))
        self._print(chat_settings.setting(self.sampling, argument))

    def _take_sampling(self, sampling: SamplingOptions) -> None:
        keywords = sampling.keywords()
        self.session.engine.params(**keywords)
        self.sampling, self.session = sampling, replace(self.session, sampling=keywords)
        self.conversation = replace(self.conversation, sampling=asdict(sampling))

    def system(self, argument: str) -> None:
        if argument:
            self.conversation = replace(self.conversation, system=None if argument in ('""', "''") else argument)
        self._print(self.conversation.system or "there is no system message")

    def save(self, argument: str) -> None:
        from windfall.cli.conversations import write_new

        file = Path(argument).expanduser()
        write_new(file, self.conversation)
        console.note(f"saved to {file}")

    def load(self, argument: str) -> None:
        from windfall.cli.chat_settings import restored
        from windfall.cli.conversations import read

        file = Path(argument).expanduser()
        saved = read(file)
        try:
            self._take_sampling(restored(saved.sampling))
        except InputError as error:
            raise InputError(f"'{file}': {error}") from None
        self.resume(saved, file)

    def resume(self, saved: Conversation, file: Path, system: str | None = None) -> None:
        """Go on with a saved conversation; a system message given here takes the place of the saved one."""
        system = saved.system if system is None else system
        self.conversation = replace(self.conversation, system=system, messages=saved.messages)
        if self.autosave is not None:
            self.autosave.follow(file)
        console.note(f"continuing {_short(file)} ({len(saved.messages)} messages)")
        if saved.model != self.conversation.model:
            console.note(f"this conversation was held with {saved.model}; {self.conversation.model} continues it")
        for each in saved.messages[max(len(saved.unanswered().messages) - 1, 0) :]:
            console.note(f"> {each['content']}" if each["role"] == "user" else each["content"])

    def clear(self) -> None:
        self.conversation = replace(self.conversation, messages=())
        if self.autosave is not None:
            self.autosave.begin()
        console.note("a new conversation")

    def stats(self) -> None:
        if not self.answers:
            raise InputError("there are no answers yet")
        rows = {f"answer {place}": stats for place, stats in enumerate(self.answers, 1)}
        console.stdout().print(console.figures(rows))

    def _print(self, text: str) -> None:
        console.stdout().print(Text(text))
