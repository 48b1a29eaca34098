"""What the service is started with, besides the engine's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.security import SecurityConfig
from service.stream import StreamLimits


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """port 0 picks a free one; None for metrics_port and admin_port opens none. Times in seconds, sizes in bytes.

    drain_timeout: how long running requests may go on after SIGTERM. drain_grace: how long at least the listener stays
    open to refuse politely. heartbeat_timeout: an engine silent for longer is not ready. hang_timeout and
    restart_engine: as SupervisedEngine has them. max_message_bytes: the largest request that is accepted, which bounds
    prompts too. model_aliases: names that requests may use beside the served one. otlp_traces_endpoint: where
    OpenTelemetry spans go by OTLP over gRPC; None leaves it to OpenTelemetry's own environment variables.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    drain_timeout: float = 30.0
    drain_grace: float = 0.5
    heartbeat_timeout: float = 2.0
    hang_timeout: float | None = None
    restart_engine: bool = False
    max_message_bytes: int = 4 << 20
    tokenizer_threads: int = 2
    model_aliases: frozenset[str] = frozenset()
    stream: StreamLimits = field(default_factory=StreamLimits)
    admin_port: int | None = None
    otlp_traces_endpoint: str | None = None
    security: SecurityConfig = field(default_factory=SecurityConfig)
