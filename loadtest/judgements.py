"""Judgements on a result: computed from its facts (`loadtest.records`), at any time again."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from loadtest.records import Phase


class Judgement(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row as a `Record` is."""


class LevelClass(StrEnum):
    """CANNOT_TELL: on which side of the knee the level is; its other figures count. VOID: nothing of it counts."""

    KEEPS_UP = "keeps up"
    SATURATED_STABLE = "saturated, stable"
    SATURATED_GROWING = "saturated, growing"
    COLLAPSING = "collapsing"
    HUNG = "hung"
    CRASHED = "crashed"
    RECOVERED = "recovered"
    NOT_RECOVERED = "not recovered"
    CANNOT_TELL = "cannot tell"
    VOID = "void"


class Quantile(Judgement, frozen=True, kw_only=True):
    """`censored`: the true value is this or more."""

    value: float
    censored: bool = False


class Distribution(Judgement, frozen=True, kw_only=True):
    """Seconds. `count`: values in it, `censored` of them lower bounds. Empty ones have no Distribution at all."""

    count: int
    censored: int
    mean: Quantile
    p50: Quantile
    p90: Quantile
    p95: Quantile
    p99: Quantile


class Slope(Judgement, frozen=True, kw_only=True):
    """Change a second, with its 95 % interval (of batches' means, which are nearly independent)."""

    value: float
    low: float
    high: float


class Measures(Judgement, frozen=True, kw_only=True):
    """What a level shows in its window; rates a second. `offered`: arrivals that the schedule had. `goodput`: completed
    requests within the limits. `in_flight`: time average. `little_gap`: |L - lambda W| / L, of the clients;
    `server_little_gap`: inside the service, from its own figures, sampled once a second. `drain`: seconds from the end
    of arrivals until nothing was in flight; None if it was cut off. `recovery`: until a probe's first token came within
    1.2 of the floor. `reasons`: of what did not complete."""

    seconds: float
    arrivals: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    censored: int
    client_cap: int
    offered: float
    completion_rate: float
    goodput: float
    token_rate: float
    in_flight: float
    windows: int = 1
    in_flight_slope: Slope | None = None
    ttft_slope: Slope | None = None
    little_gap: float | None = None
    server_little_gap: float | None = None
    ttft: Distribution | None = None
    service_ttft: Distribution | None = None
    tpot: Distribution | None = None
    itl: Distribution | None = None
    e2e: Distribution | None = None
    refusal: Distribution | None = None
    lateness_p99: float = 0.0
    lag_p99: float = 0.0
    client_cpu: float = 0.0
    preemptions: float = 0.0
    cached_share: float | None = None
    drain: float | None = None
    recovery: float | None = None
    longest_silence: float = 0.0
    reasons: dict[str, int] = {}


class MachineSpeed(Judgement, frozen=True, kw_only=True):
    """How fast the machine was in a group's windows: `value` times its mean over the run's, `error` (one standard
    deviation) how well that is known. `unsteady`: levels of which it is known badly."""

    value: float
    error: float
    unsteady: list[int] = []


class Window(Judgement, frozen=True, kw_only=True):
    """Of one level of an open loop. `arrivals` in it, `completed` in it whenever they arrived. `in_flight`: average."""

    rate: float
    seconds: float
    arrivals: int
    completed: int
    in_flight: float

    @property
    def served(self) -> float:
        """Requests/s."""
        return self.completed / self.seconds

    @property
    def share(self) -> float:
        return self.completed / self.arrivals if self.arrivals else 1.0


class Verdict(Judgement, frozen=True, kw_only=True):
    """Of a group: its levels' rows pooled. `rate`, `concurrency`, `phase`, `multiple`: of its levels (the last one's
    phase). `evidence`: the figures that decided, in words. `void`: levels that do not count, and why; a group with no
    other level is of class VOID. `machine`: None where its speed was not measured; nothing here is corrected for it.
    `windows`: of its levels that count, in an open loop."""

    group: str
    levels: list[int]
    phase: Phase
    level_class: LevelClass
    evidence: str
    measures: Measures
    rate: float | None = None
    concurrency: int | None = None
    multiple: float | None = None
    void: dict[str, str] = {}
    machine: MachineSpeed | None = None
    windows: list[Window] = []


