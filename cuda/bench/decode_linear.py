"""The matmuls of one decode step as a chain in a CUDA graph, against cuBLAS and the bus.

    python cuda/bench/decode_linear.py [--json FILE] [--model qwen2.5] [--batch 1 8 16 32 64]

Ours are the fused ops in the order of a step: start, then the QKV, output, gate-up and down projections of each
layer, then the head with fp32 logits; no attention between. cuBLAS has the matmuls alone (torch.mm, same weights):
no norm, no SiLU, no residual. All weights are read once a step, so nothing but the smallest model stays in the L2.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stopwatch import captured, copy_rate, machine, microseconds

from engine import ops_decode
from engine.ops_decode import ResidualStream

Tensor = torch.Tensor
EPS = 1e-6
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    qkv: int
    attended: int
    inter: int
    vocab: int


SHAPES = {
    "qwen2.5": Shape(28, 1536, 2048, 1536, 8960, 151936),
    "qwen3": Shape(28, 1024, 4096, 2048, 3072, 151936),
    "smollm2": Shape(30, 576, 960, 576, 1536, 49152),
}


def matrix(rows: int, columns: int) -> Tensor:
    bound = (3 / columns) ** 0.5
    return torch.empty(rows, columns, device="cuda", dtype=DTYPE).uniform_(-bound, bound)


class Chain:
    """Weights of one model shape and the two ways to run a step over them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        hidden, inter = shape.hidden, shape.inter
        self.layers = [
            (
                matrix(shape.qkv, hidden),
                matrix(hidden, shape.attended),
                matrix(2 * inter, hidden),
                matrix(hidden, inter),
            )
            for _ in range(shape.layers)
        ]
        self.head = matrix(shape.vocab, hidden)
        self.norm = 1 + matrix(1, hidden)[0]

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for layer in self.layers for w in layer) + self.head.nbytes

    def ours(
        self, batch: int, *, pdl: bool = True, portable: bool = False, layers: int | None = None
    ) -> torch.cuda.CUDAGraph:
        """The captured step; `self.logits` and `self.x` are its output and input."""
        shape = self.shape
        stream = ResidualStream.allocate(batch, shape.hidden, DTYPE, torch.device("cuda"))
        self.x = matrix(batch, shape.hidden)
        qkv, activated = matrix(batch, shape.qkv), matrix(batch, shape.inter)
        self.attended = matrix(batch, shape.attended)
        self.logits = torch.full((batch, shape.vocab), torch.nan, device="cuda")

        def step() -> None:
            ops_decode.start(stream, self.x, self.norm)
            for w_qkv, w_o, w_gate_up, w_down in self.layers[:layers]:
                ops_decode.norm_linear(qkv, stream, w_qkv, EPS, pdl=pdl, portable=portable)
                ops_decode.linear_add(stream, self.attended, w_o, self.norm, pdl=pdl, portable=portable)
                ops_decode.norm_gate_up(activated, stream, w_gate_up, EPS, pdl=pdl, portable=portable)
                ops_decode.linear_add(stream, activated, w_down, self.norm, pdl=pdl, portable=portable)
            ops_decode.norm_linear(self.logits, stream, self.head, EPS, pdl=pdl, portable=portable)

        return captured(step)

    def cublas(self, batch: int) -> torch.cuda.CUDAGraph:
        inputs = {w.shape[1]: matrix(batch, w.shape[1]) for w in (*self.layers[0], self.head)}
        outputs = {w.shape[0]: matrix(batch, w.shape[0]) for w in (*self.layers[0], self.head)}

        def step() -> None:
            for layer in (*self.layers, (self.head,)):
                for w in layer:
                    torch.mm(inputs[w.shape[1]], w.t(), out=outputs[w.shape[0]])

        return captured(step)

    def error(self, batch: int) -> float:
        """Relative error of the logits behind one layer, against float64. More layers amplify bf16's roundings."""
        self.ours(batch, layers=1).replay()
        _, w_o, w_gate_up, w_down = (w.double() for w in self.layers[0])

        def normed(h: Tensor) -> Tensor:
            return h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPS) * self.norm.double()

        h = self.x.double() + self.attended.double() @ w_o.t()
        gate, up = (normed(h) @ w_gate_up.t()).split(self.shape.inter, dim=1)
        h = h + (torch.nn.functional.silu(gate) * up) @ w_down.t()
        expected = normed(h) @ self.head.double().t()
        return float((self.logits.double() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 16, 32, 64])
    arguments = parser.parse_args()
    rate = copy_rate()
    figures: dict[str, object] = {**machine(), "copy_tbps": rate / 1e12}
    print(figures)
    print(f"{'model':8} {'batch':>5} {'floor':>7} {'ours':>7} {'no pdl':>7} {'portable':>8} {'cuBLAS':>7} ms   error")
    for name in arguments.model:
        chain = Chain(SHAPES[name])
        for batch in arguments.batch:
            error = chain.error(batch)
            if not error < 1e-2:
                raise SystemExit(f"{name} batch {batch}: relative error {error}")
            graphs = [
                chain.ours(batch),
                chain.ours(batch, pdl=False),
                chain.ours(batch, portable=True),
                chain.cublas(batch),
            ]
            floor = chain.weight_bytes / rate * 1e3
            times = [time / 1e3 for time in microseconds(graphs)]
            print(
                f"{name:8} {batch:5} {floor:7.3f} {times[0]:7.3f} {times[1]:7.3f} {times[2]:8.3f} {times[3]:7.3f}"
                f"      {error:.1e}",
                flush=True,
            )
            figures[f"{name} {batch}"] = {
                "floor_ms": floor,
                "ours_ms": times[0],
                "without_pdl_ms": times[1],
                "portable_ms": times[2],
                "cublas_ms": times[3],
                "error": error,
            }
        del chain, graphs
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
