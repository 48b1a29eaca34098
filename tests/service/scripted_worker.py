"""The scripted engine in a process of its own, behind the real engine's wire: started by ProcessEngineClient.

FAKE_STEP_DELAY: seconds a step. A prompt that says "raise" makes its step raise, one that says "hang" never ends its
second step, and one that says "long" makes a step of FAKE_LONG_STEP seconds that shows its progress.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from engine import EngineConfig, EngineInfo, Event, EventSink, FailureKind, GenerationRequest, RequestFailed, StepFrame
from engine.pulse import Pulse
from engine.types import CachePiece
from engine.worker import main
from tests.service.fake_engine import FakeEngineClient, FakeRequest, slow_if_asked


class Spoken(FakeEngineClient):
    """Gives its events to whoever steps it."""

    def _answer(self, sink: EventSink, events: list[Event]) -> None:
        sink(events)


class ScriptedEngine:
    """As engine.serve drives it."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        self.pulse = Pulse()
        self.failed_steps = 0
        self._pace = float(os.environ.get("FAKE_STEP_DELAY", "0.001"))
        self._next = 0.0
        self._events: list[Event] = []
        self._prompts: dict[str, bytes] = {}
        self._reads: list[int] = []
        self._fake = Spoken(
            record=False,
            step_delay=self._pace,
            max_num_seqs=config.max_num_seqs,
            max_context_tokens=config.max_model_len or 256,
            max_queued_requests=config.max_queued_requests,
            instance_id=f"scripted-{os.getpid()}",
        )
        self._fake.plan = slow_if_asked

    @property
    def info(self) -> EngineInfo:
        return self._fake.info

    @property
    def has_work(self) -> bool:
        return self._fake.live_requests > 0

    @property
    def steps(self) -> int:
        return self._fake.stats.step

    def submit(self, request: GenerationRequest) -> None:
        self._prompts[request.request_id] = bytes(token for token in request.prompt_token_ids if token < 256)
        self._fake.submit(request, lambda events: self._events.extend(events))

    def cancel(self, request_id: str) -> bool:
        return self._fake.cancel(request_id)

    def stop_candidate(self, request_id: str, candidate: int) -> None:
        self._fake.stop_candidate(request_id, candidate)

    def read_cache(self, start: int) -> None:
        self._reads.append(start)

    def close(self) -> None:
        pass

    def step(self) -> StepFrame:
        if self.has_work:
            self._work()
        else:
            self.pulse()
            self._prompts.clear()
        events, self._events = self._events, []
        self._fake.stats_overrides = {"heartbeat": time.monotonic(), "progressed": self.pulse.at}
        pieces, self._reads = [CachePiece(start, [], None) for start in self._reads], []
        return StepFrame(events, self._fake.stats, cache_pieces=pieces)

    def _work(self) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._pace
        said = self._said(self._fake.live)
        begun = self._said([live for live in self._fake.live if live.usage.completion_tokens])
        try:
            self._misbehave(said, begun)
        except RuntimeError as error:
            self.failed_steps += 1
            for live in self._fake.live:
                self._fail(live.request.request_id, str(error))
            return
        self._fake.run_step(time.monotonic())
        self.failed_steps = 0
        self.pulse()

    def _said(self, lives: list[FakeRequest]) -> bytes:
        return b"".join(self._prompts.get(live.request.request_id, b"") for live in lives)

    def _misbehave(self, said: bytes, begun: bytes) -> None:
        if b"raise" in said:
            raise RuntimeError("step failed: scripted")
        if b"hang" in begun:
            time.sleep(3600)
        if b"long" in said:
            self._long_step(float(os.environ["FAKE_LONG_STEP"]))

    def _long_step(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.pulse()

    def _fail(self, request_id: str, message: str) -> None:
        self._fake.cancel(request_id)
        self._events.pop()
        self._events.append(RequestFailed(request_id, FailureKind.ENGINE_ERROR, message))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:], create=ScriptedEngine))
