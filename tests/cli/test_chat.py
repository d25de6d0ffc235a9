"""`windfall chat` with an engine that repeats the last message: commands, pipes, and a real terminal."""

from __future__ import annotations

import os
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers import cli
from helpers.fake_engine import WAIT, FakeEngine
from windfall.cli import app, chat_input, conversations
from windfall.cli.chat import COMMANDS, Chat, completions, split_command
from windfall.cli.conversations import Autosave, Conversation, read, to_json
from windfall.cli.options import SamplingOptions
from windfall.cli.session import Session
from windfall.core.errors import InputError
from windfall.engine.engine import Engine

NAMES = {"drafter": "ngram", "policy": "none"}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDFALL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def new_chat(context: int | None = None, autosave: bool = False, **sampling: object) -> Chat:
    options = SamplingOptions(**sampling)
    keeper = None
    if autosave:
        conversations.prepare()
        keeper = Autosave()
    return Chat(Session(FakeEngine(context), NAMES, options.keywords()), options, autosave=keeper)


def contents(talk: Chat) -> list[str]:
    return [message["content"] for message in talk.conversation.messages]


# ---- typed text


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("help", "")),
        ("/SET  temperature 0.7 ", ("set", "temperature 0.7")),
        ("/system two\nlines", ("system", "two\nlines")),
        ("/nonsense at all", ("nonsense", "at all")),
        ("/usr/bin is a folder", None),
        ("/* a comment */", None),
        (" /help", None),
        ("a /help", None),
        ("/", None),
    ],
)
def test_commands_and_messages_are_distinguished(text: str, command: tuple[str, str] | None) -> None:
    assert split_command(text) == command


def test_commands_and_options_are_completed() -> None:
    assert completions("/s") == ["/set ", "/system ", "/save ", "/stats"]
    assert len(completions("/")) == len(COMMANDS)
    assert completions("/set top") == ["top-k ", "top-p "]
    assert "temperature " in completions("/set ")
    assert completions("") == completions("see /s") == completions("/set top-k 5") == []


def test_lines_of_quotes_make_one_message_of_several_lines() -> None:
    lines = [" one ", '"""', "two", "", '  """three"""', '"""', "four"]
    assert list(chat_input.joined(lines)) == ["one", 'two\n\n  """three"""', "four"]
    with pytest.raises(InputError, match='the message that begins with """ has no line """ at its end'):
        list(chat_input.joined(['"""', "two"]))


# ---- commands


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature hot", "temperature takes a number, not 'hot'"),
        ("temperature -1", "temperature must be 0 .* or more, not -1"),
        ("temperature nan", "temperature must be"),
        ("top-p 7", "top_p must be above 0 and at most 1, not 7"),
        ("colour red", "there is no sampling option 'colour'; there are max-new-tokens, temperature"),
        ("logit-bias x", "write --logit-bias as ID=VALUE"),
        ('stop "open', "no closing quotation"),
        ("ignore-eos maybe", "ignore-eos takes true or false, not 'maybe'"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = new_chat(temperature=0.5)
    before = talk.sampling, talk.session, talk.conversation
    assert talk.take(f"/set {text}")
    assert re.fullmatch(rf"windfall: .*{message}.*\n", capsys.readouterr().err)
    assert (talk.sampling, talk.session, talk.conversation) == before


def test_answers_are_saved_and_clear_starts_a_new_file(data: Path) -> None:
    talk = new_chat(autosave=True)
    talk.take("one")
    first = conversations.last()
    assert [message["content"] for message in read(first).messages] == ["one", "heard 'one'"]
    talk.take("two")
    assert len(read(first).messages) == 4
    talk.take("/clear")
    talk.take("three")
    files = sorted((data / "conversations").iterdir())
    assert len(files) == 2 and len(read(first).messages) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in [*files, data / "history"]} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (data, data / "conversations")} == {0o700}


