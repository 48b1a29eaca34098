"""The command line and the process: flags, exit codes, signals, what is printed."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import signal
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
import typer
from typer.testing import CliRunner

import service.serve
from engine import AllocatorKind, Device, EngineConfig, EngineState, LoadFormat
from engine.config import PreemptionMode
from octavo.v1 import generation_pb2
from service.__main__ import app, check_address, main
from service.__main__ import serve as octavo_serve
from service.client import Client, chat_request, prompt_request
from service.config import ServiceConfig
from service.serve import flag_of
from service.terminal import Figures
from tests.model.tiny import write_tiny_model
from tests.service.process import ROOT, Process, run_command, server_process
from tests.service.server import free_port, running, until

Parse = Callable[..., tuple[EngineConfig, ServiceConfig, bool]]
Refused = Callable[..., str]
Result = TypeVar("Result")
FAKE = ("-m", "tests.service.fake_server")


async def octavo(*arguments: str, **env: str) -> tuple[int, str, str]:
    return await run_command(sys.executable, "-m", "service", *arguments, env=env)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Process]:
    """For what changes nothing about it."""
    async with server_process(*FAKE) as process:
        yield process


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Runs `serve` with flags and environment up to where it would start; gives what it would start with."""

    def parse(*arguments: str, **env: str) -> tuple[EngineConfig, ServiceConfig, bool]:
        seen: list[tuple[EngineConfig, ServiceConfig, bool]] = []

        def serve(engine: EngineConfig, config: ServiceConfig, *, in_process_engine: bool) -> int:
            seen.append((engine, config, in_process_engine))
            return 0

        monkeypatch.setattr(service.serve, "serve", serve)
        monkeypatch.setattr(service.serve, "run", lambda main: main())
        result = CliRunner().invoke(app, ["serve", *arguments], env=env)
        assert result.exit_code == 0, result.output
        return seen[0]

    return parse


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must be refused; gives the one line that says why."""

    def refuse(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("octavo: ")
        return line

    return refuse


def test_defaults(parsed: Parse) -> None:
    engine, config, in_process = parsed("--model", "demo")
    assert engine == EngineConfig()
    assert not engine.batch_invariant
    assert config == ServiceConfig(metrics_port=9464)
    assert not in_process


def test_flags_reach_the_configuration(parsed: Parse) -> None:
    engine, config, in_process = parsed(
        *(
            "--model",
            "m",
            "--served-model-name",
            "n",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--load-format",
            "dummy",
        ),
        *("--max-model-len", "99", "--max-num-seqs", "3", "--max-num-batched-tokens", "77", "--block-size", "8"),
        *("--kv-cache-tokens", "640", "--gpu-memory-utilization", "0.5", "--swap-space-gib", "1.5"),
        *(
            "--no-enable-prefix-caching",
            "--no-admission-forecast",
            "--preemption-mode",
            "recompute",
            "--allocator",
            "checked",
            "--max-queued-requests",
            "5",
        ),
        *("--max-queued-tokens", "6", "--enforce-eager", "--batch-invariant", "--seed", "4", "--num-threads", "2"),
        *("--host", "::1", "--port", "1234", "--metrics-port", "0", "--drain-timeout", "7", "--drain-grace", "0.25"),
        "--in-process-engine",
    )
    assert engine == EngineConfig(
        model="m",
        served_model_name="n",
        device=Device.CPU,
        dtype="float32",
        load_format=LoadFormat.DUMMY,
        max_model_len=99,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        block_size=8,
        kv_cache_tokens=640,
        gpu_memory_utilization=0.5,
        swap_space_gib=1.5,
        enable_prefix_caching=False,
        admission_forecast=False,
        preemption_mode=PreemptionMode.RECOMPUTE,
        allocator=AllocatorKind.CHECKED,
        max_queued_requests=5,
        max_queued_tokens=6,
        enforce_eager=True,
        batch_invariant=True,
        seed=4,
        num_threads=2,
    )
    assert config == ServiceConfig(host="::1", port=1234, metrics_port=None, drain_timeout=7.0, drain_grace=0.25)
    assert in_process


def test_every_flag_has_an_environment_variable(
    parsed: Parse,
) -> None:
    engine, config, _ = parsed(
        OCTAVO_MODEL="m", OCTAVO_MAX_NUM_SEQS="5", OCTAVO_PORT="77", OCTAVO_ENABLE_PREFIX_CACHING="0"
    )
    assert (engine.model, engine.max_num_seqs, engine.enable_prefix_caching, config.port) == ("m", 5, False, 77)
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if option.param_type_name == "option":
                flag = option.opts[0].removeprefix("--").replace("-", "_").upper()
                assert option.envvar == f"OCTAVO_{flag}"


async def test_what_the_model_flag_said_is_a_name_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServiceConfig] = []

    async def serve_engine(engine: object, tokenizer: object, config: ServiceConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(service.serve, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(service.serve, "serve_engine", serve_engine)
    assert await service.serve.serve(EngineConfig(model="demo", served_model_name="n"), ServiceConfig(port=0)) == 0
    assert seen[0].model_aliases == {"demo"}


def test_every_engine_setting_has_a_flag() -> None:
    parameters = inspect.signature(octavo_serve).parameters
    assert set(EngineConfig.__struct_fields__) <= set(parameters)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("", "--model is empty"),
        ("/nowhere/model", "--model /nowhere/model: no such directory or file, and nothing is downloaded"),
        ("no-such-hub/model", "--model no-such-hub/model: no such directory or file, and nothing is downloaded"),
    ],
)
async def test_unknown_model_is_one_line_and_exit_code_2(
    model: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await service.serve.serve(EngineConfig(model=model), ServiceConfig(port=0)) == 2
    give = "give demo, a model's directory or a .gguf file"
    assert capsys.readouterr() == ("", f"octavo: {problem}{':' if not model else ';'} {give}\n")


@pytest.mark.parametrize("setting", ["port", "metrics_port", "admin_port"])
async def test_taken_port_is_one_line_before_anything_is_loaded(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServiceConfig(**{"port": 0, setting: port})
        assert await service.serve.serve(EngineConfig(model="/nowhere/model"), config) == 2
    problem = f"{flag_of(setting)} {port}: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert capsys.readouterr() == ("", f"octavo: {problem}\n")


async def test_demo_of_a_model_that_cannot_be_served_ends_as_serve_does() -> None:
    code, _, err = await octavo("demo", "--model", "/nope")
    assert code == 2
    (line,) = err.splitlines()
    assert "/nope" in line


async def test_one_port_for_two_things_is_one_line() -> None:
    port = str(free_port())
    code, out, err = await octavo("serve", "--model", "/nowhere/model", "--port", port, "--metrics-port", port)
    assert (code, out, err) == (2, "", f"octavo: --port and --metrics-port are both {port}\n")


async def test_port_taken_meanwhile_is_one_line() -> None:
    """The trial before the load went well, and then somebody else was quicker."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"FAKE_SKIP_PORT_CHECK": "1"}
        code, _, err = await run_command(sys.executable, *FAKE, str(port), env=env)
    assert code == 2
    assert err.splitlines()[-1] == f"octavo: --port {port}: cannot listen on 127.0.0.1:{port}"
    assert all(line.startswith(("octavo: ", "{")) for line in err.splitlines())


