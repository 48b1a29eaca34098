"""Stand-in for engine.text.output until it exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import TokenLogprob


@dataclass
class ByteDelta:
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    stopped: str | None = None


class ByteOutputText:
    def __init__(self, tokenizer: Any, stop_strings: Sequence[str], include_stop: bool, skip_special_tokens: bool):
        self.stops, self.include = list(stop_strings), include_stop
        self.ids: list[int] = []
        self.lps: list[TokenLogprob] = []
        self.hold = max((len(s.encode()) for s in self.stops), default=1) - 1

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ByteDelta:
        self.ids += token_ids
        self.lps += logprobs
        data = bytes(i for i in self.ids if i < 256)
        for stop in self.stops:
            at = data.find(stop.encode())
            if at >= 0:
                end = at + (len(stop.encode()) if self.include else 0)
                return self._give(end, stop)
        end = max(0, len(self.ids) - self.hold)
        while end and end < len(self.ids) + 1:
            try:
                bytes(self.ids[:end]).decode()
                break
            except (UnicodeDecodeError, ValueError):
                end -= 1
        return self._give(end)

    def finish(self) -> ByteDelta:
        return self._give(len(self.ids))

    def _give(self, end: int, stopped: str | None = None) -> ByteDelta:
        ids, self.ids = self.ids[:end], self.ids[end:]
        lps, self.lps = self.lps[:end], self.lps[end:]
        return ByteDelta(ids, bytes(i for i in ids if i < 256).decode(errors="replace"), lps, stopped)
