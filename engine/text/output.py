"""What a client sees of a candidate: text, token ids and log probabilities that are held back together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer
from engine.types import TokenLogprob


class Delta(msgspec.Struct, frozen=True, gc=False):
    """Tokens that are ready, and exactly their text. `logprobs` has one entry a token, or none.

    stopped: the stop string that ended the candidate. Then the text may go further than the tokens: it has all that
    came before the stop string, while tokens that hold any of it are cut. (Kept in the output, it is the other way
    round: the text ends with the stop string, the tokens with the one that completed it.)
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    stopped: str | None = None


@dataclass(slots=True)
class _Held:
    """A token whose text ends at character `end` of the candidate's text; None until its last character is complete."""

    token_id: int
    logprob: TokenLogprob | None
    end: int | None


class OutputText:
    """Turns one candidate's tokens into deltas.

    After every delta, all the text so far is the decode of all the token ids so far and ends on a whole character, and
    nothing of a stop string has been handed out. Tokens are counted by id, whether or not they have text; a stop string
    that is completed before the `min_tokens`-th token does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """prompt_token_ids: what the candidate continues. A SentencePiece decoder drops the space at a text's start,
        and a continuation is no start."""
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        continues = any(token_id not in skipped for token_id in prompt_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues=continues
        )
        self._matcher = StopMatcher(stop_strings)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held: deque[_Held] = deque()
        self._text = ""  # not handed out yet
        self._offset = 0  # characters handed out
        self._tokens = 0
        self._stopped: str | None = None
        self._completed_at: int | None = None
        self._whole_texts = tokenizer.whole_texts
        self._started = self._detokenizer.started

    @property
    def token_count(self) -> int:
        """Tokens pushed so far, those cut by a stop string included."""
        return self._tokens

    @property
    def used_tokens(self) -> int:
        """Tokens pushed up to the one that completed the stop string; all, where there is none."""
        return self._tokens if self._completed_at is None else self._completed_at

    @property
    def stopped(self) -> str | None:
        return self._stopped

    def push_whole(self, token_ids: Sequence[int]) -> str | None:
        """Takes a step's only token if its text is certain at once, which is by far the most frequent case, and gives
        that text. None: nothing was taken; it is for `push`."""
        if not self._started or len(token_ids) != 1 or self._held or self._stopped is not None:
            return None
        text = self._whole_texts[token_ids[0]]
        if text is None or not self._matcher.passes(text):
            return None
        self._tokens += 1
        self._offset += len(text)
        return text

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Delta:
        """Takes the tokens of a step and gives what has become certain. After a stop, tokens are only counted."""
        if logprobs and len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log probabilities for {len(token_ids)} tokens")
        whole = self.push_whole(token_ids)
        if whole is not None:
            return Delta(token_ids, whole, logprobs)
        for index, token_id in enumerate(token_ids):
            self._tokens += 1
            if self._stopped is not None:
                continue
            self._held.append(_Held(token_id, logprobs[index] if logprobs else None, None))
            stop = self._extend(self._detokenizer.push_one(token_id), self._detokenizer.pending)
            if stop is not None:
                self._tokens += len(token_ids) - index - 1
                return self._cut(*stop)
        if self._stopped is not None:
            return Delta()
        self._started = self._detokenizer.started
        return self._release(self._offset + len(self._text) - self._matcher.held)

    def finish(self) -> Delta:
        """The rest, after the candidate's last token; a stop string can still be found in it."""
        if self._stopped is not None:
            return Delta()
        stop = self._extend(self._detokenizer.flush(), False)
        if stop is not None:
            return self._cut(*stop)
        return self._release(self._offset + len(self._text))

    def _extend(self, text: str, pending: bool) -> tuple[str, int] | None:
        """Adds text; returns the stop string that it completes and where in the candidate's text it ends."""
        before = self._offset + len(self._text)
        self._text += text
        self._settle(before, len(text), pending)
        read = 0
        while (match := self._matcher.feed(text[read:])) is not None:
            read += match.end
            if self._tokens >= self._min_tokens:
                self._completed_at = self._tokens
                return match.stop, before + read
        return None

    def _settle(self, before: int, added: int, pending: bool) -> None:
        """Gives the newest tokens their end. While bytes wait for the rest of a character, theirs is not known."""
        if pending:
            return
        for held in reversed(self._held):
            if held.end is not None:
                break
            held.end = before + added

    def _release(self, end: int) -> Delta:
        """Hands out the tokens whose text lies before `end`, with that text."""
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        reached = self._offset
        while self._held and (stop := self._held[0].end) is not None and stop <= end:
            held = self._held.popleft()
            ids.append(held.token_id)
            if held.logprob is not None:
                logprobs.append(held.logprob)
            reached = stop
        return Delta(ids, self._take(reached), logprobs)

    def _cut(self, stop: str, end: int) -> Delta:
        """The last delta of a candidate that met `stop`, which ends at character `end`."""
        self._stopped = stop
        if self._include_stop:
            ids = [held.token_id for held in self._held]
            logprobs = [held.logprob for held in self._held if held.logprob is not None]
            delta = Delta(ids, self._take(end), logprobs, stop)
        else:
            whole = self._release(end - len(stop))
            delta = Delta(whole.token_ids, whole.text + self._take(end - len(stop)), whole.logprobs, stop)
        self._held.clear()
        self._text = ""
        return delta

    def _take(self, end: int) -> str:
        count = end - self._offset
        text, self._text = self._text[:count], self._text[count:]
        self._offset = end
        return text