def test_retry_answers_the_last_message_again(capsys: pytest.CaptureFixture[str]) -> None:
    talk = new_chat(seed=5)
    talk.take("/retry")
    assert capsys.readouterr().err == "windfall: there is no message to answer yet\n"
    talk.take("one")
    talk.take("/retry")
    assert "the same answer, because temperature 0 is deterministic" in capsys.readouterr().err
    talk.take("/set temperature 1")
    talk.take("/retry")
    engine = talk.session.engine
    assert contents(talk) == ["one", "heard 'one'"]
    assert engine.prompts == [[{"role": "user", "content": "one"}]] * 3
    assert engine.seeds == [5, 5, None], "None lets the engine draw a fresh one, which the figures line tells"
    talk.take("two")
    assert engine.seeds[3] == 5


def test_a_message_is_shown_during_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def waiting(message: str) -> Iterator[None]:
        told.append(message)
        yield

    monkeypatch.setattr("windfall.render.console.waiting", waiting)
    talk = new_chat()
    talk.take("short")
    assert told == []
    talk.take("x" * 600)
    assert len(told) == 1 and told[0].startswith("Reading 6")
    assert contents(talk)[-1] == f"heard {'x' * 600!r}"[:256]


def test_the_system_message_can_be_changed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    talk = new_chat()
    talk.take("one")
    talk.take("/system be\nkind :smile:")
    talk.take("two")
    assert talk.session.engine.prompts[1][0] == {"role": "system", "content": "be\nkind :smile:"}
    assert [message["role"] for message in talk.session.engine.prompts[1][1:]] == ["user", "assistant", "user"]
    capsys.readouterr()
    talk.take("/system")
    assert capsys.readouterr().out == "be\nkind :smile:\n"
    talk.take('/system ""')
    talk.take("three")
    assert talk.session.engine.prompts[2][0]["role"] == "user"


def test_save_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk, file = new_chat(autosave=True, temperature=0.5), tmp_path / "with space.json"
    talk.take("/system be kind")
    talk.take("one\n")
    talk.take(f"/save {file}")
    text = file.read_text()
    other = new_chat(autosave=True)
    other.take(f"/load {file}")
    assert other.conversation == talk.conversation
    assert other.session.sampling["temperature"] == 0.5
    assert "(2 messages)\n> one\n\nheard 'one\\n'" in capsys.readouterr().err
    other.take("two")
    assert file.read_text() == text
    assert len(read(conversations.last()).messages) == 4


def test_bad_file_names_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = new_chat()
    talk.take("one")
    capsys.readouterr()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "hot.json").write_text(to_json(Conversation("fake", sampling={"temperature": -1})))
    for command, message in {
        f"/save {tmp_path}/notes.txt": "notes.txt' exists and is not a saved conversation; choose another name",
        f"/save {tmp_path}/none/talk.json": "No such file or directory",
        "/save": "/save takes a file name: /save FILE",
        f"/load {tmp_path}/notes.txt": "notes.txt' is not a saved conversation: it is not JSON",
        f"/load {tmp_path}/hot.json": "hot.json': temperature must be 0",
        f"/load {tmp_path}/none.json": "No such file or directory",
        "/clear now": "/clear takes no argument",
        "/exit now": "/exit takes no argument",
        "/what": f"there is no /what; there are {', '.join(f'/{name}' for name in COMMANDS)}",
    }.items():
        assert talk.take(command)
        assert re.fullmatch(rf"windfall: .*{re.escape(message)}.*\n", capsys.readouterr().err), command
    assert contents(talk) == ["one", "heard 'one'"]
    assert talk.sampling == SamplingOptions()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_note_says_why_an_answer_was_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    talk = new_chat(context=40, max_new_tokens=20)
    talk.take("a" * 22)
    assert "the context is full; /clear starts a new conversation" in capsys.readouterr().err
    talk.take("more")
    told = capsys.readouterr().err
    assert (
        told
        == "windfall: the conversation would have 44 tokens; fake takes 39 at most (/clear starts a new conversation)\n"
    )
    assert len(contents(talk)) == 2
    talk.take("/clear")
    talk.take("/set max-new-tokens 3")
    talk.take("again")
    assert "cut at max-new-tokens 3; /set max-new-tokens N allows more" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    new_chat().take("/help")
    told = capsys.readouterr().out
    assert all(re.search(rf"^/{name}\b.*{re.escape(each.help)}$", told, re.M) for name, each in COMMANDS.items())
    assert '"""' in told and "Alt-Enter" in told