async def test_ready_line_says_where_and_what(server: Process) -> None:
    assert "model fake" in server.ready_line
    assert "16384 KV-cache tokens" in server.ready_line
    assert "device fake" in server.ready_line


# --- the end ---------------------------------------------------------------------------------------------------------


async def start_slow(client: Client, max_tokens: int) -> asyncio.Task[int]:
    """A request that runs for a while; the task gives its number of tokens."""
    started = asyncio.Event()

    async def count() -> int:
        tokens = 0
        async for event in client.generate(prompt_request("slow", max_tokens=max_tokens)):
            tokens += event.delta.token_count
            started.set()
        return tokens

    task = asyncio.create_task(count())
    await asyncio.wait_for(started.wait(), 10)
    return task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_and_exits_0(number: signal.Signals) -> None:
    async with server_process(*FAKE) as server, Client(server.address) as client:
        running = await start_slow(client, 20)
        server.process.send_signal(number)
        assert await asyncio.wait_for(running, 15) == 20
        assert await server.end() == 0


async def test_second_signal_does_not_wait_for_an_engine_that_does_not_stop() -> None:
    """An engine's process may be deep in a step, and its stop takes long: it is killed."""
    async with server_process(*FAKE, env={"FAKE_STOP_SECONDS": "600"}) as server, Client(server.address) as client:
        running = await start_slow(client, 10_000)
        server.process.send_signal(signal.SIGTERM)
        await until_logged(server, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert await server.end(seconds=10) == 0
        assert "engine did not stop in time; killing it" in "\n".join(server.log)
        await asyncio.gather(running, return_exceptions=True)


async def test_second_signal_ends_at_once_and_exits_0() -> None:
    async with server_process(*FAKE) as server, Client(server.address) as client:
        running = await start_slow(client, 10_000)
        server.process.send_signal(signal.SIGTERM)
        await until_logged(server, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        result = (await asyncio.gather(running, return_exceptions=True))[0]
        assert getattr(result, "reason", None) == "DRAIN_TIMEOUT"


async def until_logged(server: Process, message: str) -> None:
    async with asyncio.timeout(10):
        while not any(json.loads(line).get("message") == message for line in server.log):
            await asyncio.sleep(0.01)


async def test_logs_are_json_with_request_ids_and_without_text() -> None:
    async with server_process(*FAKE) as server, Client(server.address) as client:
        start = chat_request([("user", "a secret sentence")], max_tokens=8)
        start.request_id = "client-7"
        events = [event async for event in client.generate(start)]
        os.kill(server.process.pid, signal.SIGTERM)
        assert await server.end() == 0
        lines = [json.loads(line) for line in server.log]
        (ended,) = [line for line in lines if line["message"] == "request ended"]
        assert ended["client_request_id"] == "client-7"
        assert ended["request_id"] == events[0].admitted.engine_request_id
        assert (ended["outcome"], ended["completion_tokens"]) == ("finished", 8)
        log = "\n".join(server.log)
        assert "secret" not in log
        assert "abcdefgh" not in log


# --- clients ---------------------------------------------------------------------------------------------------------


async def test_generate_streams_and_prints_figures(server: Process) -> None:
    code, out, _ = await octavo("generate", "hello", "--address", server.address, "--max-tokens", "6")
    assert code == 0
    assert out.startswith("abcdef\n")
    assert "TTFT" in out
    assert "tokens/s" in out
    assert "max_tokens" in out


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_generate_says_on_stderr_that_it_waits_for_an_engine(terminal: bool, flags: tuple[str, ...]) -> None:
    arguments = (sys.executable, "-m", "service", "generate", "x", "--max-tokens", "3", *flags)
    command = shlex.join((*arguments, "--address", "ADDRESS"))
    async with running() as served:
        served.engine.set_state(EngineState.STARTING)
        command = command.replace("ADDRESS", served.server.address)
        env = {"TTY_COMPATIBLE": "1", "TERM": "xterm"} if terminal else {}
        asking = asyncio.create_task(run_command("bash", "-c", command, env=env))
        await until(lambda: served.server.replica.metrics.outcomes("ENGINE_STARTING") >= 2, seconds=60)
        served.engine.set_state(EngineState.READY)
        code, out, err = await asking
    assert code == 0
    assert (json.loads(out)["text"] if flags else out[:3]) == "abc"
    told = "octavo: waiting for the engine: the model is still loading"
    assert told in err
    assert (err == f"{told}\n") is not terminal


async def test_generate_json(server: Process) -> None:
    address = ("--address", server.address)
    code, out, _ = await octavo("generate", "hello", *address, "--max-tokens", "6", "--json", "--chat")
    assert code == 0
    result = json.loads(out)
    assert (result["text"], result["finish_reason"], result["completion_tokens"]) == ("abcdef", "max_tokens", 6)
    assert result["prompt_tokens"] > 5


async def test_capacity_once_as_table_and_as_json(server: Process) -> None:
    code, out, _ = await octavo("capacity", "--address", server.address)
    assert code == 0
    assert "running requests" in out
    code, out, _ = await octavo("capacity", "--address", server.address, "--json")
    assert json.loads(out)["limits"]["kv_total_blocks"] == "1024"


async def test_capacity_watch_follows_until_the_server_drains() -> None:
    async with server_process(*FAKE) as server:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "service", "capacity", "--watch", "--address", server.address)
        watching = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
        assert watching.stdout is not None
        first = (await asyncio.wait_for(watching.stdout.readline(), 15)).decode()
        assert "ready running 0 queued 0" in first
        server.process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(watching.communicate(), 15)
        assert "draining running 0" in out.decode()
        assert watching.returncode == 1
        assert "DRAINING" in err.decode()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve",), "--model"),
        (("serve", "--model", "demo", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("serve", "--model", "demo", "--max-num-seq", "5"), "--max-num-seq"),
        (("serve", "--model", "demo", "--log-level", "loud"), "--log-level"),
        (("served",), "served"),
        (("serve", "--model", "demo", "--heartbeat-timeout", "inf"), "--heartbeat-timeout"),
        (("serve", "--model", "demo", "--drain-timeout", "nan"), "--drain-timeout"),
        (("serve", "--model", "demo", "--seed", str(2**64)), "--seed"),
        (("serve", "--model", "demo", "--seed", "-1"), "--seed"),
        (("serve", "--model", "demo", "--swap-space-gib", "inf"), "--swap-space-gib"),
        (("generate", "x", "--max-tokens", "0"), "--max-tokens"),
        (("generate", "x", "--max-tokens", str(2**31)), "--max-tokens"),
        (("generate", "x", "--sampling-seed", str(2**64)), "--sampling-seed"),
        (("generate", "x", "--tls-ca", "/nowhere/ca.pem"), "/nowhere/ca.pem"),
        (("generate", "x", "--token", "two\nlines"), "--token"),
        (("generate", "x", "--two\nlines"), "--two"),
        (("generate", "x", "--temperature", "nan"), "--temperature"),
        (("generate", "x", "--temperature", "inf"), "--temperature"),
        (("generate", "x", "--temperature", "1e39"), "--temperature"),
        (("generate", "x", "--tls-ca", str(ROOT / "README.md")), "--tls-ca"),
        (("capacity", "--tls-ca", os.devnull), "--tls-ca"),
        (("generate", "\udcff"), "PROMPT is not valid UTF-8"),
        (("generate", "x", "--address", ""), "--address"),
        (("generate", "x", "--address", "foo"), "--address"),
        (("generate", "x", "--address", "http://127.0.0.1:50051"), "--address"),
        (("capacity", "--address", "127.0.0.1:99999"), "--address"),
        (("capacity", "--address", "127.0.0.1:0"), "--address"),
        (("capacity", "--address", "::1:50051"), "--address"),
        (("capacity", "--address", "unix:"), "--address"),
    ],
)
def test_users_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], named: str, refused: Refused) -> None:
    assert named in refused(*arguments)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "a-b.c_d:50051", "[::1]:50051", "unix:/a b"])
