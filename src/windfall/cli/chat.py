"""`windfall chat`: a conversation with the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.text import Text

from windfall.cli import chat_settings, conversations
from windfall.cli.chat_input import at_terminal, messages
from windfall.cli.conversations import Autosave, Conversation
from windfall.cli.declare import given_options, option, show_drafts_option, system_option
from windfall.cli.options import ModelOptions, PolicyOptions, SamplingOptions
from windfall.cli.session import Session, capture_graphs, check_chat
from windfall.core.errors import InputError
from windfall.render import console

if TYPE_CHECKING:
    from windfall.core.stats import Stats
    from windfall.engine.engine import Generation


class Command(NamedTuple):
    """A command that can be typed after a slash."""

    takes: str  # its argument, as /help shows it; in brackets if it is optional
    help: str


COMMANDS = {
    "help": Command("", "show this list"),
    "set": Command(
        "[NAME VALUE]", "change a sampling option: /set temperature 0.7; without arguments: show all options"
    ),
    "system": Command("[TEXT]", 'change the system message ("" removes it); without arguments: show it'),
    "save": Command("FILE", "save the conversation to a file"),
    "load": Command("FILE", "continue the conversation in a file"),
    "retry": Command("", "answer the last message again, with a new seed if tokens are sampled"),
    "clear": Command("", "start a new conversation"),
    "stats": Command("", "show the statistics of the answers"),
    "exit": Command("", "end the chat, like Ctrl-D"),
}
KEYS = (
    "Enter sends the message, Alt-Enter or Esc Enter starts a new line, and pasted text is one message.\n"
    'The lines between two lines of """ are one message, too. The up arrow recalls earlier messages.\n'
    "Ctrl-C stops an answer and keeps its beginning, or clears the typed text; Ctrl-D ends the chat."
)


def chat(
    context: typer.Context,
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    system: str | None = system_option(),
    show_drafts: bool = show_drafts_option(),
    resume: bool = option(False, "Continue the last conversation.", "--continue", "-c"),
    load: Path | None = option(None, "Continue the conversation in this file.", metavar="FILE"),
    no_save: bool = option(False, "Save neither the conversation nor the input history."),
) -> None:
    """Talk with the model. Type /help for the commands and Ctrl-D to end the chat."""
    if resume and load is not None:
        raise InputError("--continue takes the last conversation, --load the one in a file; choose one")
    file = conversations.last() if resume else load
    saved = None if file is None else conversations.read(file)
    if saved is not None and file is not None:
        given = given_options(context)
        flags = {name: value for name, value in asdict(sampling).items() if name in given}
        model = model if "target" in given else replace(model, target=saved.target)
        sampling = replace(_saved_sampling(saved, file), **flags)
    keywords = sampling.keywords()
    engine = model.load(policy.make())
    check_chat(engine)
    engine.params(**keywords)
    capture_graphs(engine, keywords)
    history, autosave = _storage(no_save)
    names = {"drafter": model.drafter_name(engine.target), "policy": policy.name}
    talk = Chat(Session(engine, names, keywords, coloured=show_drafts), sampling, system, model.reference, autosave)
    if at_terminal():
        talk.greet()
    if saved is not None and file is not None:
        talk.resume(saved, file, system)
    for text in messages(history, completions):
        if not talk.take(text):
            break


def _saved_sampling(saved: Conversation, file: Path) -> SamplingOptions:
    try:
        return chat_settings.restored(saved.sampling)
    except InputError as error:
        raise InputError(f"'{file}': {error}") from None


def _storage(no_save: bool) -> tuple[Path | None, Autosave | None]:
    """The file of the input history, and what saves the conversation; None if that is not wanted or not possible."""
    if no_save:
        return None, None
    try:
        return conversations.prepare(), Autosave()
    except InputError as error:
        console.note(f"this conversation is not saved: {error} (WINDFALL_DATA can name another folder)")
        return None, None


def _short(path: Path) -> str:
    """A path with ~ for the home folder."""
    home = os.path.expanduser("~")
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


# ---- typed text


def split_command(text: str) -> tuple[str, str] | None:
    """The name and argument of a command such as `/set top-k 5`; None for a message, also if it begins with a path."""
    match = re.fullmatch(r"/([A-Za-z]+)(?:\s+(.*?))?\s*", text, re.DOTALL)
    return (match[1].lower(), match[2] or "") if match else None


def completions(text: str) -> list[str]:
    """Words that can complete the last word of this text."""
    start, space, word = text.rpartition(" ")
    commands = [f"/{name} " if command.takes else f"/{name}" for name, command in COMMANDS.items()]
    choices = [f"{name} " for name in chat_settings.names()] if start == "/set" else [] if space else commands
    return [choice for choice in choices if choice.startswith(word) and (word or space)]


# ---- the conversation


