"""The real engine in its own process behind the real server, the command line as users type it: the embedded model, and
where engines die a tiny one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import psutil  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from engine import load_tokenizer
from octavo.v1 import capacity_pb2
from octavo.v1 import generation_pb2 as pb
from service.client import Client, GenerationError, chat_request, prompt_request
from tests.model.tiny import write_tiny_model
from tests.service.process import BIN, ROOT, Process, run_command, server_process
from tests.text.corpus import CORPUS, PROMPTS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

GREEDY = pb.SamplingParameters(temperature=0.0)
SMALL = ("--max-model-len", "512", "--kv-cache-tokens", "2048", "--max-num-seqs", "8", "--num-threads", "2")
START_SECONDS = 90.0


def serving(model: str) -> tuple[str, ...]:
    return ("-m", "service", "serve", "--model", model, "--port", "0", "--metrics-port", "0", "--device", "cpu")


SERVE = serving("demo")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Process]:
    async with server_process(*SERVE, *SMALL, seconds=START_SECONDS) as process:
        yield process


async def answer(client: Client, start: pb.StartGeneration) -> str:
    return "".join([event.delta.text async for event in client.generate(start)])


async def until_idle(client: Client) -> capacity_pb2.Capacity:
    """Waits until no request is live and no block is held."""
    async with asyncio.timeout(20):
        while True:
            capacity = await client.capacity()
            load = capacity.load
            if not load.running_requests and not load.queued_requests and load.kv_utilization == 0.0:
                return capacity
            await asyncio.sleep(0.05)


async def test_answers_a_chat_sensibly(server: Process) -> None:
    async with Client(server.address) as client:
        start = chat_request([("user", "What is the capital of France?")], max_tokens=24, sampling=GREEDY)
        assert "Paris" in await answer(client, start)


async def test_many_at_once_equal_alone(server: Process) -> None:
    prompts = [f"The number {i} comes before" for i in range(6)]
    async with Client(server.address) as client:
        starts = [prompt_request(prompt, max_tokens=16, sampling=GREEDY) for prompt in prompts]
        alone = [await answer(client, start) for start in starts]
        together = await asyncio.gather(*(answer(client, start) for start in starts))
        assert together == alone
        await until_idle(client)


async def test_seeded_sampling_is_reproducible(server: Process) -> None:
    sampling = pb.SamplingParameters(temperature=1.0, seed=11, n=2)
    async with Client(server.address) as client:
        runs = []
        for _ in range(2):
            texts = ["", ""]
            async for event in client.generate(prompt_request("Once", max_tokens=12, sampling=sampling)):
                texts[event.delta.candidate_index] += event.delta.text
            runs.append(texts)
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]


async def test_stop_sequence_and_token_count(server: Process) -> None:
    async with Client(server.address) as client:
        start = prompt_request("1, 2, 3, 4, 5, 6,", max_tokens=40, sampling=GREEDY)
        start.stop.sequences.append("9")
        start.output.token_ids = True
        events = [event async for event in client.generate(start)]
        text = "".join(event.delta.text for event in events)
        assert text.startswith(" 7")
        assert "9" not in text
        assert events[-1].finished.usage.completion_tokens < 40


async def test_structured_output_is_what_was_asked_for(server: Process) -> None:
    async with Client(server.address) as client:
        start = chat_request([("user", "Is water wet?")], max_tokens=8, sampling=GREEDY)
        start.structured_output.choices.choices.extend(["yes", "no"])
        assert await answer(client, start) in ("yes", "no")
        start.structured_output.regex = "[0-9]{3}-[a-z]{2}"
        assert re.fullmatch("[0-9]{3}-[a-z]{2}", await answer(client, start))
        start.structured_output.regex = "("
        with pytest.raises(GenerationError) as error:
            await answer(client, start)
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "GRAMMAR_INVALID")


@pytest.mark.slow
async def test_prompts_in_every_script_are_answered(server: Process) -> None:
    """Many at a time, through the chat path: no error, and the answers' pieces are whole characters of their tokens."""
    tokenizer, fields = load_tokenizer("demo"), pb.OutputOptions(token_ids=True, echo_prompt_token_ids=True)

    async def check(client: Client, text: str) -> None:
        start = chat_request([("user", text)], max_tokens=12, sampling=pb.SamplingParameters(seed=3))
        start.output.CopyFrom(fields)
        events = [event async for event in client.generate(start)]
        prompt = tokenizer.decode(list(events[0].admitted.prompt.token_ids), skip_special_tokens=False)
        assert f"<|im_start|>user\n{text}<|im_end|>" in prompt
        ids = [token_id for event in events for token_id in event.delta.token_ids]
        assert "".join(event.delta.text for event in events) == tokenizer.decode(ids)
        assert events[-1].HasField("finished")

    async with Client(server.address) as client:
        await asyncio.gather(*(check(client, text) for text in [*PROMPTS.values(), *CORPUS]))
        await until_idle(client)


