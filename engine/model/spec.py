"""What a decoder-only model is, in numbers: all that the decoder, the KV pool and the loader need to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `rotary_dim` of each head's dimensions turn at frequencies theta^(-2i/rotary_dim), scaled by
    `kind` ("default", "linear", "dynamic", "llama3", "yarn", "longrope"). `original_max_positions` is the length before
    scaling. `divisors` (one a frequency, from GGUF) divide the frequencies after that. `short_factors` and
    `long_factors` are longrope's divisors, one a frequency, of contexts within the original length and beyond it."""

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer with pre-norm RMSNorm, grouped-query attention, RoPE and a SwiGLU MLP.

    Biases say which projections add one; `qk_norm` is an RMSNorm over head_dim of queries and keys before RoPE.
    `attention_window`: a token sees at most this many tokens, itself included; None: all before it.
    `nope_layers`: layers without RoPE. `dtype`: what the checkpoint was saved in. `fused_checkpoint`: it keeps a
    layer's q, k and v in one matrix, and gate and up in another.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_window: int | None = None
    nope_layers: frozenset[int] = field(default_factory=frozenset)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    fused_checkpoint: bool = False

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the KV pool, over all layers."""
        return 2 * self.num_layers * self.kv_size

    @property
    def default_context(self) -> int:
        """The context to serve where nobody asks for another. Longrope rotates short contexts otherwise than long ones,
        so it is the original length: there every token is what the model was trained to give."""
        if self.rope.kind == "longrope":
            return min(self.max_positions, self.rope.original_max_positions)
        return self.max_positions

    @property
    def position_limit(self) -> int:
        """The longest context the rotary scaling was made for; `max_positions` is what the model's author promises."""
        if self.rope.kind == "yarn" and self.rope.original_max_positions:
            return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))
        return self.max_positions
