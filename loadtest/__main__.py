"""`python -m loadtest`: map, faults, overhead, grade, report, compare."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import typer
from rich.console import Console

from loadtest.arrivals import ScheduleError, replay, stretched
from loadtest.fleet import FleetError
from loadtest.judgements import Summary
from loadtest.launch import LaunchError, Service
from loadtest.mapping import MapOptions, judge, run_map
from loadtest.matrix import NoSuchFaultError, run_faults
from loadtest.mix import MIXES, MixError
from loadtest.notes import notes_of
from loadtest.orders import Transport
from loadtest.overhead import run_overhead
from loadtest.progress import RunProgress
from loadtest.records import ArrivalProcess, Limits, RunKind
from loadtest.result import Result, ResultError, holds_result
from loadtest.search import Settings
from loadtest.session import SessionOptions
from loadtest.target import TargetError

ERRORS = (TargetError, LaunchError, FleetError, MixError, NoSuchFaultError, ResultError, ScheduleError)

TINY_SERVE = "--max-num-seqs 128"
MOST_SECONDS = 7 * 24 * 3600.0  # what the service takes as a request's timeout
MOST_SEED = 2**32 - 1
MOST_PID = 2**31 - 1

Value = TypeVar("Value")


class Process(StrEnum):
    """Those of a steady rate."""

    POISSON = ArrivalProcess.POISSON
    GAMMA = ArrivalProcess.GAMMA
    CONSTANT = ArrivalProcess.CONSTANT
    BURST = ArrivalProcess.BURST
    REPLAY = ArrivalProcess.REPLAY


app = typer.Typer(
    rich_markup_mode=None,
    help="Load tests of a running service, through its public proto.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


def duration(name: str, text: str, least: float, most: float = MOST_SECONDS) -> Any:
    return typer.Option(name, help=text, min=least, max=most)


def seed_of(text: str) -> Any:
    return typer.Option("--seed", help=text, min=0, max=MOST_SEED)


def checked_new(out: Path | None) -> Path | None:
    """The same of a result's folder, of which none is overwritten."""
    if out is not None and holds_result(out):
        raise typer.BadParameter(f"{out} already holds a result")
    return checked_out(out)


