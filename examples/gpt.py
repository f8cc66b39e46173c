"""A GPT on eight devices: a model as anyone writes it, its operators marked from outside.

Each block's first products are split by columns, its second ones by rows, its attention by heads, and the embedding,
which is also the last product's weight, by the vocabulary. What is not marked follows the batch.

    python examples/gpt.py                                      eight devices inside this one process
    python examples/gpt.py --parallel_mode data_parallel        the same, parameters whole, the batch split
    shardwright run --worker_num 8 examples/gpt.py              eight processes
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from language import VOCABULARY, options, train

import shardwright as sw


class Attention(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.attend = sw.Operator(F.scaled_dot_product_attention)  # an operator object, so that it can be marked

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, length, width / heads]

    def forward(self, x):
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        mixed = self.attend(query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(self.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, length=64, layers=2, width=64, heads=8, dropout=0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied
        self.apply(self.start)

    @staticmethod
    def start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mark(net, loss, dp, mp):
    """Split the batch `dp` ways and operators `mp` ways."""
    for block in net.blocks:
        attention = block.attention
        for layer in (attention.query, attention.key, attention.value, block.up):
            sw.shard(layer, ((dp, 1, 1), (mp, 1)))  # x [batch, length, in], weight [out, in]
        for layer in (attention.out, block.down):
            sw.shard(layer, ((dp, 1, mp), (1, mp)))
        attention.attend.shard(((dp, mp, 1, 1),) * 3)
        sw.shard(block.gelu, ((dp, 1, mp),))
    sw.shard(net.tokens, ((dp, 1), (mp, 1)))  # tokens [batch, length], weight [vocabulary, width]
    sw.shard(net.head, ((dp, 1, 1), (mp, 1)))
    loss.cross_entropy.shard(((dp, mp), (dp,)))  # each rank keeps the classes that its head makes


def main(argv=None):
    args = options(argv, __doc__)
    return train(
        args,
        lambda: GPT(length=args.length, layers=args.layers, width=args.width, heads=args.heads, dropout=args.dropout),
        mark,
    )


if __name__ == "__main__":
    main()
