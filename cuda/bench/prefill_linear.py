"""The matmuls of a prefill, each with the kernel that follows it, against cuBLAS with plain kernels: us a call.

python cuda/bench/prefill_linear.py [--json FILE]

qkv: the product. o, down: product, residual add, RMSNorm. gate-up: product, SiLU and multiplication. Weights rotate
past the L2, programmatic launches where a kernel has them. engine/model/layers.py chooses by the efficiency.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stopwatch import captured, machine, matmul_rate, microseconds

from engine import ops, ops_prefill

Tensor = torch.Tensor

CALLS = 8
# Kind, out_features, in_features.
SHAPES: dict[str, tuple[ops_prefill.Kind, int, int]] = {
    "qwen2.5 qkv": ("plain", 2048, 1536),
    "qwen2.5 o": ("add", 1536, 1536),
    "qwen2.5 gate-up": ("gate_up", 8960, 1536),
    "qwen2.5 down": ("add", 1536, 8960),
    "qwen3 qkv": ("plain", 4096, 1024),
    "qwen3 o": ("add", 1024, 2048),
    "qwen3 gate-up": ("gate_up", 3072, 1024),
    "qwen3 down": ("add", 1024, 3072),
}
ROWS = (512, 1024, 2048, 4096, 8192)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def pair(kind: ops_prefill.Kind, rows: int, out_features: int, in_features: int) -> tuple[Callable[[], None], ...]:
    """Ours and cuBLAS's, CALLS times each."""
    weight_rows = 2 * out_features if kind == "gate_up" else out_features
    weights = [random(weight_rows, in_features, scale=in_features**-0.5) for _ in range(CALLS)]
    x, out, residual = random(rows, in_features), random(rows, out_features), random(rows, out_features)
    norm, projected = random(out_features), torch.empty(rows, weight_rows, device="cuda", dtype=torch.bfloat16)

    def ours() -> None:
        for weight in weights:
            if kind == "plain":
                ops_prefill.linear(out, x, weight, pdl=True)
            elif kind == "gate_up":
                ops_prefill.gate_up(out, x, weight, pdl=True)
            else:
                ops_prefill.add(residual, x, weight, pdl=True)
                ops.rms_norm(out, residual, norm, 1e-6, pdl=True)

    def cublas() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=projected)
            if kind == "gate_up":
                ops.silu_mul(out, projected, pdl=True)
            elif kind == "add":
                ops.rms_norm(out, projected, norm, 1e-6, residual=residual, pdl=True)

    return ours, cublas


def measure(name: str, rows: int, flops: float) -> dict[str, float | str]:
    kind, out_features, in_features = SHAPES[name]
    times = microseconds([captured(step) for step in pair(kind, rows, out_features, in_features)])
    ours, cublas = (time / CALLS for time in times)
    work = 2 * rows * in_features * out_features * (2 if kind == "gate_up" else 1)
    return {
        "task": f"{name}, {rows} rows",
        "floor": work / flops * 1e6,
        "ours": ours,
        "cublas": cublas,
        "ratio": ours / cublas,
        "efficiency": ops_prefill.efficiency(kind, rows, out_features, in_features, torch.bfloat16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flops = matmul_rate()
    print(f"prefill matmuls, us a call; {machine()}; matmul {flops / 1e12:.0f} TFLOP/s")
    rows = []
    for count in ROWS:
        for name in SHAPES:
            rows.append(measure(name, count, flops))
            shown = " ".join(f"{key} {value:8.2f}" for key, value in rows[-1].items() if isinstance(value, float))
            print(f"{rows[-1]['task']:28s} {shown}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "matmul": flops, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