async def test_the_prompts_log_probabilities_say_what_surprised_the_model(server: Process) -> None:
    async with Client(server.address) as client:
        found = []
        for text in ("The capital of France is Paris", "The capital of France is purple"):
            start = prompt_request(text, max_tokens=1, sampling=GREEDY)
            start.output.prompt_top_logprobs = 1
            scores = [score async for event in client.generate(start) for score in event.prompt.logprobs]
            assert b"".join(score.token_bytes for score in scores) == text.encode()
            assert not scores[0].HasField("logprob")
            found.append(scores)
        paris, purple = (scores[-1] for scores in found)
        assert (paris.rank, paris.top[0].token_bytes) == (1, b" Paris")
        assert purple.logprob < paris.logprob - 3


async def test_bad_requests_are_refused_by_name_and_leave_the_engine_well(server: Process) -> None:
    async with Client(server.address) as client:
        for start, field in (
            (prompt_request("x", sampling=pb.SamplingParameters(temperature=-1.0)), "temperature"),
            (prompt_request("x", sampling=pb.SamplingParameters(temperature=float("nan"))), "temperature"),
            (pb.StartGeneration(token_ids=pb.TokenIds(ids=[10**6])), "token_ids"),
            (prompt_request(""), "text"),
            (prompt_request("word " * 600), "512"),
        ):
            with pytest.raises(GenerationError) as error:
                await answer(client, start)
            assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert field in error.value.message
        assert await answer(client, prompt_request("1 + 1 =", max_tokens=2, sampling=GREEDY))


KILLED_CLIENT = """
import asyncio, sys
from service.client import Client, prompt_request

async def main():
    async with Client(sys.argv[1]) as client:
        async for event in client.generate(prompt_request("Once upon a time", max_tokens=450)):
            print("event", flush=True)

asyncio.run(main())
"""


async def test_killed_client_frees_its_blocks(server: Process) -> None:
    async with Client(server.address) as client:
        killed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED_CLIENT, server.address), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert killed.stdout is not None
        for _ in range(3):
            await asyncio.wait_for(killed.stdout.readline(), 30)
        assert (await client.capacity()).load.running_requests == 1
        killed.kill()
        await killed.wait()
        capacity = await until_idle(client)
        assert capacity.load.generated_tokens_total > 0


