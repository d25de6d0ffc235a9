"""`windfall chat`: a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windfall import console
from windfall.cli.options import (
    ModelOptions,
    PolicyOptions,
    SamplingOptions,
    ShowDrafts,
    System,
    message,
    takes_records,
)
from windfall.cli.session import Session, check_chat, record

if TYPE_CHECKING:
    from windfall.engine import Generation


@takes_records
def chat(
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    system: System = None,
    show_drafts: ShowDrafts = False,
) -> None:
    """Talk with the model; /clear starts anew, /stats shows figures, /exit or Ctrl-D leaves."""
    keywords = sampling.keywords()
    engine = model.load(policy.make())
    check_chat(engine)
    record(engine, keywords)
    names = {"drafter": model.drafter_name, "policy": policy.name}
    conversation = Conversation(Session(engine, names, keywords, coloured=show_drafts), system)
    for line in filter(None, map(str.strip, console.turns())):
        if line == "/exit":
            break
        _take_turn(conversation, line)


class Conversation:
    """Messages so far, and what their answers cost."""

    def __init__(self, session: Session, system: str | None) -> None:
        self.session = session
        self.opening = [] if system is None else [message("system", system)]
        self.messages = self.opening
        self.answers: list[Generation] = []

    def ask(self, text: str) -> None:
        """One turn; an answer cut short by Ctrl-C stays in the conversation as it is."""
        messages = [*self.messages, message("user", text)]
        generation = self.session.answer(messages)
        self.messages = [*messages, message("assistant", generation.text)]
        self.answers.append(generation)

    def clear(self) -> None:
        self.messages = self.opening

    def stats(self) -> None:
        rows = {f"answer {place}": generation.stats for place, generation in enumerate(self.answers, 1)}
        console.stdout().print(console.figures(rows))


def _take_turn(conversation: Conversation, line: str) -> None:
    from windfall.records import InputError

    commands = {"/clear": conversation.clear, "/stats": conversation.stats}
    if line in commands:
        commands[line]()
    elif line.startswith("/") and line[1:].isalpha():
        console.note(f"there is no {line}; there are {', '.join(commands)} and /exit")
    else:
        try:
            conversation.ask(line)
        except InputError as error:
            console.fail(f"{error} (/clear starts anew)")
