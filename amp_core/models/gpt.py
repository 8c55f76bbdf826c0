"""A GPT whose positions are computed in fp32, or from 16-bit ids, to show what goes wrong.

bfloat16 counts exactly to 256, float16 to 2048; beyond, neighbouring positions share an id, which short sequences do
not show. fp32 ids are not enough: under autocast a matmul, `ids @ frequencies`, casts them to 16 bits again. So phases
and distances are computed from ids in an fp32 island, elementwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.lowp.islands import keep_fp32
from amp_core.models.family import Family, check_choice, check_count, check_probability
from amp_core.models.packed import causal_mask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POSITIONS = ("learned", "rope", "alibi")
ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""The approximation of GELU; GPT-2 has tanh."""


def position_ids(length: int, *, offset: int = 0, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """[length] ids from `offset` on, rounded to `dtype`: of 4096, 769 are distinct in bfloat16, 3073 in float16."""
    return (torch.arange(length, device=device) + offset).to(dtype)


@keep_fp32
def rope_phases(ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which RoPE rotates pairs of features (Su et al., arXiv:2104.09864).

    Computed in each forward pass: frequencies in a buffer would be cast to 16 bits with the weights. From floating
    point ids [..., L] (16-bit ones are cast to fp32, already rounded), for `dim` features of a head: two fp32 [..., L,
    dim / 2].
    """
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, device=ids.device) / dim)
    angles = ids[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate features i and i + D / 2 of each position of x [B, H, L, D] in fp32; x keeps its dtype."""
    cos, sin = phases
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class KeyCache:
    """Keys and values of the tokens so far, of each block: a token costs its own row of attention alone.

    Position p of a row lies at index p: what a shorter prompt leaves behind it is not seen, and then overwritten.
    `positions`, int64 [B, T], are those of the next tokens; `seen` is the largest position of any row, plus 1.
    """

    def __init__(self, positions: Tensor, seen: int, capacity: int) -> None:
        self.positions, self.seen, self._capacity = positions, seen, capacity
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def mask(self) -> Tensor:
        """Which keys a query attends to, bool [B, 1, T, seen]."""
        keys = torch.arange(self.seen, device=self.positions.device)
        return (keys <= self.positions[:, :, None])[:, None]

    def add(self, block: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, seen, D] of a block with the new ones [B, H, T, D]."""
        if block not in self._kept:
            shape = (*k.shape[:2], self._capacity, k.shape[3])
            self._kept[block] = k.new_zeros(shape), v.new_zeros(shape)
        kept = self._kept[block]
        places = self.positions[:, None, :, None].expand_as(k)
        for old, new in zip(kept, (k, v), strict=True):
            old.scatter_(2, places, new)
        return kept[0][:, :, : self.seen], kept[1][:, :, : self.seen]


@keep_fp32
def alibi_bias(queries: Tensor, keys: Tensor, heads: int) -> Tensor:
    """ALiBi's bias of attention scores (Press et al., arXiv:2108.12409): minus the distance, with a slope per head.

    fp32 [..., heads, T, S] of the ids of queries [..., T] and keys [S]. The difference of two exact ids is exact: the
    result may be cast to 16 bits, the ids may not.
    """
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=keys.device) / heads)
    return slopes[:, None, None] * (keys - queries[..., None, :, None])


class Block(nn.Module):
    """Attention and a multilayer perceptron, pre-normalised and residual."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.gelu = heads, dropout, gelu
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(
        self, x: Tensor, phases: tuple[Tensor, Tensor] | None, bias: Tensor | None, cache: KeyCache | None = None
    ) -> Tensor:
        """x [B, L, width], with phases for RoPE, a bias for ALiBi or a mask of packed documents; None: causal."""
        dropout = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if phases is not None:
            q, k = rotate(q, phases), rotate(k, phases)
        if cache is not None:
            k, v = cache.add(self, k, v)
        mask = bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)), approximate=self.gelu)), dropout)


