"""Models of diffusers and torch_geometric, and of torch alone: small, random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from registry import ROWS, VOCABULARY, Built, class_of, classes, draw, library, model, tokens
from torch import Tensor, nn

# -- diffusers ---------------------------------------------------------------------------------------------------------


@model("diffusers", slow=True)
def unet2d() -> Built:
    net = (
        library("diffusers")
        .UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        )
        .double()
    )
    return Built(net, (draw(ROWS, 3, 8, 8), torch.arange(ROWS)), noise, draw(ROWS, 3, 8, 8, seed=1))


def noise(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


@model("diffusers", slow=True)
def unet2d_condition() -> Built:
    net = (
        library("diffusers")
        .UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            mid_block_type=None,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        )
        .double()
    )
    return Built(
        net, (draw(ROWS, 4, 8, 8), torch.arange(ROWS), draw(ROWS, 4, 16, seed=2)), noise, draw(ROWS, 4, 8, 8, seed=1)
    )


@model("diffusers")
def dit() -> Built:
    net = (
        library("diffusers")
        .DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=4,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=8,
            dropout=0.0,
        )
        .double()
        .eval()
    )
    return Built(
        net,
        (draw(ROWS, 4, 8, 8),),
        noise,
        draw(ROWS, 4, 8, 8, seed=1),
        {"timestep": torch.arange(ROWS), "class_labels": classes(8)},
    )


@model("diffusers")
def vae() -> Built:
    net = (
        library("diffusers")
        .AutoencoderKL(
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
        )
        .double()
    )
    return Built(net, (draw(ROWS, 3, 8, 8),), noise, draw(ROWS, 3, 8, 8, seed=1))


# -- torch_geometric ---------------------------------------------------------------------------------------------------


def graph_of(nodes: int = 16, edges: int = 40, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return draw(nodes, width), torch.randint(0, nodes, (2, edges), generator=generator)


def gnn(name: str, **settings: Any) -> Built:
    nets = library("torch_geometric.nn")
    x, edges = graph_of()
    return Built(getattr(nets.models, name)(8, 16, 2, 4, **settings).double(), (x, edges), class_of, classes(4, 16))


@model("torch_geometric")
def gcn() -> Built:
    return gnn("GCN", cached=False, normalize=True, add_self_loops=False)


@model("torch_geometric")
def graph_sage() -> Built:
    return gnn("GraphSAGE")


@model("torch_geometric")
def gin() -> Built:
    return gnn("GIN")


@model("torch_geometric")
def gat() -> Built:
    return gnn("GAT", heads=2, add_self_loops=False)


# -- torch -------------------------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    """Numbers through an MLP, categories through tables of embeddings, and the products of each two of them."""

    def __init__(self, tables: int = 3, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, width, mode="sum") for _ in range(tables))
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(nn.Linear(width + len(pairs[0]), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        columns = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (columns @ columns.mT).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


@model("torch")
def dlrm() -> Built:
    clicks = classes(2).double()
    return Built(DLRM().double(), (draw(ROWS, 8), tokens(ROWS, 3, 2)), F.binary_cross_entropy_with_logits, clicks)


class Recurrent(nn.Module):
    """An embedding, a recurrent network over the tokens, a head."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.cells = kind(16, 16, 2, batch_first=True, **settings)
        self.head = nn.Linear(32 if settings.get("bidirectional") else 16, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cells(self.table(words))[0])


def each_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@model("torch")
def lstm() -> Built:
    return Built(Recurrent(nn.LSTM).double(), (tokens(),), each_token, tokens(seed=1))


@model("torch")
def gru() -> Built:
    return Built(Recurrent(nn.GRU, bidirectional=True).double(), (tokens(),), each_token, tokens(seed=1))


@model("torch")
def transformer() -> Built:
    """torch's own, encoder and decoder."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, 16)
            self.body = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, words: Tensor, following: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(following.shape[1])
            return self.head(self.body(self.table(words), self.table(following), tgt_mask=mask, tgt_is_causal=True))

    return Built(Net().double(), (tokens(), tokens(seed=2)), each_token, tokens(seed=1))


@model("torch")
def unet() -> Built:
    """A U-Net of plain layers: strides down, transposed convolutions up, what was before joined again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
            self.down = nn.Sequential(nn.Conv2d(8, 16, 2, 2), nn.InstanceNorm2d(16, affine=True), nn.SiLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, 2)
            self.last = nn.Conv2d(16, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(torch.cat([x, self.up(self.down(x))], 1))

    return Built(Net().double(), (draw(ROWS, 1, 8, 8),), F.mse_loss, draw(ROWS, 1, 8, 8, seed=1))
