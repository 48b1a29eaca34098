"""A long prompt and those behind it share a step's budget: nobody waits for the other to be through."""

from __future__ import annotations

import pytest

from engine.loop import StepLoop
from tests.schedule.fake_model import expected, make_loop, preempt, request, run_to_end, tokens_of

BUDGET = 16
LONG = 100


def prompt(length: int, start: int) -> list[int]:
    return [(start * 131 + index * 7) % 1000 for index in range(length)]


def submit(loop: StepLoop, name: str, length: int, **fields: object) -> None:
    loop.scheduler.submit(request(name, prompt(length, hash_of(name)), 2, **fields), 0.0)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def step(loop: StepLoop) -> dict[str, int]:
    """Tokens that the next step computes, of each request."""
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    counts = {entry.sequence.group.request_id: entry.count for entry in plan.scheduled}
    loop.scheduler.commit(plan, loop.runner.launch(plan).wait(), 0.0)
    return counts


def loop_with_a_long_one(**options: object) -> StepLoop:
    loop = make_loop(num_blocks=400, max_batched_tokens=BUDGET, **options)  # type: ignore[arg-type]
    submit(loop, "long", LONG)
    assert step(loop) == {"long": BUDGET}
    return loop


def test_a_short_prompt_runs_beside_it_in_the_next_step() -> None:
    loop = loop_with_a_long_one()
    submit(loop, "short", 5)
    assert step(loop) == {"long": BUDGET - 5, "short": 5}
    events = run_to_end(loop)
    assert tokens_of(events, "long") == expected(prompt(LONG, hash_of("long")), 2)
    loop.scheduler.check_idle()


def test_however_many_come_it_keeps_half() -> None:
    loop = loop_with_a_long_one()
    steps, left = 0, LONG - BUDGET
    while left > BUDGET:
        for index in range(4):
            submit(loop, f"short {steps} {index}", 7)
        counts = step(loop)
        assert counts["long"] >= (BUDGET - len(counts) + 1) // 2
        left -= counts["long"]
        steps += 1
    assert steps <= 2 * LONG // BUDGET + 2
    run_to_end(loop)
    loop.scheduler.check_idle()


def test_what_no_other_finishes_is_its_own() -> None:
    """Prompts that are long, too, take turns as they came: sharing would make each of them late."""
    loop = loop_with_a_long_one()
    submit(loop, "other", LONG)
    for _ in range(5):
        assert step(loop) == {"long": BUDGET}
    assert step(loop) == {"long": LONG - 6 * BUDGET, "other": BUDGET - (LONG - 6 * BUDGET)}


def test_short_ones_pass_long_ones_that_wait() -> None:
    loop = loop_with_a_long_one()
    submit(loop, "other", LONG)
    submit(loop, "short", 5)
    assert step(loop) == {"long": BUDGET - 5, "short": 5}


def test_one_that_is_mostly_cached_is_short() -> None:
    loop = make_loop(num_blocks=400, max_batched_tokens=BUDGET, prefix_caching=True)
    submit(loop, "again", 42)
    run_to_end(loop)
    submit(loop, "long", LONG)
    assert step(loop) == {"long": BUDGET}
    submit(loop, "again", 42)
    counts = step(loop)
    assert counts["again"] <= BUDGET // 2
    assert sum(counts.values()) == BUDGET


@pytest.mark.parametrize(("priority", "passes"), [(-1, False), (0, True), (1, True)])
def test_a_lower_priority_takes_nothing_of_it(priority: int, passes: bool) -> None:
    loop = loop_with_a_long_one()
    submit(loop, "short", 5, priority=priority)
    assert ("short" in step(loop)) == passes


def test_nobody_overtakes_one_that_had_to_yield() -> None:
    loop = loop_with_a_long_one()
    submit(loop, "yielded", 8)
    step(loop)
    submit(loop, "other", LONG)
    preempt(loop, "long")
    counts = step(loop)
    assert "long" in counts
    assert "other" not in counts


def test_nobody_overtakes_one_that_had_to_yield_and_is_too_long_to_run_beside_it() -> None:
    loop = loop_with_a_long_one()
    loop.scheduler.submit(request("yielded", prompt(8, 1), 20), 0.0)
    for _ in range(3):
        step(loop)
    preempt(loop, "yielded")
    submit(loop, "short", 5)
    assert step(loop) == {"long": BUDGET}


def test_decodes_come_first() -> None:
    loop = make_loop(num_blocks=400, max_batched_tokens=BUDGET)
    loop.scheduler.submit(request("decodes", prompt(4, 1), 40), 0.0)
    step(loop)
    submit(loop, "long", LONG)
    assert step(loop) == {"decodes": 1, "long": BUDGET - 1}
    submit(loop, "short", 7)
    assert step(loop) == {"decodes": 1, "short": 7, "long": BUDGET - 8}