async def test_buf_and_grpcurl_through_reflection(server: Process) -> None:
    start = {"text": "1 2 3 4", "sampling": {"temperature": 0}, "stop": {"maxTokens": 4}}
    data = json.dumps({"start": start})
    url = f"http://{server.address}/octavo.v1.GenerationService/Generate"
    code, out, err = await run_command(
        *(BIN / "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url), seconds=30
    )
    assert code == 0, err
    assert "FINISH_REASON_MAX_TOKENS" in out
    method = "octavo.v1.GenerationService/GenerateUnary"
    code, out, err = await run_command(BIN / "grpcurl", "-plaintext", "-d", data, server.address, method)
    assert code == 0, err
    assert json.loads(out)["candidates"][0]["text"].startswith(" 5")


async def test_generate_and_capacity_commands(server: Process) -> None:
    command = (sys.executable, "-m", "service")
    arguments = ("1 2 3 4", "--max-tokens", "4", "--json", "--address", server.address)
    code, out, err = await run_command(*command, "generate", *arguments)
    assert code == 0, err
    assert json.loads(out)["text"].startswith(" 5")
    code, out, err = await run_command(*command, "capacity", "--address", server.address)
    assert code == 0, err
    assert "SmolLM2-135M-Instruct" in out


def engine_process(server: Process) -> psutil.Process:
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "engine.worker" in " ".join(child.cmdline())
    ]
    return engine


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Serves a model that starts at once and whose answers last for minutes."""
    path = write_tiny_model(tmp_path_factory.mktemp("endless") / "m", max_position_embeddings=1 << 17)
    sizes = ("--max-model-len", "100000", "--kv-cache-tokens", "400000", "--max-num-seqs", "8", "--num-threads", "1")
    return (*serving(str(path)), *sizes)


def log_lines(server: Process) -> list[str]:
    return [line for line in server.log if line.startswith("{")]


async def failing(client: Client, started: asyncio.Event) -> GenerationError:
    """A long request that must fail; `started` is set at its first token."""
    try:
        start = prompt_request("Once upon a time", max_tokens=None)
        start.stop.ignore_eos = True
        async for event in client.generate(start):
            if event.HasField("delta"):
                started.set()
    except GenerationError as error:
        return error
    raise AssertionError("not failed")


@pytest.mark.slow
async def test_killed_engine_is_told_to_every_client_and_leaves_no_process(endless: tuple[str, ...]) -> None:
    async with server_process(*endless, seconds=START_SECONDS) as server, Client(server.address) as client:
        engine, started = engine_process(server), asyncio.Event()
        tasks = [asyncio.create_task(failing(client, started)) for _ in range(4)]
        await asyncio.wait_for(started.wait(), 30)
        engine.kill()
        errors = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert {(error.code, error.reason) for error in errors} == {(grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")}
        # At least the one that had tokens; others may have been sent again by gRPC, and refused.
        (told, *_) = [error for error in errors if error.usage.completion_tokens > 0]
        assert "ended with code -9" in told.message
        assert told.usage.prompt_tokens > 0
        (death,) = [line for line in map(json.loads, log_lines(server)) if line["level"] == "error"]
        assert death["message"].startswith("engine died")
        capacity = await client.capacity()
        assert (capacity.state, capacity.accepting) == (capacity_pb2.REPLICA_STATE_FAILED, False)
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert not engine.is_running()


@pytest.mark.slow
async def test_frozen_engine_is_replaced_and_the_replica_serves_again(endless: tuple[str, ...]) -> None:
    flags = ("--restart-engine", "--hang-timeout", "4")
    async with (
        server_process(*endless, *flags, seconds=START_SECONDS) as server,
        Client(server.address) as client,
    ):
        engine, started = engine_process(server), asyncio.Event()
        before = await client.capacity()
        task = asyncio.create_task(failing(client, started))
        await asyncio.wait_for(started.wait(), 30)
        engine.suspend()
        await until_state(client, capacity_pb2.REPLICA_STATE_FAILED)
        assert (await asyncio.wait_for(task, 20)).reason == "ENGINE_DIED"
        after = await until_state(client, capacity_pb2.REPLICA_STATE_READY)
        assert after.instance_id != before.instance_id
        assert await answer(client, prompt_request("1 + 1 =", max_tokens=2, sampling=GREEDY))
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert [line for line in server.log if not line.startswith(("octavo: ", "{"))] == []


@pytest.mark.slow
async def test_second_signal_ends_also_an_engine_that_hangs(endless: tuple[str, ...]) -> None:
    async with server_process(*endless, seconds=START_SECONDS) as server, Client(server.address) as client:
        engine, started = engine_process(server), asyncio.Event()
        task = asyncio.create_task(failing(client, started))
        await asyncio.wait_for(started.wait(), 30)
        engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while not any('"draining"' in line for line in server.log):
                await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert await server.end(seconds=8) == 0  # an engine has 10 s to stop where nobody is in a hurry
        await task
        assert not engine.is_running()


async def test_signal_while_the_model_loads_ends_at_once() -> None:
    command = (sys.executable, *SERVE)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    assert process.stderr is not None
    while b"loading weights" not in (line := await asyncio.wait_for(process.stderr.readline(), 60)):
        assert line, "it ended"
    process.send_signal(signal.SIGTERM)
    out, err = await asyncio.wait_for(process.communicate(), 8)
    assert (process.returncode, out) == (0, b"")
    assert b"Traceback" not in err


async def until_state(client: Client, state: capacity_pb2.ReplicaState.ValueType) -> capacity_pb2.Capacity:
    async with asyncio.timeout(START_SECONDS):
        while (capacity := await client.capacity()).state != state:
            await asyncio.sleep(0.05)
        return capacity


async def test_demo_command() -> None:
    code, out, err = await run_command(sys.executable, "-m", "service", "demo", seconds=START_SECONDS)
    assert code == 0, out + err
    assert "Paris" in out
    for part in ("TTFT", "tokens/s", "finish:", "KV blocks", "exit code 0"):
        assert part in out


async def test_front_end_imports_no_torch() -> None:
    code, out, err = await run_command(
        sys.executable, "-c", "import sys, service.serve, service.__main__; print('torch' in sys.modules)"
    )
    assert (code, out.strip()) == (0, "False"), err