def checked_out(out: Path | None) -> Path | None:
    """Whether a folder can be made there, without making it."""
    try:
        wanted = out or Path("build")
        parent = next(path for path in (wanted, *wanted.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=parent):
            return out
    except OSError as error:
        raise typer.BadParameter(f"{error.strerror}: {wanted}") from None


def checked_address(address: str) -> str:
    """What `octavo --address` takes, too."""
    parts = re.fullmatch(r"unix:.+|(?:\[[\da-fA-F:.]+(?:%\w+)?\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
    if address and not (parts and (parts[1] is None or 1 <= int(parts[1]) <= 65535)):
        raise typer.BadParameter(f"{address!r} is not HOST:PORT, with a port of 1 to 65535, or unix:PATH")
    return address


def checked_url(url: str | None) -> str | None:
    try:
        parts = urlsplit(url or "http://localhost")
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of brackets
        known = False
    if not known:
        raise typer.BadParameter(f"{url!r} is not http://HOST:PORT/PATH")
    return url


def checked_pid(pid: int | None) -> int | None:
    if pid is not None and not psutil.pid_exists(pid):
        raise typer.BadParameter(f"no process {pid} on this machine")
    return pid


def checked_words(text: str | None) -> str | None:
    try:
        shlex.split(text or "")
    except ValueError as error:
        raise typer.BadParameter(f"{error}: {text}") from None
    return text


Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the result; default build/load/KIND-TIME.", callback=checked_new),
]
Address = Annotated[
    str,
    typer.Option(
        "--address", help="HOST:PORT or unix:PATH of a service that runs; default: start one.", callback=checked_address
    ),
]
MetricsUrl = Annotated[
    str | None,
    typer.Option("--metrics-url", help="Its Prometheus page, with --address.", callback=checked_url),
]
Pid = Annotated[
    int | None,
    typer.Option(
        "--pid", help="Its process id on this machine, with --address.", min=1, max=MOST_PID, callback=checked_pid
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="What to serve when a service is started; default: demo.")]
Serve = Annotated[
    str | None,
    typer.Option("--serve", help='More flags of `serve`, as in --serve "--max-num-seqs 16".', callback=checked_words),
]
Seed = Annotated[int, seed_of("Of schedules and prompts.")]
Clients = Annotated[int, typer.Option("--clients", help="Client processes.", min=1, max=64)]


@app.callback()
def loadtest(context: typer.Context) -> None:
    """Load tests of a running service, through its public proto."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("map")
def map_service(
    out: Out = None,
    address: Address = "",
    metrics_url: MetricsUrl = None,
    pid: Pid = None,
    model: Model = None,
    serve: Serve = None,
    mix: Annotated[str, typer.Option("--mix", help=f"Workload: {', '.join(MIXES)}.")] = "chat",
    seed: Seed = 1,
    clients: Clients = 1,
    channels: Annotated[int, typer.Option("--channels", help="Connections of each client.", min=1, max=64)] = 4,
    transport: Annotated[
        Transport, typer.Option("--transport", help="An RPC a request, or multiplexed.")
    ] = Transport.STREAM,
    ttft: Annotated[float, duration("--ttft", "Limit of a good request, seconds.", 0.001)] = 2.0,
    tpot: Annotated[float, duration("--tpot", "Limit of a good request, seconds.", 0.0001)] = 0.1,
    process: Annotated[Process, typer.Option("--process", help="Of arrivals; replay: of --trace.")] = Process.POISSON,
    cv: Annotated[
        float, typer.Option("--cv", help="Coefficient of variation of gamma's gaps.", min=0.05, max=100)
    ] = 2.0,
    size: Annotated[
        int, typer.Option("--burst-size", help="Requests that come at once, with burst.", min=1, max=10_000)
    ] = 8,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="To replay, stretched to each rate: a schedule or a JSONL trace.")
    ] = None,
    window: Annotated[float, duration("--window", "Measured seconds of a level, at least.", 1.0)] = 30.0,
    warm_up: Annotated[float, duration("--warm-up", "Seconds before them, at least.", 0.0)] = 6.0,
    minutes: Annotated[float, duration("--minutes", "Budget; refinement stops for it.", 0.1, MOST_SECONDS / 60)] = 14.5,
) -> None:
    """Finds the knee, goes beyond it, and comes back. Ctrl-C keeps what was measured."""
    only_with_address(address, metrics_url, pid)
    only_without_address(address, serve, model)
    settings = Settings(
        calibrate=min(6.0, window / 3),
        warm_up=warm_up,
        window=window,
        beyond=min(20.0, window),
        process=ArrivalProcess(process),
        cv=cv,
        size=size,
        budget=minutes * 60,
    )
    options = MapOptions(
        out=folder(out, RunKind.MAP),
        address=address,
        metrics_url=metrics_url,
        pid=pid,
        serve_arguments=serve_arguments(model, serve),
        mix=mix,
        seed=seed,
        clients=clients,
        channels=channels,
        transport=transport,
        limits=Limits(ttft=ttft, tpot=tpot),
        settings=settings,
        command=command(),
    )

    result = guarded(lambda: shown(lambda progress: run_map(with_trace(options, trace), progress)))
    show(result, result.summary)


@app.command()
def faults(
    names: Annotated[list[str] | None, typer.Argument(help="Faults; default: all.")] = None,
    out: Out = None,
    model: Model = None,
    serve: Serve = None,
    mix: Annotated[str, typer.Option("--mix", help=f"Workload: {', '.join(MIXES)}.")] = "mixed",
    seed: Seed = 1,
    clients: Clients = 1,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests/s beside the faults; default: 0.4 of what it takes.", min=0.01, max=1e5),
    ] = None,
    ttft: Annotated[float, duration("--ttft", "Of a probe that counts as served, seconds.", 0.001)] = 2.0,
    seconds: Annotated[float, duration("--seconds", "Measured seconds of a fault.", 2.0)] = 10.0,
) -> None:
    """Does things to a service under load, each to a fresh one, and says what every class of requests saw of it."""
    options = SessionOptions(
        out=folder(out, RunKind.FAULTS),
        limits=Limits(ttft=ttft, tpot=0.1),
        serve_arguments=serve_arguments(model, serve),
        mix=mix,
        seed=seed,
        clients=clients,
        command=command(),
    )

    result = guarded(lambda: shown(lambda progress: run_faults(options, seconds, names or [], rate, progress)))
    broken = sum(bool(cell.broken) for cell in result.faults)
    console.print(f"{len(result.faults)} cells, {broken} broken", highlight=False)
    show_scores(result, result.summary)
    if broken:
        raise typer.Exit(1)


@app.command()
def overhead(
    out: Out = None,
    address: Address = "",
    metrics_url: MetricsUrl = None,
    pid: Pid = None,
    serve: Serve = None,
    seed: Seed = 1,
    clients: Clients = 1,
    transport: Annotated[
        Transport, typer.Option("--transport", help="An RPC a request, or multiplexed.")
    ] = Transport.MULTIPLEXED,
    streams: Annotated[
        int, typer.Option("--streams", help="Streams of each client, multiplexed.", min=1, max=1024)
    ] = 8,
    seconds: Annotated[float, duration("--seconds", "Measured seconds of a level.", 1.0)] = 10.0,
    warm_up: Annotated[float, duration("--warm-up", "Seconds before them.", 0.0)] = 2.0,
) -> None:
    """What the service costs around the forward pass, with a tiny model of fixed weights. A service that is started has
    --max-num-seqs 128 unless --serve says otherwise."""
    only_with_address(address, metrics_url, pid)
    only_without_address(address, serve)
    options = SessionOptions(
        out=folder(out, RunKind.OVERHEAD),
        limits=Limits(ttft=2.0, tpot=0.1),
        address=address,
        metrics_url=metrics_url,
        pid=pid,
        serve_arguments=["--log-level", "warning", *shlex.split(TINY_SERVE if serve is None else serve)],
        mix="short",
        seed=seed,
        clients=clients,
        transport=transport,
        streams=streams,
        command=command(),
    )

    result = guarded(lambda: shown(lambda progress: run_overhead(options, seconds, warm_up, progress)))
    show_scores(result, result.summary)


@app.command()
def ui(
    address: Address = "",
    model: Model = None,
    serve: Serve = None,
    port: Annotated[int, typer.Option("--web-port", help="Of the web page.", min=1, max=65535)] = 8089,
    locust: Annotated[
        str,
        typer.Option("--locust", help='More options of locust, as --locust "--mix mixed".', callback=checked_words),
    ] = "",
) -> None:
    """Locust's web page in front of a service; Ctrl-C ends both."""
    only_without_address(address, serve, model)
    guarded(lambda: run_locust(address, serve_arguments(model, serve), port, shlex.split(locust)))


async def run_locust(address: str, arguments: Sequence[str], port: int, options: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        if not address:
            address = (await stack.enter_async_context(Service(arguments))).address
        console.print(f"octavo at {address}; Locust's page: http://localhost:{port}", highlight=False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))),
            *("--host", address, "--web-host", "127.0.0.1", "--web-port", str(port), *options),
        )
        try:
            await process.wait()  # Ctrl-C in a terminal reaches it, too
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


