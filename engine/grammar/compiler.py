"""Compiles the grammars of requests beside the step loop: on one thread, which drops the interpreter's lock in the long
parts, after a trial in a process whose memory and time are bounded."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.errors import EngineError
from engine.grammar import checker
from engine.grammar.constraint import GrammarConstraint
from engine.grammar.problem import NO_TEXT, problem
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar, GrammarKind

TRIAL_SECONDS = 10.0  # by the clock; its processor time is less
_START_SECONDS = 60.0
_CLOSE_SECONDS = 2.0
MAX_TEXT_BYTES = 1 << 18
_CACHED = 256  # texts of at most some MB

_Job = tuple[Grammar, "Future[GrammarConstraint]"]


class _Known(NamedTuple):
    """What became of a grammar: the source of its matchers, or why there is none."""

    source: str = ""
    problem: str = ""


class GrammarError(EngineError):
    """A grammar that does not compile, or not within the limits; the message is one line."""


class GrammarLimitError(GrammarError):
    """Too much time or memory. Not remembered: on a busy machine the clock may have been to blame."""


class GrammarCompiler:
    """Starts nothing before `warm`, or the first grammar. Results, refusals too, are remembered."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Collection[int]) -> None:
        """load_tokenizer: called once, on the compiler's thread; if it fails, every grammar is refused."""
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = eos_token_ids
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._trial = Trial()
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def submit(self, grammar: Grammar) -> Future[GrammarConstraint]:
        """A constraint of the caller's own, or GrammarError."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octavo-grammar", daemon=True)
            self._thread.start()
        future: Future[GrammarConstraint] = Future()
        self._jobs.put((grammar, future))
        return future

    def warm(self) -> Future[GrammarConstraint]:
        """Does what every first grammar waits for: starts the process and reads the tokenizer."""
        return self.submit(Grammar(GrammarKind.JSON_OBJECT, ""))

    def close(self) -> None:
        """Lets thread and process end once what was submitted is done, and waits a while for that: an interpreter that
        ends takes a thread badly that is still at work. Nothing may be submitted any more."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while self._take(self._jobs.get()):
            pass
        self._trial.close()

    def _take(self, job: _Job | None) -> bool:
        """False at the end. (A method of its own: the waiting thread keeps nothing of the last job alive.)"""
        if job is None:
            return False
        grammar, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._constraint(grammar))
            except Exception as error:
                known = isinstance(error, GrammarError)
                future.set_exception(error if known else GrammarError(f"{type(error).__name__}: {error}"))
        return True

    def _constraint(self, grammar: Grammar) -> GrammarConstraint:
        return self._follower(self._source(grammar.kind.value, grammar.text))

    def _source(self, kind: str, text: str) -> str:
        """What llguidance takes for the grammar. Raises GrammarError."""
        key = (kind, text)
        found = self._known.pop(key, None)
        if found is None:
            try:
                found = _Known(self._compile(kind, text))
            except GrammarLimitError:
                raise
            except GrammarError as error:
                found = _Known(problem=str(error))
        self._known[key] = found
        if len(self._known) > _CACHED:
            self._known.popitem(last=False)
        if found.problem:
            raise GrammarError(found.problem)
        return found.source

    def _compile(self, kind: str, text: str) -> str:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise GrammarError(f"the grammar is longer than {MAX_TEXT_BYTES} bytes")
        source = self._trial.run(kind, text)
        constraint = self._follower(source)
        if not constraint.mask([]).any():
            raise GrammarError(constraint.error or NO_TEXT)
        return source

    def _follower(self, source: str) -> GrammarConstraint:
        """With a lexer of its own, so that one request's output takes nothing from another's limits. Takes 1 ms, 20 for
        a large grammar."""
        tokens = self._tokens()
        matcher = LLMatcher(tokens, source, log_level=0, limits=checker.parser_limits(source))
        return GrammarConstraint(matcher, tokens.vocab_size)

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                tokenizer = self._load_tokenizer()
            except EngineError as error:
                raise GrammarError(f"this model has no tokenizer: {error}") from None
            ends = sorted(token for token in self._eos_token_ids if token < tokenizer.size)
            if not ends:
                raise GrammarError("this model has no end-of-sequence token")
            vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
            self._tokenizer = LLTokenizer(vocabulary, n_vocab=tokenizer.size, eos_token=ends)
        return self._tokenizer


class _Vocabulary:
    """A tokenizer as the library wants it. The bytes of every token are our own rules', which its text comes by; text
    that a grammar forces stays text, also where it spells a special token."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text)


class Trial:
    """The checker process. It lives on between trials, and is replaced after one that went beyond a limit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, kind: str, text: str) -> str:
        """What llguidance takes for the grammar. Raises GrammarError."""
        question = json.dumps([kind, text]).encode() + b"\n"
        line = None
        for _ in range(2):  # a process that ended while it was idle is no fault of this grammar
            try:
                line = self._ask(question)
                break
            except BrokenPipeError:
                self.close()
        if line is None:
            self.close()
            raise GrammarLimitError(
                f"the grammar needs more than {checker.CPU_SECONDS} s or {checker.MEMORY_BYTES >> 20} MiB to compile"
            )
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise GrammarError(problem(kind, text, answer["error"], answer.get("place", "")))
        return answer["grammar"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the script's folder is no place to import from. A session of its own: Ctrl-C is not for it; it ends with
        # its standard input.
        command = [sys.executable, "-P", str(Path(checker.__file__))]
        process = self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if _read_line(process, _START_SECONDS) is None:
            self.close()
            raise GrammarLimitError("the process that tries grammars did not start")
        return process

    def _ask(self, question: bytes) -> bytes | None:
        """None beyond a limit. Raises BrokenPipeError if the process has ended before it could read the question."""
        process = self._process or self._start()
        assert process.stdin is not None
        rest = memoryview(question)
        while rest:
            rest = rest[process.stdin.write(rest) :]
        return _read_line(process, TRIAL_SECONDS)


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """None if the process ended or said nothing for so long."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not piece:
            return None
        line += piece
    return line
