"""Text of a token stream, piece by piece, exactly as one decode of all tokens would give it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from engine.text.decoding import DecoderKind, DecoderRules, fallback_byte
from engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """push(...) + ... + flush() == tokenizer.decode(all ids). Nothing that a later token could change is handed out, so
    no piece ends inside a character.

    A byte-fallback decoder turns a whole run of byte tokens into U+FFFD if any of it is no UTF-8; the text of such a
    run is therefore known when the run ends. continues: the ids continue a text, whose start alone loses its leading
    space in SentencePiece models.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _stream_decoder(tokenizer, continues)

    @property
    def pending(self) -> bool:
        """Whether some of the tokens pushed have text that is not out yet."""
        return self._decoder.pending

    @property
    def started(self) -> bool:
        """Whether the next token's text no longer depends on the text's start."""
        return self._decoder.started

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self.push_one(token_id) for token_id in ids])

    def push_one(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def flush(self) -> str:
        """The rest, after the last token: an unfinished character becomes U+FFFD."""
        return self._decoder.flush()


class _StreamDecoder(Protocol):
    @property
    def pending(self) -> bool: ...

    @property
    def started(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def _stream_decoder(tokenizer: Tokenizer, continues: bool) -> _StreamDecoder:
    match tokenizer.rules.kind:
        case DecoderKind.BYTE_LEVEL:
            return _ByteLevelStream(tokenizer)
        case DecoderKind.BYTE_FALLBACK:
            return _ByteFallbackStream(tokenizer, continues)
        case DecoderKind.METASPACE:
            return _MetaspaceStream(tokenizer, continues)


class _ByteLevelStream:
    started = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _ByteFallbackStream:
    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._token = tokenizer.token
        self._rules = tokenizer.rules
        self._run = bytearray()
        self._to_strip = 0 if continues else self._rules.strip

    @property
    def pending(self) -> bool:
        return bool(self._run)

    @property
    def started(self) -> bool:
        return not self._to_strip

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        byte = fallback_byte(token)
        if byte is None:
            return self._end_run() + self._finish(token)
        self._run.append(byte)
        return ""

    def flush(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return self._finish(text)

    def _finish(self, text: str) -> str:
        for old, new in self._rules.late:
            text = text.replace(old, new)
        while self._to_strip and text:
            if text[0] != self._rules.strip_char:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _MetaspaceStream:
    pending = False

    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._token = tokenizer.token
        self._rules: DecoderRules = tokenizer.rules
        self._drop = "" if continues else self._rules.drop_first

    @property
    def started(self) -> bool:
        return not self._drop

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        if self._drop:
            token, self._drop = token.replace(self._drop, ""), ""
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        return token

    def flush(self) -> str:
        return ""
