"""The command line: `serve`, `generate`, `capacity`, `demo`. Every flag has an environment variable, OCTAVO_<FLAG>."""

from __future__ import annotations

import asyncio
import math
import os
import re
import ssl
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from engine import AllocatorKind, Device, EngineConfig, LoadFormat
from engine.config import MOST_SEED, PreemptionMode
from octavo.v1 import generation_pb2
from service.client import Client, GenerationError, chat_request, prompt_request
from service.config import ServiceConfig
from service.convert.fields import MAX_TIMEOUT_SECONDS
from service.logs import LogLevel, configure_logs
from service.security import SecurityConfig
from service.version import version

ENGINE = EngineConfig()  # the defaults of the flags
SERVICE = ServiceConfig()
MOST_TOKENS = 2**31 - 1
MOST_PORT = 65535
MOST_FLOAT = (2 - 2**-23) * 2.0**127  # what a message's field holds

app = typer.Typer(
    rich_markup_mode=None,
    help="Octavo: serves large language models over gRPC.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"octavo {version()}")
        raise typer.Exit


@app.callback()
def octavo(
    context: typer.Context,
    show: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Octavo: serves large language models over gRPC."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def flag(name: str, text: str, **options: Any) -> Any:
    """An option and the environment variable of the same name."""
    variable = "OCTAVO_" + name.split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, help=text, envvar=variable, **options)


def check_finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def duration(name: str, text: str, *, least: float = 0.0) -> Any:
    """A flag in seconds, of a week at most: what is not over by then was meant to be off."""
    return flag(name, text, min=least, max=MAX_TIMEOUT_SECONDS)


@app.command()
def serve(
    model: Annotated[str, flag("--model", "demo, a Hugging Face model directory, or a .gguf file.")],
    served_model_name: Annotated[
        str, flag("--served-model-name", "Name that requests use; default: the model's own.")
    ] = ENGINE.served_model_name,
    host: Annotated[str, flag("--host", "Address to listen on.")] = SERVICE.host,
    port: Annotated[int, flag("--port", "gRPC port; 0 picks a free one.", min=0, max=MOST_PORT)] = SERVICE.port,
    metrics_port: Annotated[int, flag("--metrics-port", "Prometheus port; 0: none.", min=0, max=MOST_PORT)] = 9464,
    device: Annotated[Device, flag("--device", "Where to run.")] = ENGINE.device,
    dtype: Annotated[str, flag("--dtype", "auto, float32, bfloat16 or float16.")] = ENGINE.dtype,
    load_format: Annotated[LoadFormat, flag("--load-format", "How to read the weights.")] = ENGINE.load_format,
    max_model_len: Annotated[
        int | None, flag("--max-model-len", "Context limit in tokens; default: the model's.", min=2)
    ] = ENGINE.max_model_len,
    max_num_seqs: Annotated[int, flag("--max-num-seqs", "Sequences in one step.", min=1)] = ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        flag("--max-num-batched-tokens", "Token budget of one step; default: 256 on a CPU, 2048 on a GPU.", min=1),
    ] = ENGINE.max_num_batched_tokens,
    block_size: Annotated[
        int, flag("--block-size", "Tokens in a KV block, a power of two; 16 on a GPU.", min=1, max=256)
    ] = ENGINE.block_size,
    kv_cache_tokens: Annotated[
        int | None, flag("--kv-cache-tokens", "KV pool in tokens; default: what fits.", min=2)
    ] = ENGINE.kv_cache_tokens,
    gpu_memory_utilization: Annotated[
        float, flag("--gpu-memory-utilization", "Share of GPU memory to claim.", min=0.01, max=1.0)
    ] = ENGINE.gpu_memory_utilization,
    swap_space_gib: Annotated[
        float,
        flag(
            "--swap-space-gib",
            "Host memory for KV blocks of preempted requests, in GiB.",
            min=0.0,
            callback=check_finite,
        ),
    ] = ENGINE.swap_space_gib,
    preemption_mode: Annotated[
        PreemptionMode,
        flag("--preemption-mode", "What becomes of a preempted request's KV blocks; swap needs --swap-space-gib."),
    ] = ENGINE.preemption_mode,
    admission_forecast: Annotated[
        bool, flag("--admission-forecast/--no-admission-forecast", "Admit requests by the output lengths to expect.")
    ] = ENGINE.admission_forecast,
    enable_prefix_caching: Annotated[
        bool, flag("--enable-prefix-caching/--no-enable-prefix-caching", "Share KV blocks of equal beginnings.")
    ] = ENGINE.enable_prefix_caching,
    allocator: Annotated[
        AllocatorKind, flag("--allocator", "Block allocator; oracle and checked are for finding faults.")
    ] = ENGINE.allocator,
    max_queued_requests: Annotated[
        int,
        flag(
            "--max-queued-requests", "Most requests that wait for others; those that slots are free for do not.", min=1
        ),
    ] = ENGINE.max_queued_requests,
    max_queued_tokens: Annotated[
        int,
        flag(
            "--max-queued-tokens", "Most prompt tokens that wait; an empty queue takes one prompt of any length.", min=1
        ),
    ] = ENGINE.max_queued_tokens,
    enforce_eager: Annotated[bool, flag("--enforce-eager", "No CUDA graphs.")] = ENGINE.enforce_eager,
    batch_invariant: Annotated[
        bool, flag("--batch-invariant", "The same bits for a request in any company and under preemption; slower.")
    ] = ENGINE.batch_invariant,
    seed: Annotated[
        int, flag("--seed", "For random weights of --load-format dummy.", min=0, max=MOST_SEED)
    ] = ENGINE.seed,
    num_threads: Annotated[
        int | None, flag("--num-threads", "CPU threads of the engine; default: one a core.", min=1)
    ] = ENGINE.num_threads,
    drain_timeout: Annotated[
        float, duration("--drain-timeout", "Seconds that running requests get after SIGTERM.")
    ] = SERVICE.drain_timeout,
    drain_grace: Annotated[
        float,
        duration("--drain-grace", "Seconds at least that new requests are told to go elsewhere after SIGTERM."),
    ] = SERVICE.drain_grace,
    heartbeat_timeout: Annotated[
        float, duration("--heartbeat-timeout", "Seconds of engine silence until health says NOT_SERVING.", least=0.1)
    ] = SERVICE.heartbeat_timeout,
    hang_timeout: Annotated[
        float | None,
        duration("--hang-timeout", "Seconds without progress until the engine is killed; 2.5, on a CPU 10.", least=0.1),
    ] = SERVICE.hang_timeout,
    restart_engine: Annotated[
        bool, flag("--restart-engine", "Replace an engine that died; without it the service stays NOT_SERVING.")
    ] = SERVICE.restart_engine,
    admin_port: Annotated[
        int, flag("--admin-port", "Loopback port for drain by RPC and channelz; 0: none.", min=0, max=MOST_PORT)
    ] = 0,
    otlp_traces_endpoint: Annotated[
        str | None,
        flag("--otlp-traces-endpoint", "OpenTelemetry collector for traces, OTLP over gRPC: http://HOST:4317."),
    ] = SERVICE.otlp_traces_endpoint,
    tls_cert: Annotated[Path | None, flag("--tls-cert", "Server certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, flag("--tls-key", "Its key, PEM.")] = None,
    tls_client_ca: Annotated[
        Path | None, flag("--tls-client-ca", "Clients need a certificate signed by this one, PEM.")
    ] = None,
    auth_tokens: Annotated[
        Path | None, flag("--auth-tokens", "File of bearer tokens; read again when it changes.")
    ] = None,
    insecure: Annotated[bool, flag("--insecure", "Listen beyond loopback without TLS and tokens.")] = False,
    in_process_engine: Annotated[
        bool, flag("--in-process-engine", "Engine on a thread of this process, for debugging.")
    ] = False,
    log_level: Annotated[
        LogLevel, flag("--log-level", "Least level of log lines.", case_sensitive=False)
    ] = LogLevel.INFO,
) -> None:
    """Serve a model until SIGTERM, which drains; a second SIGTERM stops at once.

    An engine that dies fails its streams with ENGINE_DIED and is one error line in the log. Without --restart-engine
    the process stays and refuses requests; health is NOT_SERVING for every name, so that an orchestrator restarts it.
    """
    from service.serve import run
    from service.serve import serve as serve_until_signalled

    configure_logs(log_level)
    engine_config = EngineConfig(
        model=model,
        served_model_name=served_model_name,
        device=device,
        dtype=dtype,
        load_format=load_format,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_cache_tokens=kv_cache_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space_gib=swap_space_gib,
        preemption_mode=preemption_mode,
        admission_forecast=admission_forecast,
        enable_prefix_caching=enable_prefix_caching,
        allocator=allocator,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        seed=seed,
        num_threads=num_threads,
    )
    service_config = ServiceConfig(
        host=host,
        port=port,
        metrics_port=metrics_port or None,
        drain_timeout=drain_timeout,
        drain_grace=drain_grace,
        heartbeat_timeout=heartbeat_timeout,
        hang_timeout=hang_timeout,
        restart_engine=restart_engine,
        admin_port=admin_port or None,
        otlp_traces_endpoint=otlp_traces_endpoint,
        security=SecurityConfig(tls_cert, tls_key, tls_client_ca, auth_tokens, insecure),
    )
    raise typer.Exit(
        run(lambda: serve_until_signalled(engine_config, service_config, in_process_engine=in_process_engine))
    )


def check_address(address: str) -> str:
    """gRPC itself would take a port modulo 2**16, and anything else for a name to look up."""
    match = re.fullmatch(r"unix:.+|(?:\[[\da-fA-F:.]+(?:%\w+)?\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
    if match is None or (match[1] and not 1 <= int(match[1]) <= MOST_PORT):
        raise typer.BadParameter(f"{address!r} is not HOST:PORT, with a port from 1 to {MOST_PORT}")
    return address


Address = Annotated[str, flag("--address", "HOST:PORT of a running service.", callback=check_address)]
DEFAULT_ADDRESS = f"{SERVICE.host}:{SERVICE.port}"


def check_certificate(path: Path | None) -> Path | None:
    """gRPC itself would only say, as it connects, that it cannot."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise typer.BadParameter(f"{path} holds no certificate in PEM") from None
    return path


TlsCa = Annotated[
    Path | None,
    flag(
        "--tls-ca",
        "Certificate that signed the server's, PEM: connects with TLS.",
        exists=True,
        dir_okay=False,
        callback=check_certificate,
    ),
]


def check_token(token: str | None) -> str | None:
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise typer.BadParameter("a token has printable ASCII characters only, and no space")
    return token


Token = Annotated[str | None, flag("--token", "Bearer token.", callback=check_token)]


def _client(address: str, tls_ca: Path | None, token: str | None, **options: Any) -> Client:
    credentials = None if tls_ca is None else grpc.ssl_channel_credentials(tls_ca.read_bytes())
    return Client(address, credentials=credentials, token=token, **options)


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue, or what to say with --chat. After -- it may begin with a dash.")
    ],
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    token: Token = None,
    max_tokens: Annotated[int, flag("--max-tokens", "Most output tokens.", min=1, max=MOST_TOKENS)] = 256,
    temperature: Annotated[float, flag("--temperature", "0 is greedy.", min=0.0, max=MOST_FLOAT)] = 0.0,
    seed: Annotated[int | None, flag("--sampling-seed", "Makes sampling reproducible.", min=0, max=MOST_SEED)] = None,
    chat: Annotated[bool, flag("--chat", "Send the prompt as a user's chat message.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object at the end.")] = False,
) -> None:
    """Stream one generation to the terminal through the bidirectional RPC."""
    from service.terminal import WaitNotice, show_generation

    check_text("PROMPT", prompt)
    sampling = generation_pb2.SamplingParameters(temperature=temperature, seed=seed)
    if chat:
        start = chat_request([("user", prompt)], max_tokens=max_tokens, sampling=sampling)
    else:
        start = prompt_request(prompt, max_tokens=max_tokens, sampling=sampling)

    async def main() -> None:
        notice = WaitNotice()
        async with _client(address, tls_ca, token, on_wait=notice.tell) as client:
            try:
                await show_generation(client.generate(start), Console(), as_json=as_json, on_event=notice.end)
            finally:
                notice.end()

    _run_client(main())


@app.command()
def capacity(
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    token: Token = None,
    watch: Annotated[bool, flag("--watch", "Follow it.")] = False,
    as_json: Annotated[bool, flag("--json", "Print JSON, one object a line.")] = False,
) -> None:
    """Print what a running service can take, once or as it changes."""
    from service.terminal import capacity_json, capacity_line, capacity_table

    console = Console()

    async def main() -> None:
        async with _client(address, tls_ca, token) as client:
            if not watch:
                snapshot = await client.capacity()
                console.print(capacity_json(snapshot) if as_json else capacity_table(snapshot), soft_wrap=True)
                return
            async for snapshot in client.watch_capacity():
                line = capacity_json(snapshot) if as_json else capacity_line(snapshot)
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    _run_client(main())


@app.command()
def demo(
    model: Annotated[str, flag("--model", "The model to show.")] = "demo",
    question: Annotated[str, flag("--question", "What to ask; default: a simple one.")] = "",
    max_tokens: Annotated[int, flag("--max-tokens", "Most output tokens.", min=1, max=MOST_TOKENS)] = 96,
) -> None:
    """Start the service with the embedded model, ask it one question, show its figures, stop it."""
    from service.demo import QUESTION, run_demo

    raise typer.Exit(asyncio.run(run_demo(model, question or QUESTION, max_tokens, Console())))


def _run_client(work: Awaitable[None]) -> None:
    from grpc import aio

    async def main() -> None:
        try:
            await work
        except aio.AioRpcError as error:
            raise GenerationError.from_rpc(error) from error

    try:
        asyncio.run(main())
    except GenerationError as error:
        print(f"octavo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def check_text(name: str, text: str) -> None:
    """Bytes that are no UTF-8 come from the command line as lone surrogates, which no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{name} is not valid UTF-8") from None


def main() -> None:
    """A command line that is wrong is one line on standard error, like all else that a start is refused for."""
    try:
        sys.exit(app(prog_name="octavo", standalone_mode=False))
    except typer.TyperException as error:
        print("octavo:", *error.format_message().split(), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Who read has enough. The interpreter's own flush at exit must not complain, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