@app.command()
def grade(folder: Annotated[Path, typer.Argument(help="A result.")]) -> None:
    """Judges a result again from its raw rows."""

    async def main() -> Result:
        result = Result.open(folder)
        judge(result)
        return result

    result = guarded(main)
    show(result, result.summary)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A result.")]) -> None:
    """Charts (plots/*.png with *.csv) and one page (report.html), written into the result's folder."""
    from loadtest.report import write_report

    try:
        page = write_report(folder, say=lambda title: console.print(f"  {title}", highlight=False))
    except ResultError as error:
        typer.echo(f"loadtest: {error}", err=True)
        raise typer.Exit(2) from None
    console.print(f"page: {page}", highlight=False)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A result.")],
    second: Annotated[Path, typer.Argument(help="The result that is judged against it.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the page; default build/load/compare-TIME.", callback=checked_out),
    ] = None,
    seed: Annotated[int, seed_of("Of the intervals' draws.")] = 1,
) -> None:
    """Is the second result faster, slower, the same? Paired by level, with intervals; a table and a page."""
    from loadtest.compare import CompareError
    from loadtest.comparing import levels_line, machine_line, sentence, table, write_comparison

    try:
        where = out or Path("build") / "load" / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
        comparison, page = write_comparison(first, second, where, seed)
    except (ResultError, CompareError) as error:
        typer.echo(f"loadtest: {error}", err=True)
        raise typer.Exit(2) from None
    console.print(table(comparison))
    console.print(levels_line(comparison), highlight=False)
    console.print(machine_line(comparison), highlight=False)
    for caution in comparison.cautions:
        console.print(f"  note: {caution}", highlight=False)
    console.print(sentence(comparison), style="bold", highlight=False)
    console.print(f"page: {page}", highlight=False)


