"""Which tensors of a checkpoint make up each parameter of the decoder, and where in it each one goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A source tensor that fills rows [start, start + shape[0]) of a parameter."""

    name: str
    shape: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the decoder. `layer` is None for those outside the layers."""

    layer: int | None
    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Naming:
    """A checkpoint format's names. `layer` is a prefix with {layer}; the others are stems to which .weight or .bias is
    added. Where `stems` has "qkv" or "gate_up", their parts lie in one tensor."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    stems: dict[str, str]

    def of(self, layer: int, part: str, suffix: str = "weight") -> str:
        return f"{self.layer.format(layer=layer)}.{self.stems[part]}.{suffix}"


HUGGING_FACE = Naming(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{layer}",
    stems={
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)
FUSED_HUGGING_FACE = replace(
    HUGGING_FACE, stems={**HUGGING_FACE.stems, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
)
GGUF = Naming(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{layer}",
    stems={
        "input_norm": "attn_norm",
        "post_norm": "ffn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)


def naming_of(spec: ModelSpec) -> Naming:
    """Of the model's Hugging Face checkpoint."""
    return FUSED_HUGGING_FACE if spec.fused_checkpoint else HUGGING_FACE


def plan_weights(spec: ModelSpec, naming: Naming) -> list[Parameter]:
    """Every parameter of the decoder except the head, whose source depends on what the checkpoint holds."""
    hidden = (spec.hidden_size,)
    plan = [_single(None, "embedding", naming.embedding, (spec.vocab_size, spec.hidden_size))]
    for layer in range(spec.num_layers):
        plan += _plan_layer(spec, naming, layer)
    plan.append(_single(None, "final_norm", naming.final_norm, hidden))
    return plan


def head_piece(spec: ModelSpec, naming: Naming) -> Piece:
    return Piece(naming.head, (spec.vocab_size, spec.hidden_size))


def _single(layer: int | None, name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(layer, name, shape, (Piece(source, shape),))


def _stacked(layer: int, name: str, parts: list[tuple[str, int]], columns: tuple[int, ...]) -> Parameter:
    pieces: list[Piece] = []
    start = 0
    for source, rows in parts:
        pieces.append(Piece(source, (rows, *columns), start))
        start += rows
    return Parameter(layer, name, (start, *columns), tuple(pieces))


def _plan_layer(spec: ModelSpec, naming: Naming, layer: int) -> list[Parameter]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    qkv = [("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)]
    gate_up = [("gate", inter), ("up", inter)]

    def stacked(
        name: str, whole: str, parts: list[tuple[str, int]], suffix: str, columns: tuple[int, ...]
    ) -> Parameter:
        if whole in naming.stems:
            parts = [(whole, sum(rows for _, rows in parts))]
        return _stacked(layer, name, [(naming.of(layer, part, suffix), rows) for part, rows in parts], columns)

    def single(name: str, part: str, suffix: str, shape: tuple[int, ...]) -> Parameter:
        return _single(layer, name, naming.of(layer, part, suffix), shape)

    plan = [
        single("input_norm", "input_norm", "weight", (hidden,)),
        stacked("qkv", "qkv", qkv, "weight", (hidden,)),
        single("o", "o", "weight", (hidden, spec.q_size)),
        single("post_norm", "post_norm", "weight", (hidden,)),
        stacked("gate_up", "gate_up", gate_up, "weight", (hidden,)),
        single("down", "down", "weight", (hidden, inter)),
    ]
    if spec.qk_norm:
        plan += [single(name, name, "weight", (spec.head_dim,)) for name in ("q_norm", "k_norm")]
    if spec.qkv_bias:
        plan.append(stacked("qkv_bias", "qkv", qkv, "bias", ()))
    if spec.o_bias:
        plan.append(single("o_bias", "o", "bias", (hidden,)))
    if spec.mlp_bias:
        plan += [
            stacked("gate_up_bias", "gate_up", gate_up, "bias", ()),
            single("down_bias", "down", "bias", (hidden,)),
        ]
    return plan