def test_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("flag", ["--drain-timeout", "--drain-grace", "--heartbeat-timeout", "--hang-timeout"])
@pytest.mark.parametrize("value", ["604801", "1e300", "inf", "nan"])
def test_no_time_is_longer_than_a_week(flag: str, value: str, refused: Refused) -> None:
    line = refused("serve", "--model", "demo", flag, value)
    assert flag in line
    assert "604800" in line


@pytest.mark.parametrize(
    "arguments", [("generate", "slow", "--max-tokens", "100"), ("generate", "x", "--json"), ("capacity", "--watch")]
)
async def test_a_reader_that_goes_away_is_no_error(server: Process, arguments: tuple[str, ...]) -> None:
    command = shlex.join((sys.executable, "-m", "service", *arguments, "--address", server.address))
    code, _, err = await run_command("bash", "-c", f"{command} | head -c 0")
    assert (code, err) == (0, "")


async def test_without_a_command_it_tells_what_there_are() -> None:
    code, out, err = await octavo()
    assert (code, err) == (0, "")
    assert {"serve", "generate", "capacity", "demo"} <= set(out.split())


async def test_version() -> None:
    code, out, _ = await octavo("--version")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (code, out) == (0, f"octavo {project['version']}\n")


async def test_prompt_after_two_dashes_may_begin_with_one(server: Process) -> None:
    code, out, _ = await octavo("generate", "--max-tokens", "3", "--address", server.address, "--", "-x")
    assert code == 0
    assert out.startswith("abc\n")
    assert "dash" in (await octavo("generate", "--help"))[1]


