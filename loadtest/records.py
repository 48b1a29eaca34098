"""The rows of a result: facts, which are written while it runs and never changed. What is computed from them is in
`loadtest.judgements`.

Times are seconds on one clock, CLOCK_MONOTONIC of the machine, counted from the run's start, in every process.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

SCHEMA = 2


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row: immutable, by keyword; values that are their default are not written."""


# --- what ran, and where ---------------------------------------------------------------------------------------------


class Gpu(Record, frozen=True, kw_only=True):
    """Memory in bytes, clocks in MHz, power in watts."""

    name: str
    driver: str
    memory: int
    max_sm_clock: int
    max_memory_clock: int
    power_limit: float


class Fingerprint(Record, frozen=True, kw_only=True):
    """The machine and the software. `memory_bandwidth`: bytes/s of a measured copy (read + write) on all cores;
    `load_average`: of the minute before the run, which says whether the machine was idle."""

    cpu: str
    cores: int
    memory: int
    memory_bandwidth: float
    kernel: str
    python: str
    versions: dict[str, str]
    commit: str
    load_average: float
    gpus: list[Gpu] = []


class ReferenceWork(Record, frozen=True, kw_only=True):
    """The piece of work that `ReferenceTime`s are of. Times of two runs are comparable where all of it is equal.
    `bytes`: of weights."""

    name: str
    bytes: int
    numpy: str


class ReferenceTime(Record, frozen=True, kw_only=True):
    """How much of a core's time that work took, once."""

    at: float
    seconds: float


class Target(Record, frozen=True, kw_only=True):
    """The service under test, as its own Capacity message describes it. `command`: how it was started, if by us."""

    address: str
    instance_id: str = ""
    model: str = ""
    device: str = ""
    max_context_tokens: int = 0
    max_running_requests: int = 0
    max_queued_requests: int = 0
    kv_tokens: int = 0
    command: list[str] = []


class Limits(Record, frozen=True, kw_only=True):
    """Bounds that a good request keeps, all at once; seconds. TPOT is judged where there are two tokens or more."""

    ttft: float
    tpot: float


class Hypothesis(Record, frozen=True, kw_only=True):
    """A statement written down before the run. It holds if `measure <relation> bound`; `measure` is a key of
    `Summary.measures`, `relation` one of <=, >=, ==."""

    id: str
    text: str
    measure: str
    relation: str
    bound: float


class RunKind(StrEnum):
    MAP = "map"
    FAULTS = "faults"
    OVERHEAD = "overhead"


class Run(Record, frozen=True, kw_only=True):
    """`created`: ISO 8601, UTC. `started`: CLOCK_MONOTONIC at second 0. `parameters`: everything a run depends on
    that has no field of its own. `reference`: None where the machine's speed was not measured. `schema`: of the
    folder; absent in the first one's."""

    schema: int = 1
    kind: RunKind
    created: str
    started: float
    command: list[str]
    seed: int
    mix: str
    limits: Limits
    target: Target
    fingerprint: Fingerprint
    hypotheses: list[Hypothesis] = []
    parameters: dict[str, Any] = {}
    reference: ReferenceWork | None = None


# --- the load --------------------------------------------------------------------------------------------------------


class ArrivalProcess(StrEnum):
    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    BURST = "burst"
    RAMP = "ramp"
    STEP = "step"
    SPIKE = "spike"
    SOAK = "soak"
    REPLAY = "replay"
    CLOSED = "closed"


class Arrival(Record, frozen=True, kw_only=True, array_like=True):
    """One line of a schedule. `at`: seconds from the level's start. `kind`: a class of the mix. `seed`: of its
    prompt. A length of -1 leaves it to the mix."""

    at: float
    kind: str
    seed: int
    prompt_tokens: int = -1
    output_tokens: int = -1