class Interval(Judgement, frozen=True, kw_only=True):
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def width(self) -> float:
        """Relative to its middle."""
        return (self.high - self.low) / self.middle if self.high else 0.0


class MeanKnee(Interval, frozen=True, kw_only=True):
    """95 % interval of the knee of the machine as it was on average. `served`: requests/s that it can serve, `scatter`:
    by how much of it a minute's window differs from the mean (one standard deviation). `windows`: that it is from."""

    served: float
    scatter: float
    windows: int


class Score(Judgement, frozen=True, kw_only=True):
    """A hypothesis after the run; `holds` is None if its measure was not taken."""

    hypothesis: str
    holds: bool | None
    measured: float | None


class UslFit(Judgement, frozen=True, kw_only=True):
    """X(N) = rate N / (1 + contention (N - 1) + coherency N (N - 1)), fitted to the closed-loop points.
    `residual`: the largest relative one. `peak`: the N of the most throughput; None without coherency."""

    rate: float
    contention: float
    coherency: float
    residual: float
    points: int
    peak: float | None = None


class Summary(Judgement, frozen=True, kw_only=True):
    """`knee`: between the highest rate that keeps up and the lowest that does not; None if none was bracketed. `slo`:
    likewise for goodput >= 99 % of offered. `corrected_knee`: as the knee, with every rate over the machine's speed at
    it. `mean_knee`: of all windows near it, None where they do not tell. `complete`: False after Ctrl-C. `measures`:
    what hypotheses speak of; `NAME_error`: how well NAME is known (absolute, one standard deviation), as far as that is
    a matter of the machine's speed."""

    knee: Interval | None
    slo: Interval | None
    complete: bool
    measures: dict[str, float]
    scores: list[Score] = []
    usl: UslFit | None = None
    notes: list[str] = []
    corrected_knee: Interval | None = None
    mean_knee: MeanKnee | None = None


class FaultCell(Judgement, frozen=True, kw_only=True):
    """One fault seen by one class of requests. `outcomes`: counts by outcome or reason. `expected`: what had to hold;
    `broken`: what of it did not, empty if all did. `recovery`: seconds until a probe was served as before."""

    fault: str
    kind: str
    level: int
    outcomes: dict[str, int]
    level_class: LevelClass
    expected: list[str]
    broken: list[str] = []
    recovery: float | None = None
    ttft_p99: float | None = None
    refusal_p99: float | None = None


class Regime(StrEnum):
    KEEP_UP = "keep-up"
    SATURATED = "saturated"
    DRAINING = "draining"


class OverheadRow(Judgement, frozen=True, kw_only=True):
    """The cost of the service around the forward pass at one offered load. Tokens a second; CPU in microseconds, of
    the front end process, of the engine process, of the clients. `per_gb`: tokens/s per GB of PSS of the service's
    process tree. `lag_drift`: seconds of lag gained a second. `counts_match`: every request got the tokens it asked
    for, and the service counted the same. `tokens_per_message`: of the messages that clients got. `tokens_per_step`: of
    the engine's, None where the service does not count them; a message and a step cost the front end much the same with
    one token or with ten, so at low load each token of them costs more."""

    level: int
    offered: float
    consumed: float
    regime: Regime
    lag_drift: float
    frontend_us_per_token: float
    engine_us_per_token: float
    client_us_per_token: float
    server_us_per_request: float
    tokens_per_second_per_core: float
    pss: int
    per_gb: float
    counts_match: bool
    tokens_per_message: float = 0.0
    tokens_per_step: float | None = None