def test_rate_needs_tokens_at_two_times() -> None:
    figures = Figures()
    figures.on_delta(generation_pb2.CandidateDelta(token_count=9))
    assert figures.tokens_per_second is None
    assert json.loads(figures.as_json(""))["tokens_per_second"] is None
    assert "tokens/s" not in figures.line()
    assert figures.last_token is not None
    figures.on_delta(generation_pb2.CandidateDelta(token_count=4))
    figures.last_token = (figures.first_token or 0.0) + 2.0
    assert figures.tokens_per_second == pytest.approx(2.0)
    assert "2.0 tokens/s" in figures.line()


async def test_client_without_a_server_is_one_line() -> None:
    code, _, err = await octavo("generate", "x", "--address", f"127.0.0.1:{free_port()}")
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    assert "UNAVAILABLE" in err


async def ended_without_a_port(serving: asyncio.Task[Result], port: int) -> Result:
    while not serving.done():
        with pytest.raises(OSError):  # noqa: PT011  # refused, whatever the system calls it
            await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.02)
    return await serving


def problem_in(err: str) -> str:
    """The one line that says what is wrong, behind those that say what is being loaded."""
    (line,) = [line for line in err.splitlines() if "loading" not in line]
    return line


async def test_a_damaged_model_opens_no_port(tmp_path: Path) -> None:
    path, port = write_tiny_model(tmp_path / "model", "llama"), free_port()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    serving = asyncio.create_task(octavo("serve", "--model", str(path), "--port", str(port)))
    code, out, err = await ended_without_a_port(serving, port)
    assert (code, out) == (2, "")
    assert "model.safetensors" in problem_in(err)


async def test_an_unknown_architecture_opens_no_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, port = write_tiny_model(tmp_path / "model", "llama"), free_port()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    capsys.readouterr()
    engine, own = EngineConfig(model=str(path), num_threads=1), ServiceConfig(port=port)
    serving = asyncio.create_task(service.serve.serve(engine, own, in_process_engine=True))
    assert await ended_without_a_port(serving, port) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "FooForCausalLM" in problem_in(err)
