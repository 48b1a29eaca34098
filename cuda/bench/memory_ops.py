"""The ops that only move memory, and sampling: microseconds a call against the bus and against torch.

    python cuda/bench/memory_ops.py [--json FILE] [--only copies pointwise sampling]

Buffers are rotated past the L2. Fractions are of the rate of a plain device copy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decode_attention import BLOCK, HEADS
from stopwatch import COLD_BYTES, captured, copy_rate, machine, microseconds

from engine import ops

Tensor = torch.Tensor
HIDDEN, INTER, VOCAB = 1536, 8960, 151936


@dataclass(frozen=True)
class Task:
    """`ours` and its peers take the index of the buffers to use; all move `moved` bytes."""

    name: str
    moved: float
    sets: int
    ours: Callable[[int], object]
    peers: dict[str, Callable[[int], object]] = field(default_factory=dict)


def sets_for(moved: float) -> int:
    return max(1, min(64, round(COLD_BYTES / moved + 0.5)))


def normal(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


def block_copies() -> Iterator[Task]:
    _, kv_heads, head_dim, layers = HEADS["qwen2.5"]
    block = layers * 2 * kv_heads * BLOCK * head_dim * 2
    count = 4600
    pool = normal(count, layers, 2, kv_heads, BLOCK, head_dim)
    for megabytes in (0.4, 4, 64, 256):
        pairs = max(1, round(megabytes * 1e6 / block))
        sets = min(sets_for(2 * pairs * block), count // (2 * pairs))
        ids = torch.randperm(count, device="cuda")[: 2 * pairs * sets].view(sets, pairs, 2)
        in_order = torch.arange(2 * pairs * sets, device="cuda").view(sets, 2, pairs).mT.contiguous()

        def ours(index: int, ids: Tensor = ids) -> None:
            ops.copy_blocks(pool, ids[index])

        def neighbours(index: int, ids: Tensor = in_order) -> None:
            ops.copy_blocks(pool, ids[index])

        def gather(index: int, ids: Tensor = ids) -> None:
            pool.index_copy_(0, ids[index, :, 1], pool.index_select(0, ids[index, :, 0]))

        def plain(index: int, pairs: int = pairs) -> None:
            first = 2 * index * pairs
            torch.add(pool[first : first + pairs], 0, out=pool[first + pairs : first + 2 * pairs])

        peers = {"torch": gather, "contiguous": plain, "ours, neighbouring blocks": neighbours}
        yield Task(f"copy_blocks {pairs} = {pairs * block / 1e6:.1f} MB", 2.0 * pairs * block, sets, ours, peers)


def pointwise(rows: int) -> Iterator[Task]:
    weight = normal(HIDDEN)
    moved = 4.0 * rows * HIDDEN * 2
    sets = sets_for(moved)
    x, residual, out = normal(sets, rows, HIDDEN), normal(sets, rows, HIDDEN), normal(sets, rows, HIDDEN)

    def add_norm(index: int) -> None:
        residual[index].add_(x[index])
        torch.nn.functional.rms_norm(residual[index], (HIDDEN,), weight, 1e-6)

    yield Task(
        f"add+rms_norm {rows}",
        moved,
        sets,
        lambda index: ops.rms_norm(out[index], x[index], weight, 1e-6, residual=residual[index]),
        {"torch": add_norm},
    )
    moved = 3.0 * rows * INTER * 2
    sets = sets_for(moved)
    gate_up, product = normal(sets, rows, 2 * INTER), normal(sets, rows, INTER)
    yield Task(
        f"silu_mul {rows}",
        moved,
        sets,
        lambda index: ops.silu_mul(product[index], gate_up[index]),
        {
            "torch": lambda index: torch.mul(
                torch.nn.functional.silu(gate_up[index, :, :INTER]), gate_up[index, :, INTER:], out=product[index]
            )
        },
    )


def kv_writes(rows: int) -> Iterator[Task]:
    q_heads, kv_heads, head_dim, _ = HEADS["qwen3"]
    width = (q_heads + 2 * kv_heads) * head_dim
    moved = 2.0 * rows * width * 2
    sets = sets_for(moved)
    qkv, query = normal(sets, rows, width), normal(sets, rows, q_heads, head_dim)
    pool = normal(sets * (rows // BLOCK + 1), 1, 2, kv_heads, BLOCK, head_dim)
    slots = torch.randperm(len(pool) * BLOCK, device="cuda")[: sets * rows].view(sets, rows)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    cos_sin, norm = torch.rand(rows, head_dim, device="cuda"), normal(head_dim)

    def ours(index: int) -> None:
        ops.write_kv(
            query[index],
            qkv[index],
            pool,
            0,
            positions,
            slots[index],
            cos_sin,
            q_norm=norm,
            k_norm=norm,
            norm_eps=1e-6,
        )

    yield Task(f"write_kv {rows}, QK-norm", moved, sets, ours)


def samplers(rows: int, dtype: torch.dtype) -> Iterator[Task]:
    moved = float(dtype.itemsize * rows * VOCAB)
    sets = sets_for(moved)
    logits = 3 * torch.empty(sets, rows, VOCAB, dtype=dtype, device="cuda").normal_()
    tokens = torch.empty(rows, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(ops.sample_workspace_bytes(rows), dtype=torch.uint8, device="cuda")
    seeds = torch.arange(rows, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")

    def ours(temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Callable[[int], None]:
        given = {
            "temperature": torch.full((rows,), temperature, device="cuda"),
            "top_k": torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
            "top_p": torch.full((rows,), top_p, device="cuda"),
            "min_p": torch.full((rows,), min_p, device="cuda"),
        }
        return lambda index: ops.sample(
            tokens, logits[index], **given, seeds=seeds, positions=positions, workspace=workspace
        )

    def sorted_top_p(index: int) -> None:
        values, order = logits[index].float().sort(dim=1, descending=True)
        weights = values.softmax(1)
        weights[weights.cumsum(1) - weights > 0.9] = 0
        order.gather(1, (weights / torch.empty_like(weights).exponential_()).argmax(1, keepdim=True))

    def gumbel(index: int) -> None:
        weights = logits[index].float().softmax(1)
        (weights / torch.empty_like(weights).exponential_()).argmax(1)

    name = f"{rows} {str(dtype).removeprefix('torch.')}"
    yield Task(f"greedy {name}", moved, sets, ours(0.0, 0, 1.0), {"torch": lambda index: logits[index].argmax(1)})
    yield Task(f"temperature {name}", moved, sets, ours(1.0, 0, 1.0), {"torch": gumbel})
    yield Task(f"top-p {name}", moved, sets, ours(1.0, 0, 0.9), {"torch": sorted_top_p})
    yield Task(f"top-k 50, top-p {name}", moved, sets, ours(1.0, 50, 0.9))
    yield Task(f"min-p {name}", moved, sets, ours(1.0, 0, 1.0, 0.05))


def all_pointwise() -> Iterator[Task]:
    for rows in (1, 64, 2048, 16384):
        yield from pointwise(rows)
        yield from kv_writes(rows)


def all_samplers() -> Iterator[Task]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 8, 64, 256):
            yield from samplers(rows, dtype)


TASKS = {"copies": block_copies, "pointwise": all_pointwise, "sampling": all_samplers}


def measure(task: Task, copy: float) -> dict[str, float | str]:
    def all_sets(call: Callable[[int], object]) -> Callable[[], None]:
        return lambda: [call(index) for index in range(task.sets)] and None

    calls = {"ours": task.ours} | task.peers
    times = microseconds([captured(all_sets(call)) for call in calls.values()])
    row: dict[str, float | str] = {"task": task.name, "floor": task.moved / copy * 1e6}
    row |= {name: time / task.sets for name, time in zip(calls, times, strict=True)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=list(TASKS))
    arguments = parser.parse_args()
    copy = copy_rate()
    print(f"memory ops and sampling, us a call; {machine()}; copy {copy / 1e12:.2f} TB/s")
    rows = []
    for task in (task for name in arguments.only for task in TASKS[name]()):
        row = measure(task, copy)
        rows.append(row)
        shown = " ".join(f"{name} {value:9.2f}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['task']:30s} {shown}  of copy {float(row['floor']) / float(row['ours']):.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "copy": copy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