class Outcome(StrEnum):
    """COMPLETED: all of it came. REFUSED: RESOURCE_EXHAUSTED before the first token. FAILED: any other end that
    nobody here asked for. CANCELLED: we cancelled it on purpose. CENSORED: it still ran when the level was cut
    off. CLIENT_CAP: never sent, since the client was full: a failure of the measurement."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CENSORED = "censored"
    CLIENT_CAP = "client_cap"


class RequestRow(Record, frozen=True, kw_only=True, gc=False):
    """One request as its client saw it.

    `level`: Level.index. `index`: its line of the level's schedule. `intended`: when the schedule wanted it sent (in a
    closed loop: when it was sent). `accepted`: when `admitted` came. `first`: when the first message with a token
    came. `finish`: when it ended; of a censored one, when the client stopped looking (so a lower bound). None: never.
    `chunk_us`, `chunk_tokens`: when each message with tokens of it came, in microseconds after `sent`, and how many it
    had; of the same length, and `chunk_tokens` is empty where all are 1.
    `code`: name of the gRPC status, "" where there was none. `reason`: ErrorInfo's. `cause`: what happened, in words.
    `completion_tokens`, `cached_prompt_tokens`, `preemptions`, `queued`: what the service said of it at its end.
    A run has a hundred thousand of them: the garbage collector, which they give nothing to find, leaves them alone.
    """

    level: int
    index: int
    kind: str
    outcome: Outcome
    intended: float
    sent: float | None = None
    accepted: float | None = None
    first: float | None = None
    finish: float | None = None
    chunk_us: list[int] = []
    chunk_tokens: list[int] = []
    prompt_tokens: int = 0
    asked_tokens: int = 0
    completion_tokens: int | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    queued: float | None = None
    code: str = ""
    reason: str = ""
    cause: str = ""
    client: int = 0

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(self.chunk_tokens) if self.chunk_tokens else len(self.chunk_us)

    @property
    def ttft(self) -> float | None:
        """From the intended time, so that waiting in the client counts."""
        return None if self.first is None else self.first - self.intended

    @property
    def service_ttft(self) -> float | None:
        """From the actual send."""
        return None if self.first is None or self.sent is None else self.first - self.sent

    @property
    def e2e(self) -> float | None:
        """From the intended time. Of a censored request: a lower bound."""
        return None if self.finish is None else self.finish - self.intended

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens after the first one, of a completed request of two or more."""
        if self.outcome is not Outcome.COMPLETED or self.tokens < 2:
            return None
        return (self.chunk_us[-1] - self.chunk_us[0]) / 1e6 / (self.tokens - 1)

    @property
    def lateness(self) -> float | None:
        """Actual minus intended send."""
        return None if self.sent is None else self.sent - self.intended

    def gaps(self) -> list[float]:
        """Times between tokens, in seconds: a message of k tokens is one gap and k - 1 zeros."""
        counts = self.chunk_tokens or [1] * len(self.chunk_us)
        gaps: list[float] = []
        for position, (stamp, count) in enumerate(zip(self.chunk_us, counts, strict=True)):
            if position:
                gaps.append((stamp - self.chunk_us[position - 1]) / 1e6)
            gaps += [0.0] * (count - 1)
        return gaps


class ClientReport(Record, frozen=True, kw_only=True):
    """One client process over a level. `cpu`: share of one core in the window. `lag`: percentiles (p50, p99, max) in
    seconds of how late its event loop woke up, which bounds what it adds to any stamp. `tokens_per_second`: received.
    `receive_lag_p99`: from the server's stamp to ours, where the server stamps its messages. `nice`: the process's
    priority. `first`: it was scheduled before every process of ordinary priority.
    """

    client: int
    cpu: float
    lag_p50: float
    lag_p99: float
    lag_max: float
    tokens_per_second: float = 0.0
    receive_lag_p99: float | None = None
    nice: int = 0
    first: bool = False


class Phase(StrEnum):
    CALIBRATE = "calibrate"
    LADDER = "ladder"
    BISECT = "bisect"
    REFINE = "refine"
    BEYOND = "beyond"
    RECOVERY = "recovery"
    FAULT = "fault"
    OVERHEAD = "overhead"


class Level(Record, frozen=True, kw_only=True):
    """One steady offered load, or one fault.

    `group`: the grouping rule. Rows of levels with the same group are pooled, and every verdict, interval and plot is
    of a group; it is made by `group_of`. `rate`: requests/s offered (open loop). `concurrency`: requests in flight
    (closed loop). `repeat`: 0, 1, ... in its group. `multiple`: rate over the knee, in phase BEYOND.
    `start` <= `window_start` <= `window_end` (arrivals stop) <= `end` (nothing in flight, or cut off). A closed loop
    has neither warm-up nor drain in its window. `schedule`: its file. `interrupted`: Ctrl-C cut it short.
    `recovery`: as in `Measures`, where probes were sent. `reference`: times all along, where
    they say something of the service.
    """

    index: int
    phase: Phase
    group: str
    process: ArrivalProcess
    start: float
    window_start: float
    window_end: float
    end: float
    rate: float | None = None
    concurrency: int | None = None
    repeat: int = 0
    multiple: float | None = None
    seed: int = 0
    schedule: str = ""
    fault: str = ""
    interrupted: bool = False
    recovery: float | None = None
    clients: list[ClientReport] = []
    reference: list[ReferenceTime] = []
    parameters: dict[str, Any] = {}


def group_of(phase: Phase, rate: float | None, concurrency: int | None, label: str = "") -> str:
    """The one grouping rule: open-loop levels by offered rate to four digits, whatever phase asked for them, except
    recovery and faults, which have their own; closed-loop ones by concurrency."""
    if phase in (Phase.RECOVERY, Phase.FAULT, Phase.OVERHEAD):
        return f"{phase}:{label}" if label else str(phase)
    return f"closed:{concurrency}" if rate is None else f"rate:{rate:.4g}"


class GpuSample(Record, frozen=True, kw_only=True):
    """Degrees C, watts, MHz, percent; `throttle`: NVML's reasons for clocks below their most, as a bit mask."""

    temperature: float
    power: float
    sm_clock: float
    memory_clock: float
    utilization: float
    throttle: int = 0


class TelemetryRow(Record, frozen=True, kw_only=True):
    """One second. `metrics`: the service's own, by Prometheus name without `octavo_`, with labels as `name{label}`;
    counters as they stand; empty where the scrape failed. `server_cpu`: of the service's process tree, `engine_cpu`: of
    its children alone, both as shares of one core since the row before. `server_pss`: bytes of the tree. `healthy`:
    readiness, None if unasked.
    """

    at: float
    level: int
    metrics: dict[str, float] = {}
    server_cpu: float | None = None
    engine_cpu: float | None = None
    server_pss: int | None = None
    machine_cpu: float | None = None
    healthy: bool | None = None
    gpus: list[GpuSample] = []
