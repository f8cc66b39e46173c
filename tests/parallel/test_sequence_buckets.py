"""Sequences padded to buckets: the same losses and gradients as the plain call, with fewer programs."""

import pytest
import torch
from optional_library import OptionalLibrary
from ranks import run_ranks
from small_networks import draw, labels
from torch import nn
from torch.nn import functional as F

import shardwright as sw

transformers = OptionalLibrary("transformers")

LENGTHS = (5, 8, 3, 12, 16, 7)


@pytest.fixture(autouse=True)
def four_devices():
    sw.init(devices=4)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).double()


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        max_position_embeddings=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).double()


@pytest.mark.parametrize("build", [gpt2, bert])
def test_a_model_of_transformers_is_as_without_padding(build):
    plain, net = build(), build()
    model = sw.AutoParallel(net, parallel_mode="semi_auto")
    model.dataset_strategy("full_batch").buckets(seq=[8, 16])
    for length in LENGTHS:
        tokens = labels(4 * length, 32, seed=length).view(4, length)
        wanted = plain(input_ids=tokens, labels=tokens)
        found = model(input_ids=tokens, labels=tokens)
        assert found.logits.shape == wanted.logits.shape
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=0, atol=1e-6)  # transformers takes it in float32
        for each in (plain, model):
            each.zero_grad()
        wanted.loss.backward()
        found.loss.backward()
        for (name, a), b in zip(plain.named_parameters(), net.parameters()):
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-6, msg=name)
    assert len(model._programs) == 2


class Causal(nn.Module):
    """A causal model without a mask: a running mean."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(draw(8, 8, seed=1))

    def forward(self, tokens):
        x = F.embedding(tokens, self.table).cumsum(1)
        return (x @ self.table).transpose(1, 2)


def test_a_causal_model_with_its_loss_apart():
    plain, net = Causal(), Causal()
    loss_fn = nn.CrossEntropyLoss()
    model = sw.AutoParallel(net, loss_fn=loss_fn)
    model.dataset_strategy("full_batch").buckets(seq=[8, 16], mask=None, fill={"tokens": 0})
    for length in LENGTHS:
        tokens = labels(4 * length, 8, seed=length).view(4, length)
        plain.zero_grad(), model.zero_grad()
        wanted, found = loss_fn(plain(tokens), tokens), model(tokens, tokens)
        wanted.backward(), found.backward()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(net.table.grad, plain.table.grad, rtol=0, atol=1e-12)


def test_what_cannot_be_padded_is_said():
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with pytest.raises(sw.SettingError, match="takes no 'attention_mask'"):
        sw.AutoParallel(Causal()).buckets(seq=[8])(tokens)
    with pytest.raises(sw.SettingError, match="how is the input 'tokens'"):
        sw.AutoParallel(Causal()).buckets(seq=[8], mask=None)(tokens)
    with pytest.raises(sw.SettingError, match="how is the input 'target'"):
        sw.AutoParallel(Causal(), loss_fn=nn.MSELoss()).buckets(seq=[8], mask=None, fill={"tokens": 0})(tokens, tokens)
    with pytest.raises(sw.SettingError, match="longer than the longest bucket, 4"):
        sw.AutoParallel(Causal()).buckets(seq=[2, 4], mask=None, fill={"tokens": 0})(tokens)
    with pytest.raises(sw.SettingError, match="no input has a dim 3"):
        sw.AutoParallel(Causal()).buckets(seq=[8], dim=3)(tokens)
    for seq in ([], [8, 4], [8, 8], [0], [1.5], [True]):
        with pytest.raises(sw.SettingError, match="ascending lengths"):
            sw.AutoParallel(Causal()).buckets(seq=seq)
    model = sw.AutoParallel(Causal()).buckets(seq=[8], mask=None, fill={"tokens": 0})
    model.dataset_strategy("full_batch")(tokens)
    with pytest.raises(sw.SettingError, match="too late"):
        model.buckets(seq=[8])


def _own_lengths(rank, world):
    sw.init()
    net = Causal()
    model = sw.AutoParallel(net, loss_fn=nn.CrossEntropyLoss())
    model.buckets(seq=[4, 8, 16], mask=None, fill={"tokens": 0})
    losses = []
    for lengths in ((3, 7), (16, 2), (4, 4)):
        tokens = labels(2 * lengths[rank], 8, seed=rank).view(2, lengths[rank])
        losses.append(float(model(tokens, tokens)))
    return losses, len(model._programs)


def test_processes_take_the_longest_bucket_that_one_needs():
    net, loss_fn, wanted = Causal(), nn.CrossEntropyLoss(reduction="sum"), []
    for lengths in ((3, 7), (16, 2), (4, 4)):
        parts = [labels(2 * n, 8, seed=rank).view(2, n) for rank, n in enumerate(lengths)]
        wanted.append(sum(float(loss_fn(net(x), x)) for x in parts) / sum(x.numel() for x in parts))
    for losses, programs in run_ranks(_own_lengths, 2):
        assert losses == pytest.approx(wanted, abs=1e-12)
        assert programs == 3
