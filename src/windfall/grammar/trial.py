"""Compiles constraints of clients on trial, in another process that is ended if this takes too long.

The libraries cannot be interrupted. A constraint that has passed its trial is compiled again in this process, which
takes about as long as the trial did.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import BinaryIO

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError
from windfall.grammar.compile import Compiler
from windfall.grammar.limits import subschemas
from windfall.grammar.vocabulary import Vocabulary

# Keywords of schemas that compile fast: they repeat nothing, and match no patterns.
SIMPLE_KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs",
    "definitions", "title", "description", "default", "examples", "$schema", "$id",
}  # fmt: skip
SIMPLE_CHARACTERS = 4096  # of such a schema
MAX_GIB = 1  # memory that a trial may need
NICENESS = 10  # the process yields to the engine, if both want the same CPU core


def needs_trial(constraint: Constraint) -> bool:
    """Whether it may take long to compile. Short JSON schemas with simple keywords do not."""
    if constraint.kind not in ("json_schema", "tagged_json") or len(constraint.source) > SIMPLE_CHARACTERS:
        return True
    schema = json.loads(constraint.source)
    schema = schema["schema"] if constraint.kind == "tagged_json" else schema
    return any(each.keys() - SIMPLE_KEYWORDS for each in subschemas(schema))


class Trial:
    """A process for one trial after another. It is started when it is first needed, and again after it was ended."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, constraint: Constraint, seconds: float) -> None:
        """Raise an InputError if the constraint cannot be compiled within this time. To be called by one thread."""
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            problem = _ask(process, constraint)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.close()
            reason = (
                f"takes more than {seconds:g} seconds" if late.is_set() else f"needs more than {MAX_GIB} GiB of memory"
            )
            raise InputError(f"the {constraint.name} cannot be used: to compile it {reason}, the limit here") from None
        finally:
            timer.cancel()
        if problem is not None:
            raise InputError(problem)

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, when it is ready; starting it does not count as part of a trial."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            paths = os.pathsep.join(path for path in sys.path if path)
            environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
            pipe = subprocess.PIPE  # and a session of its own: Ctrl-C is meant for the server
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
            weakref.finalize(self, _end, self._process)
            try:
                _ask(self._process, self._vocabulary)
            except (OSError, EOFError, pickle.UnpicklingError):
                self.close()
                raise RuntimeError("the process that compiles grammars does not start") from None
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
        self._process = None


def _ask(process: subprocess.Popen[bytes], question: object) -> str | None:
    """What the process answers: an error of one line, or None."""
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(question, process.stdin)
    process.stdin.flush()
    answer: str | None = pickle.load(process.stdout)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


# ---- in the process


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the other process closes the pipe, or ends."""

    def answer(text: str | None) -> None:
        pickle.dump(text, answers)
        answers.flush()

    compiler = Compiler(pickle.load(questions))
    compiler.prepare()
    _limit_memory()
    answer(None)
    while True:
        try:
            constraint = pickle.load(questions)
        except EOFError:
            return
        try:
            compiler.compile(constraint).matcher().mask()
            answer(None)
        except InputError as error:
            answer(str(error))


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + MAX_GIB * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
