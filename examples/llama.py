"""A Llama on eight devices: RMSNorm, rotary positions, grouped queries, SwiGLU; marked from outside as gpt.py is.

python examples/llama.py                                    eight devices inside this one process
python examples/llama.py --parallel_mode data_parallel      the same, parameters whole, the batch split
shardwright run --worker_num 8 examples/llama.py            eight processes
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from language import VOCABULARY, options, train

import shardwright as sw


class RMSNorm(nn.Module):
    def __init__(self, width, epsilon=1e-6):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def turns(length, width, base=10000.0):
    """The unit complex numbers by which pairs are turned at each position, [length, width / 2, 2]."""
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


class Rotary(nn.Module):
    """Turns the pairs (x[2i], x[2i + 1]) of each head, as complex numbers."""

    def __init__(self):
        super().__init__()
        self.times = sw.Operator(torch.mul)  # the one operator that works here: all the others are views

    def forward(self, x, turns):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(self.times(pairs, torch.view_as_complex(turns))).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, dropout=0.0):
        super().__init__()
        self.width, self.dropout = width // heads, dropout
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, kv_heads * self.width, bias=False) for _ in range(2))
        self.turn_query, self.turn_key = Rotary(), Rotary()
        self.attend = sw.Operator(F.scaled_dot_product_attention)

    def split(self, x):
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # [batch, heads, length, width / heads]

    def forward(self, x, turns):
        query = self.turn_query(self.split(self.query(x)), turns)
        key = self.turn_key(self.split(self.key(x)), turns)
        mixed = self.attend(
            query,
            key,
            self.split(self.value(x)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, dropout)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.silu, self.times = nn.SiLU(), sw.Operator(torch.mul)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, turns):
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.down(self.times(self.silu(self.gate(y)), self.up(y)))


class Llama(nn.Module):
    def __init__(
        self, vocabulary=VOCABULARY, length=64, layers=2, width=64, heads=8, kv_heads=4, hidden=160, dropout=0.0
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden, dropout) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("turns", turns(length, width // heads), persistent=False)
        self.apply(self.start)

    @staticmethod
    def start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x, length = self.tokens(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.turns[:length])
        return self.head(self.norm(x))


def mark(net, loss, dp, mp):
    """Split the batch `dp` ways and operators `mp` ways."""
    for block in net.blocks:
        attention = block.attention
        for layer in (attention.query, attention.key, attention.value, block.gate, block.up):
            sw.shard(layer, ((dp, 1, 1), (mp, 1)))  # x [batch, length, in], weight [out, in]
        for layer in (attention.out, block.down):
            sw.shard(layer, ((dp, 1, mp), (1, mp)))
        for rotary in (attention.turn_query, attention.turn_key):
            rotary.times.shard(((dp, mp, 1, 1), (1, 1)))  # pairs [batch, heads, length, width / 2], turns
        attention.attend.shard(((dp, mp, 1, 1),) * 3)  # heads of queries and of keys
        sw.shard(block.silu, ((dp, 1, mp),))
        block.times.shard(((dp, 1, mp),) * 2)
    sw.shard(net.tokens, ((dp, 1), (mp, 1)))  # tokens [batch, length], weight [vocabulary, width]
    sw.shard(net.head, ((dp, 1, 1), (mp, 1)))
    loss.cross_entropy.shard(((dp, mp), (dp,)))  # each rank keeps the classes that its head makes


def main(argv=None):
    args = options(argv, __doc__)
    return train(
        args,
        lambda: Llama(
            length=args.length,
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            kv_heads=max(1, args.heads // 2),
            hidden=args.width * 5 // 2,
            dropout=args.dropout,
        ),
        mark,
    )


if __name__ == "__main__":
    main()
