from octavo.v1 import generation_pb2 as g
from tests.service.conftest import Running


async def test_unary(served: Running):
    r = await served.generation.GenerateUnary(
        g.GenerateUnaryRequest(start=g.StartGeneration(text="hi", stop=g.StopCriteria(max_tokens=5))), timeout=5
    )
    print(r)
    assert r.candidates[0].text == "abcde"


async def test_stream(served: Running):
    async for m in served.generation.GenerateStream(
        g.GenerateStreamRequest(start=g.StartGeneration(text="hi", stop=g.StopCriteria(max_tokens=5))), timeout=5
    ):
        print(m)


async def test_bidi(served: Running):
    call = served.generation.Generate(timeout=5)
    await call.write(
        g.GenerateRequest(start=g.StartGeneration(request_id="a", text="hi", stop=g.StopCriteria(max_tokens=5)))
    )
    await call.write(
        g.GenerateRequest(start=g.StartGeneration(request_id="b", text="hi", stop=g.StopCriteria(max_tokens=0)))
    )
    await call.done_writing()
    async for m in call:
        print(m)
