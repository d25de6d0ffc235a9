"""`windfall generate --file PROMPTS --out ANSWERS`: answer many prompts together, and write each answer at once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.cli.answer_options import differences
from windfall.cli.options import message
from windfall.cli.session import Session, check_out_file, freeze_objects, stop_on_interrupt
from windfall.core.errors import InputError
from windfall.core.files import read_text, replace_text
from windfall.core.wording import counted
from windfall.prompts.files import PromptLine, rows
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Prompt
    from windfall.engine.request import Handle


class Conversation:
    """The turns of one line of a prompt file; each turn sees the answers before it."""

    def __init__(self, line: PromptLine, system: str | None, raw: bool, template: bool):
        """`template`: whether the target has a chat template."""
        self.line, self.raw = line, raw or line.raw
        self._plain, opening = self.raw or not template, line.system or system
        self._messages = [] if opening is None else [message("system", opening)]
        self.turn = 0  # of the last prompt, from 1 on

    @property
    def ended(self) -> bool:
        return self.turn == len(self.line.turns)

    def next_prompt(self) -> Prompt:
        """The prompt of the next turn."""
        self._messages.append(message("user", self.line.turns[self.turn]))
        self.turn += 1
        return "\n\n".join(each["content"] for each in self._messages) if self._plain else list(self._messages)

    def add_answer(self, text: str) -> None:
        self._messages.append(message("assistant", text))


class AnswerFile:
    """A file with one JSON object per answer, in the order in which the texts ended."""

    def __init__(
        self, file: Path, lines: Sequence[PromptLine], resume: bool, options: dict[str, Any], seed: int | None
    ):
        """`options`: those that each answer records. `seed`: None if any will do."""
        check_out_file(file)
        self.file, self.options, self.seed = file, options, seed
        self.texts: dict[tuple[int, int], str] = {}  # answers by line number and turn
        self._targets: dict[str, str] = {}  # names of targets, with the places of their first answers
        if not file.exists():
            return
        content = read_text(file)
        if content and not resume:
            raise InputError(f"'{file}' exists already; continue it with --resume, or choose another --out")
        whole = content[: content.rfind("\n") + 1]
        self._read(whole, {line.number: line for line in lines})
        if whole != content:  # an answer that was not written to its end
            replace_text(file, whole)

    def _read(self, content: str, lines: dict[int, PromptLine]) -> None:
        unrecorded, seed = 0, self.seed
        for number, row in rows(content, f"'{self.file}'"):
            place, found = f"line {number} of '{self.file}'", row if isinstance(row, dict) else {}
            at, turn, text = (found.get(key) for key in ("line", "turn", "text"))
            if not (isinstance(at, int) and isinstance(turn, int) and isinstance(text, str)):
                raise InputError(f"{place} is not an answer that `windfall generate --out` wrote")
            line = lines.get(at)
            if line is None or line.id != found.get("id") or not 1 <= turn <= len(line.turns):
                raise InputError(f"{place} answers another file of prompts; choose another --out")
            self._check_options(found, place)
            if isinstance(target := found.get("target"), str):
                self._targets.setdefault(target, place)
            unrecorded += "options" not in found
            seed = found.get("seed") if self.seed is None else seed
            self.texts[at, turn] = text
        self.seed = seed  # without --seed, that of the last answer
        if unrecorded:
            note = "without their options, as earlier versions wrote them: only target and seed are compared"
            console.note(f"'{self.file}' has {counted(unrecorded, 'answer')} {note}")

    def _check_options(self, answer: dict[str, Any], place: str) -> None:
        """Refuse an answer that was made with other options than the next ones."""
        options, seed = answer.get("options", self.options), answer.get("seed")
        if not isinstance(options, dict) or not isinstance(seed, int | None):
            raise InputError(f"{place} is not an answer that `windfall generate --out` wrote")
        found = differences(options, self.options)
        if self.seed is not None:
            found += differences({"seed": seed}, {"seed": self.seed})
        if found:
            self._refuse(place, found)

    def check_target(self, name: str) -> None:
        """Refuse answers of another target."""
        for other, place in self._targets.items():
            if other != name:
                self._refuse(place, [f"--target ({other}, now {name})"])

    def _refuse(self, place: str, found: list[str]) -> None:
        raise InputError(f"{place} was made with other options: {', '.join(found)}; give the same, or another --out")

    def add(self, record: dict[str, Any]) -> None:
        """Append an answer, with its options."""
        record = {**record, "options": self.options}
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"cannot write '{self.file}': {error.strerror}") from error
        self.texts[record["line"], record["turn"]] = record["text"]


def answer_all(session: Session, conversations: list[Conversation], answers: AnswerFile) -> None:
    """Answer all turns that have no answer yet. Ctrl-C ends the command and keeps the finished answers."""
    total = sum(len(each.line.turns) for each in conversations)
    for each in conversations:
        _skip_answered(each, answers)
        _check(session, each)

    def kept() -> str:
        return f"stopped; {counted(len(answers.texts), 'answer')} kept, and --resume continues"

    with stop_on_interrupt(kept), closing(session.engine), console.progress("Answering", counts=True) as progress:
        progress(len(answers.texts), total)
        unfinished = deque(each for each in conversations if not each.ended)
        _run(session, unfinished, answers, lambda: progress(len(answers.texts), total))
    session.remember_costs()
    console.note(f"{counted(len(answers.texts), 'answer')} in '{answers.file}'")


def _skip_answered(conversation: Conversation, answers: AnswerFile) -> None:
    """Go on after the last turn that has an answer."""
    while (conversation.line.number, conversation.turn + 1) in answers.texts:
        conversation.next_prompt()
        conversation.add_answer(answers.texts[conversation.line.number, conversation.turn])


def _check(session: Session, conversation: Conversation) -> None:
    """Refuse a prompt that cannot be used, before any is answered."""
    if not conversation.ended:
        with at_line(conversation.line):
            session.engine.encode(deepcopy(conversation).next_prompt(), conversation.raw)


@contextmanager
def at_line(line: PromptLine) -> Iterator[None]:
    """An InputError in this block names the line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{line.place}: {error}") from error


def _run(session: Session, waiting: deque[Conversation], answers: AnswerFile, on_answer: Callable[[], None]) -> None:
    """Keep the engine busy until every conversation has ended."""
    from windfall.engine.as_completed import as_completed

    freeze_objects()
    for conversation, generation in as_completed(session.engine, waiting, partial(_submit, session)):
        about = {"id": conversation.line.id, "line": conversation.line.number, "turn": conversation.turn}
        answers.add({**about, **session.report(generation)})
        conversation.add_answer(generation.text)
        if not conversation.ended:
            waiting.appendleft(conversation)
        on_answer()


def _submit(session: Session, conversation: Conversation) -> Handle:
    with at_line(conversation.line):
        return session.engine.submit(conversation.next_prompt(), raw=conversation.raw, **session.sampling)