class Chat:
    """A running conversation: takes messages and commands, prints the answers and saves them."""

    def __init__(
        self,
        session: Session,
        sampling: SamplingOptions,
        system: str | None = None,
        target: str | None = None,
        autosave: Autosave | None = None,
    ) -> None:
        self.session, self.sampling, self.autosave = session, sampling, autosave
        self.conversation = Conversation(session.engine.target.name, target, system, (), asdict(sampling))
        self.answers: list[Stats] = []

    def greet(self) -> None:
        names = self.session.names
        console.note(f"{self.conversation.model} · drafter {names['drafter']} · policy {names['policy']}")
        if self.autosave is not None:
            console.note(f"Conversations are saved in {_short(self.autosave.file.parent)}, except with --no-save")
        console.note("Enter sends, Alt-Enter starts a new line, /help lists the commands, Ctrl-D ends the chat")

    def take(self, text: str) -> bool:
        """Handle one message or command; False ends the chat."""
        command = split_command(text)
        if command is not None and command[0] == "exit" and not command[1]:
            return False
        try:
            if command is not None:
                self.run_command(*command)
            elif text.strip():
                self.ask(text)
        except InputError as error:
            console.fail(str(error))
        except KeyboardInterrupt:
            console.note("interrupted")
        return True

    def run_command(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            raise InputError(f"there is no /{name}; there are {', '.join(f'/{each}' for each in COMMANDS)}")
        takes = COMMANDS[name].takes
        if argument and not takes:
            raise InputError(f"/{name} takes no argument")
        if not argument and takes and not takes.startswith("["):
            raise InputError(f"/{name} takes a file name: /{name} {takes}")
        command: Callable[..., None] = getattr(self, name)
        command(*([argument] if takes else []))

    # answers

    def ask(self, text: str) -> None:
        """Answer a message; Ctrl-C ends the answer, and its beginning stays in the conversation."""
        self._answer(self.conversation.plus("user", text), self.session)

    def retry(self) -> None:
        conversation = self.conversation.unanswered()
        if not conversation.messages:
            raise InputError("there is no message to answer yet")
        before = self.conversation.messages[len(conversation.messages) :]
        sampled = not self.session.engine.params(**self.session.sampling).greedy
        fresh = {"seed": None} if sampled else {}
        self._answer(conversation, replace(self.session, sampling={**self.session.sampling, **fresh}))
        if not sampled and self.conversation.messages[len(conversation.messages) :] == before:
            console.note("the same answer, because temperature 0 is deterministic; /set temperature 0.7 samples")

    def _answer(self, conversation: Conversation, session: Session) -> None:
        prompt = conversation.prompt()
        room = self._room(prompt)
        generation = session.answer(prompt)
        self.conversation = conversation.plus("assistant", generation.text)
        self.answers.append(generation.stats)
        self._explain_limit(generation, room)
        if self.autosave is not None:
            self.autosave.save(self.conversation)

    def _room(self, prompt: list[dict[str, str]]) -> int | None:
        """Maximum number of tokens of an answer; None: no limit."""
        target = self.session.engine.target
        if target.context is None:
            return None
        length = len(self.session.engine.tokenize(prompt))
        if length >= target.context:
            limit = f"{target.name} takes {target.context - 1} at most"
            raise InputError(f"the conversation would have {length} tokens; {limit} (/clear starts a new conversation)")
        return target.context - length

    def _explain_limit(self, generation: Generation, room: int | None) -> None:
        """Say why an answer was cut off."""
        if generation.finish_reason != "length":
            return
        if room is not None and generation.stats.tokens >= room:
            console.note("the context is full; /clear starts a new conversation")
        else:
            console.note(f"cut at max-new-tokens {self.sampling.max_new_tokens}; /set max-new-tokens N allows more")

    # commands

    def help(self) -> None:
        typed = {f"/{name} {command.takes}".rstrip(): command.help for name, command in COMMANDS.items()}
        width = max(map(len, typed))
        self._print("\n".join([*(f"{each:<{width}}  {help}" for each, help in typed.items()), KEYS]))

    def set(self, argument: str) -> None:
        if not argument:
            self._print(chat_settings.listed(self.sampling))
            return
        if re.search(r"[\s=]", argument):
            self._change_sampling(chat_settings.changed(self.sampling, argument))
        self._print(chat_settings.setting(self.sampling, argument))

    def _change_sampling(self, sampling: SamplingOptions) -> None:
        keywords = sampling.keywords()
        self.session.engine.params(**keywords)
        self.sampling, self.session = sampling, replace(self.session, sampling=keywords)
        self.conversation = replace(self.conversation, sampling=asdict(sampling))

    def system(self, argument: str) -> None:
        if argument:
            self.conversation = replace(self.conversation, system=None if argument in ('""', "''") else argument)
        self._print(self.conversation.system or "there is no system message")

    def save(self, argument: str) -> None:
        file = Path(argument).expanduser()
        conversations.write_new(file, self.conversation)
        console.note(f"saved to {file}")

    def load(self, argument: str) -> None:
        file = Path(argument).expanduser()
        saved = conversations.read(file)
        self._change_sampling(_saved_sampling(saved, file))
        self.resume(saved, file)

    def resume(self, saved: Conversation, file: Path, system: str | None = None) -> None:
        """Continue a saved conversation; `system` replaces the saved system message."""
        system = saved.system if system is None else system
        self.conversation = replace(self.conversation, system=system, messages=saved.messages)
        if self.autosave is not None:
            self.autosave.follow(file)
        console.note(f"continuing {_short(file)} ({len(saved.messages)} messages)")
        if saved.model != self.conversation.model:
            console.note(f"the saved conversation was with {saved.model}; {self.conversation.model} continues it")
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
        console.stdout().print(console.stats_table(rows))

    def _print(self, text: str) -> None:
        console.stdout().print(Text(text))