def show(result: Result, summary: Summary) -> None:
    if summary.knee is not None:
        knee = summary.knee
        console.print(f"knee: {knee.low:.4g} to {knee.high:.4g} requests/s ({knee.width:.1%} wide)", highlight=False)
    else:
        console.print("knee: not bracketed", highlight=False)
    if (mean := summary.mean_knee) is not None:
        windows = f"windows of a minute differ by {mean.scatter:.1%}"
        console.print(f"on average: {mean.low:.4g} to {mean.high:.4g} requests/s (95 %; {windows})", highlight=False)
    if summary.slo is not None:
        console.print(
            f"within limits up to: {summary.slo.low:.4g} to {summary.slo.high:.4g} requests/s", highlight=False
        )
    show_scores(result, summary)


def show_scores(result: Result, summary: Summary) -> None:
    """Hypotheses, notes, and where it all lies."""
    texts = {hypothesis.id: hypothesis for hypothesis in result.run.hypotheses}
    for score in summary.scores:
        mark = {True: "[green]holds[/green]", False: "[red]broken[/red]", None: "[yellow]not measured[/yellow]"}
        found = texts[score.hypothesis]
        error = summary.measures.get(f"{found.measure}_error")
        known = "" if error is None else f" +- {error:.2g}"
        figure = "" if score.measured is None else f" ({score.measured:.4g}{known}, {found.relation} {found.bound:g})"
        console.print(f"  {mark[score.holds]}: {found.text}{figure}", highlight=False)
    for note in notes_of(result.run, summary):
        console.print(f"  note: {note}", highlight=False)
    console.print(f"result: {result.folder}", highlight=False)


def with_trace(options: MapOptions, path: Path | None) -> MapOptions:
    """Raises ResultError, ScheduleError."""
    if (options.settings.process is ArrivalProcess.REPLAY) != (path is not None):
        raise ScheduleError("--process replay and --trace go together")
    if path is None:
        return options
    trace = replay(path)
    stretched(trace, len(trace), 1.0)  # whether it can be
    return replace(options, settings=replace(options.settings, trace=trace))


def folder(out: Path | None, kind: RunKind) -> Path:
    return out or Path("build") / "load" / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


def only_with_address(address: str, metrics_url: str | None, pid: int | None) -> None:
    """Raises typer.BadParameter: a service that is started is known without them."""
    for flag, value in (("--metrics-url", metrics_url), ("--pid", pid)):
        if value is not None and not address:
            raise typer.BadParameter("goes with --address", param_hint=flag)


def only_without_address(address: str, serve: str | None, model: str | None = None) -> None:
    """Raises typer.BadParameter: a service that runs has its model and its flags."""
    for flag, value in (("--model", model), ("--serve", serve)):
        if value is not None and address:
            raise typer.BadParameter("is of a service that is started: not with --address", param_hint=flag)


def serve_arguments(model: str | None, more: str | None) -> list[str]:
    return ["--model", model or "demo", "--log-level", "warning", *shlex.split(more or "")]


def command() -> list[str]:
    """As a person typed it."""
    return ["python", "-m", "loadtest", *sys.argv[1:]]


async def shown(work: Callable[[RunProgress], Awaitable[Value]]) -> Value:
    """Work with its progress on the terminal."""
    async with RunProgress(console) as progress:
        return await work(progress)


def guarded(main: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    """Runs a coroutine function. What a person can put right is one line and exit code 2."""
    try:
        result = asyncio.run(main())
    except ERRORS as error:
        typer.echo(f"loadtest: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    return result


def main() -> None:
    """A command line that is wrong is one line on standard error, too."""
    try:
        sys.exit(app(prog_name="python -m loadtest", standalone_mode=False))
    except typer.TyperException as error:
        print("loadtest:", *error.format_message().split(), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