# ---- the command, in a pipe


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine()
    monkeypatch.setattr("windfall.engine.loading.load", lambda *_, **__: made)
    monkeypatch.setattr("windfall.engine.loading.default_drafter", lambda target: "ngram")
    monkeypatch.setattr(chat_input, "editor", lambda *_: pytest.fail("a pipe needs no editor"))
    return made


def piped(text: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, arguments)], input=text, catch_exceptions=False)


def refused(*arguments: object) -> str:
    result = piped("hello\n", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(r"windfall: [^\n]+\n", result.stderr)
    return result.stderr.removeprefix("windfall: ").rstrip()


def test_a_pipe_is_read_line_by_line(engine: FakeEngine) -> None:
    result = piped('one\n\n"""\ntwo\n lines\n"""\n/exit\nnever\n')
    assert result.stdout == "heard 'one'\nheard 'two\\n lines'\n"
    assert "Enter sends" not in result.stderr


def test_the_last_conversation_is_continued(engine: FakeEngine, data: Path) -> None:
    piped("one\n", "--temperature", "0.5", "--top-k", "7", "--system", "be kind", "--target", "some/model")
    result = piped("two\n", "-c", "--top-k", "9")
    assert [message["content"] for message in engine.prompts[1]] == ["be kind", "one", "heard 'one'", "two"]
    assert "(2 messages)\n> one\nheard 'one'\n" in result.stderr
    (file,) = (data / "conversations").iterdir()
    saved = read(file)
    assert len(saved.messages) == 4
    assert (saved.sampling["temperature"], saved.sampling["top_k"], saved.target) == (0.5, 9, "some/model")
    piped("three\n", "--continue", "--system", "be brief", "--temperature", "0")
    assert engine.prompts[2][0]["content"] == "be brief"
    assert read(file).sampling["temperature"] == 0
    piped("four\n", "--load", file, "--no-save")
    assert len(engine.prompts[3]) == 8
    assert len(read(file).messages) == 6


def test_continuing_loads_the_model_of_the_conversation(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []
    monkeypatch.setattr("windfall.engine.loading.load", lambda target, *_, **__: targets.append(target) or engine)
    piped("one\n", "--target", "some/model")
    piped("two\n", "-c")
    piped("three\n", "-c", "--target", "other/model")
    assert targets == ["some/model", "some/model", "other/model"]


def test_no_save_writes_nothing(engine: FakeEngine, data: Path) -> None:
    assert piped("one\n", "--no-save").exit_code == 0
    assert not data.exists()


def test_without_a_data_folder_the_chat_continues(engine: FakeEngine, data: Path) -> None:
    data.write_text("a file")
    result = piped("one\n")
    assert result.stdout == "heard 'one'\n"
    assert "this conversation is not saved: cannot write to" in result.stderr


def test_conversations_that_cannot_be_continued_are_refused(engine: FakeEngine, data: Path, tmp_path: Path) -> None:
    assert refused("-c") == (
        f"there is no conversation to continue in '{data}/conversations'; `windfall chat` starts one"
    )
    assert refused("-c", "--load", "a.json").startswith("--continue takes the last conversation, --load the one in")
    piped("one\n")
    (file,) = (data / "conversations").iterdir()
    whole = file.read_text()
    file.write_text(whole[:100])
    assert refused("-c").startswith(f"'{file}' is not a saved conversation: it is not JSON")
    file.write_text(whole.replace('"top_k": 0', '"top_k": -1'))
    assert refused("--load", file) == f"'{file}': top_k must be 0 (off) or more, not -1"


# ---- the command, with a tiny model


def test_chat_keeps_the_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, p, raw=False: prompts.append(p) or encode(self, p, raw))
    lines = "hello\n\n/stats\nagain\n/clear\nnew\n/what\n/exit\nnever\n"
    result = cli.windfall("chat", "--system", "be kind", "--target", folder, "--max-new-tokens", "8", input=lines)
    assert result.exit_code == 0
    roles = [[message["role"] for message in prompt] for prompt in prompts]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert prompts[1][2]["content"] in result.stdout
    assert prompts[2][1]["content"] == "new"
    assert "answer 1" in result.stdout
    assert (
        "there is no /what; there are /help, /set, /system, /save, /load, /retry, /clear, /stats, /exit"
        in result.stderr
    )


def test_chat_continues_after_control_c_and_a_full_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.interrupted_after(2, monkeypatch)
    lines = f"hello\n{'a' * 300}\nagain\n"
    result = cli.windfall("chat", "--policy", "none", "--target", folder, *cli.SHORT, input=lines)
    assert result.exit_code == 0
    assert result.stderr.count("2 tokens, ") == 2
    assert "takes 255 at most (/clear starts a new conversation)" in result.stderr


def test_chat_colours_drafts_and_refuses_other_encodings(folder: Path) -> None:
    result = cli.windfall("chat", "--show-drafts", "--target", folder, *cli.SHORT, input="hello\n")
    assert "drafted and accepted" in result.stderr
    assert cli.refused("chat", "--target", folder, input=b"\xff\n") == "standard input is not UTF-8 text (byte 0)"


# ---- the command, at a terminal


PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C at this terminal is for us
from helpers.fake_engine import FakeEngine
from windfall.cli import app
from windfall.cli.options import ModelOptions, PolicyOptions
ModelOptions.prepare = staticmethod(lambda: None)  # importing transformers takes seconds
ModelOptions.load = lambda self, policy: FakeEngine()
ModelOptions.drafter_name = lambda self, target: "ngram"
PolicyOptions.make = lambda self: None
PolicyOptions.name = "none"
app()
"""
READY = "\x1b[?2004h"  # the prompt asks the terminal to mark pasted text
PASTE = "\x1b[200~{}\x1b[201~"
UP, CONTROL_C, CONTROL_D = "\x1b[A", "\x03", "\x04"
PATIENCE = 120.0  # seconds; only a broken chat takes as long


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        pty = pytest.importorskip("pty")
        self.master, slave = pty.openpty()
        source = [str(Path(conversations.__file__).parents[2]), str(Path(__file__).parents[1])]
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": ":".join(source)}
        command = [sys.executable, "-c", PROGRAM, *arguments]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        os.close(slave)
        self.seen = ""

    def expect(self, *texts: str) -> None:
        """Wait until these texts have come, one after the other."""
        deadline = time.monotonic() + PATIENCE
        for text in texts:
            while text not in self.seen:
                ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
                assert ready, f"no {text!r} in {self.seen!r}"
                self.seen += os.read(self.master, 65536).decode()
            self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_terminal_with_pasted_code_history_and_control_c(data: Path) -> None:
    code = "def f(x):\n\treturn x\n\n\n    # end\n"
    terminal = Terminal("chat", "--policy", "none")
    try:
        terminal.expect("fake · drafter ngram · policy none", "/help lists the commands", READY)
        terminal.type(PASTE.format(code.replace("\n", "\r")) + "\r")
        terminal.expect(f"heard {code!r}", READY)
        terminal.type("one\x1b\rtwo\r")
        terminal.expect("heard 'one\\ntwo'", READY)
        terminal.type(f"{UP}\r")
        terminal.expect("heard 'one\\ntwo'", READY)
        terminal.type('"""\rthree\r\r' + PASTE.format("four\r") + '"""\r')
        terminal.expect("heard 'three\\n\\nfour'", READY)
        terminal.type(PASTE.format('"""\rA module.\r"""') + "\r")
        terminal.expect('heard \'"""\\nA module.\\n"""\'', READY)
        terminal.type(f"gone{CONTROL_C}here\r")
        terminal.expect("heard 'here'", READY)
        terminal.type(f"{WAIT}\r")
        terminal.expect("working")
        terminal.type(CONTROL_C)
        terminal.expect("interrupted", READY)
        terminal.type("/sta\t\r")
        terminal.expect("answer 7", READY)
        terminal.type(CONTROL_D)
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()
    saved = [message["content"] for message in read(conversations.last()).messages]
    assert saved[0] == code
    assert saved[-2:] == [WAIT, "working"]
    assert "def f(x)" in (data / "history").read_text()