class GPT(nn.Module):
    """A small GPT: tokens int64 [B, L] to logits [B, L, vocab_size] of the token that follows each.

    Logits have the autocast dtype, or without autocast that of the weights.

    Args:
        length: tokens of a training sample, and the number of `learned` positions.
        width: features of the residual stream, a multiple of `heads`. Multiples of 16 suit Tensor Cores in every dtype.
        heads: attention heads; 64 features per head suit fused attention best.
        dropout: probability, after the embedding, in attention, and after each half of a block.
        positions: `rope`: rotates queries and keys; `alibi`: penalises distance; `learned`: a table.
        positions_dtype: dtype that holds the position ids: fp32, bf16, fp16.
        tied: the last layer has the weights of the embedding.
        bias: linear layers but the last, and norms, have biases.
        activation: `gelu`, or `gelu_tanh`, its approximation.

    With positions=learned, tied, bias and gelu_tanh it is GPT-2, and model.weights takes a folder of its weights.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        length: int,
        width: int = 192,
        depth: int = 4,
        heads: int = 3,
        dropout: float = 0.0,
        positions: str = "rope",
        positions_dtype: str = "fp32",
        tied: bool = False,
        bias: bool = False,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        for key, value in (("width", width), ("depth", depth), ("heads", heads)):
            check_count(key, value)
        check_probability("dropout", dropout)
        check_choice("positions", positions, POSITIONS)
        check_choice("positions_dtype", positions_dtype, DTYPES)
        check_choice("activation", activation, ACTIVATIONS)
        if width % (2 * heads):
            raise ValueError(f"width={width}, expected a multiple of 2 * heads = {2 * heads}")
        self.heads, self.head_dim, self.dropout = heads, width // heads, dropout
        self.positions, self.ids_dtype = positions, DTYPES[positions_dtype]
        self.embed = nn.Embedding(vocab_size, width)
        self.table = nn.Embedding(length, width) if positions == "learned" else None
        self.blocks = nn.ModuleList(Block(width, heads, dropout, bias, ACTIVATIONS[activation]) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # Each block adds to the residual stream twice: scale so that it does not grow with depth (Radford et
                # al. 2019).
                num_added = 2 * depth if name.endswith((".out", ".down")) else 1
                nn.init.normal_(module.weight, std=(num_added * module.in_features) ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.25)
        if tied:
            self.embed.weight = self.head.weight

    def forward(
        self, tokens: Tensor, offset: int = 0, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits of tokens [B, L] from position `offset` on; or, given the int64 targets [B, L] that follow and a head
        of `heads.losses`, the summed loss. No host-device sync.

        Of packed documents (`data.packing`) each token attends to its own document alone. All blocks share one mask: a
        bool [B, 1, L, L], whose attention on a CPU takes 1.4 to 1.7 times as long as causal attention without a mask,
        which skips half of the scores, and on a GPU runs in the memory-efficient kernel instead of the flash one.

        `positions` of packed documents, int64 [B, L], are 0 where one begins; None: one document, from 0 to L - 1.
        ValueError: the learned table is shorter than the sequence.
        """
        length = tokens.shape[1]
        if self.table is not None and offset + length > self.table.num_embeddings:
            raise ValueError(f"position {offset + length - 1}: the model has {self.table.num_embeddings} positions")
        ids = position_ids(length, offset=offset, dtype=self.ids_dtype, device=tokens.device)
        bias = None if positions is None else causal_mask(positions)
        if self.positions == "alibi":  # distances within a document are those of indices
            # By index, not by id: rounded ids would leak the future.
            seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril() if bias is None else bias
            bias = alibi_bias(ids, ids, self.heads).masked_fill(~seen, -torch.inf)
        elif positions is not None:
            ids = (positions + offset).to(self.ids_dtype)
        x, phases = self._embedded(tokens, ids)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, phases, bias)
        x = self.norm(x)
        return self.head(x) if targets is None else self.head(x, targets)

    def _embedded(self, tokens: Tensor, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Embeddings of tokens, and RoPE's phases if it has any, at ids [L] or [B, L]."""
        x = self.embed(tokens)
        if self.table is not None:
            x = x + self.table(ids.long().clamp(max=self.table.num_embeddings - 1))  # 511 in bfloat16 is 512
        if self.positions != "rope":
            return x, None
        return x, rope_phases(ids if ids.ndim == 1 else ids[:, None], self.head_dim)

    def continued(self, tokens: Tensor, cache: KeyCache, last: Tensor) -> Tensor:
        """Logits [B, vocab_size] of what follows one of the tokens [B, T] at the positions of `cache`.

        The cache takes their keys; `last`, int64 [B, 1], is the index of that token.
        """
        ids, bias = cache.positions.to(self.ids_dtype), cache.mask()
        x, phases = self._embedded(tokens, ids)
        if self.positions == "alibi":
            keys = position_ids(cache.seen, dtype=self.ids_dtype, device=tokens.device)
            bias = alibi_bias(ids, keys, self.heads).masked_fill(~bias, -torch.inf)
        for block in self.blocks:
            x = block(x, phases, bias, cache)
        return self.head(self.norm(x.gather(1, last[:, :, None].expand(-1, -1, x.shape[-1]))))[:, 0]


LANGUAGE_MODELS = Family(
    what="a language model",
    builders={"gpt": GPT},
    example={"vocab_size": 256, "length": 16},
    libraries={"hf": "hf_language_model"},
)
