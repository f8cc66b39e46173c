"""Other libraries' training loops on two processes, by the code of ``docs/integrations.md``: twenty steps as on one
device."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import D, draw, labels
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import shardwright as sw

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
lightning = pytest.importorskip("lightning")

from shardwright.integrations import accelerate as our_accelerate, hugging_face, lightning as our_lightning

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]
WORLD, STEPS = 2, 20
PAGE = (Path(__file__).parent.parent / "docs" / "integrations.md").read_text()

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def code(title: str) -> str:
    """The code of a section of the page."""
    return re.search(rf"## {title}\n.*?```python\n(.*?)```", PAGE, re.S)[1]


# -- models and data ---------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, and a column that no model takes."""

    def __init__(self, count: int) -> None:
        self.tokens = labels(count * 8, 64, seed=2).view(count, 8)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index], "title": 3}


def gpt2(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            bos_token_id=1,
            eos_token_id=2,
            n_positions=16,
            n_embd=16,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def cut(net: nn.Module) -> nn.Module:
    for block in net.transformer.h:
        sw.shard(block.mlp.c_fc, ((1, 1), (1, 2)))
        sw.shard(block.mlp.c_proj, ((1, 2), (2, 1)))
    return net


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, dtype=D), nn.BatchNorm1d(16, dtype=D), nn.ReLU(), nn.Linear(16, 4, dtype=D))


def cut_perceptron() -> nn.Module:
    net = perceptron()
    sw.shard(net[0], ((1, 1), (2, 1)))
    sw.shard(net[3], ((1, 2), (1, 2)))
    return net


def pairs(batch: int, steps: int) -> torch.utils.data.DataLoader:
    """Batches in order; the last one is whole."""
    rows = torch.utils.data.TensorDataset(draw(batch * steps, 8), draw(batch * steps, 4, seed=1))
    return torch.utils.data.DataLoader(rows, batch)


def by_halves(batch: int, steps: int, rank: int) -> torch.utils.data.DataLoader:
    """Each rank's half of each of them, by a sampler that Lightning leaves as it is."""
    rows = pairs(batch, steps).dataset
    sampler = torch.utils.data.DistributedSampler(rows, WORLD, rank, shuffle=False)
    return torch.utils.data.DataLoader(rows, batch // WORLD, sampler=sampler)


def settings(folder: str, rows: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 1,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "adam_epsilon": 1e-3,
        **more,
    }  # a gradient that is mere rounding makes no steps


def lightnings(folder: str) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "max_steps": STEPS,
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 2,
    }


def next_token(output: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def token_batches() -> list[Tensor]:
    return list(labels(STEPS * 4 * 8, 64, seed=5).view(STEPS, 4, 8))


def logged(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def detached(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def weights(model: sw.AutoParallel) -> dict[str, Tensor]:
    with model.whole() as net:
        return detached(net)


def run(title: str, **given: Any) -> dict[str, Any]:
    """The page's code, and what it has made."""
    names = {"sw": sw, "torch": torch, "nn": nn, "copy": copy, "losses": [], **given}
    exec(compile(code(title), f"docs/integrations.md, {title}", "exec"), names)
    return names


def error_of(body: Callable[[], Any]) -> str:
    try:
        body()
    except sw.ShardwrightError as error:
        return str(error)
    return "no error"


# -- on two processes --------------------------------------------------------------------------------------------------


def the_trainer(rank: int, folder: str, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Batches of 4 rows of 18: the last of each epoch is of 2."""
    made = run(
        "Trainer of transformers",
        net=cut(gpt2()),
        data=Rows(18),
        folder=f"{folder}/saved",
        settings=settings(f"{folder}/run", 4, ddp_backend="gloo", gradient_accumulation_steps=accumulation, **more),
    )
    model, trainer = made["model"], made["trainer"]
    again = hugging_face.Trainer(
        model=sw.AutoParallel(gpt2()).dataset_strategy("full_batch"),
        train_dataset=Rows(18),
        args=transformers.TrainingArguments(
            **settings(f"{folder}/run", 4, ddp_backend="gloo", gradient_accumulation_steps=accumulation, **more)
        ),
    )
    again.train(resume_from_checkpoint=f"{folder}/run/checkpoint-{STEPS // 2}")
    prompt = torch.tensor([[1, 5, 9]])
    net = made["net"]
    return {
        "losses": logged(trainer),
        "evaluated": logged(trainer, "eval_loss"),
        "weights": weights(model),
        "resumed": logged(again),
        "resumed weights": weights(again.model),
        "columns": trainer._signature_columns,
        "cut": net.transformer.h[0].mlp.c_fc.weight.to_local().shape,
        "generated": model.generate(prompt, max_new_tokens=6, do_sample=False),
        "net.generate": error_of(lambda: net.generate(prompt, max_new_tokens=2)),
        "model.transformer": error_of(lambda: model.transformer(prompt)),
        "files": sorted(p.name for p in Path(f"{folder}/run/checkpoint-{STEPS // 2}").iterdir()),
    }


def the_trainer_by_parts(rank: int, folder: str, **more: Any) -> dict[str, Any]:
    """Two rows for each process of 40; tokens counted over both."""
    model = sw.AutoParallel(cut(gpt2()))
    trainer = hugging_face.Trainer(
        model=model,
        train_dataset=Rows(40),
        args=transformers.TrainingArguments(
            **settings(
                f"{folder}/run", 2, ddp_backend="gloo", gradient_accumulation_steps=2, save_only_model=True, **more
            )
        ),
    )
    trainer.train()
    resumed = hugging_face.Trainer(model=sw.AutoParallel(gpt2()), train_dataset=Rows(40), args=trainer.args)
    resumed._load_from_checkpoint(f"{folder}/run/checkpoint-{STEPS}")
    return {"losses": logged(trainer), "weights": weights(model), "loaded": weights(resumed.model)}


def with_accelerate(rank: int) -> dict[str, Any]:
    made = run("accelerate", net=cut_perceptron(), loader=pairs(4, 2 * STEPS))
    accelerator = made["accelerator"]
    whole = our_accelerate.Accelerator()
    model = sw.AutoParallel(perceptron(), nn.MSELoss()).dataset_strategy("full_batch")
    model, loader = whole.prepare(model, torch.utils.data.DataLoader(pairs(4, 2).dataset, 3))
    return {
        "losses": made["losses"],
        "weights": weights(made["model"]),
        "rows": [len(x) for x, _ in loader],
        "save_state": error_of(lambda: accelerator.save_state("/nowhere")),
        "state": accelerator.get_state_dict(made["model"]),
        "wrapped": error_of(lambda: accelerate.Accelerator().prepare(sw.AutoParallel(perceptron()))),
        "loader first": error_of(lambda: our_accelerate_late()),
    }


def our_accelerate_late() -> None:
    accelerator = our_accelerate.Accelerator()
    accelerator._dataloaders.clear()
    accelerator.prepare(pairs(4, 2))
    accelerator.prepare(sw.AutoParallel(perceptron()).dataset_strategy("full_batch"))


def with_lightning(rank: int, folder: str) -> dict[str, Any]:
    made = run(
        "Lightning", net=cut_perceptron(), loader=by_halves(8, STEPS, rank), folder=folder, settings=lightnings(folder)
    )
    task = type(made["task"])
    made |= {"net": perceptron()}
    later = made["Task"].__init__.__globals__
    first, later["net"], later["losses"] = made["losses"], perceptron(), []
    again = task()
    trainer = lightning.Trainer(
        strategy=our_lightning.ShardwrightStrategy(), devices=2, **lightnings(folder) | {"max_steps": 2 * STEPS}
    )
    trainer.fit(again, by_halves(8, STEPS, rank), ckpt_path=f"{folder}/last.ckpt")

    class Outside(task):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

    class Whole(task):
        def __init__(self) -> None:
            super().__init__()
            self.model.dataset_strategy("full_batch")

    later["net"] = perceptron()

    def fit(made: Any, strategy: Any = None) -> str:
        return error_of(
            lambda: lightning.Trainer(
                strategy=strategy or our_lightning.ShardwrightStrategy(), devices=2, **lightnings(folder)
            ).fit(made, pairs(4, 2))
        )

    return {
        "losses": first,
        "weights": weights(made["task"].model),
        "again": later["losses"],
        "again weights": weights(again.model),
        "outside": fit(Outside()),
        "whole": fit(Whole()),
        "ddp": fit(task(), "ddp"),
    }


def with_peft(rank: int, folder: str) -> dict[str, Any]:
    net = cut(gpt2().double())
    made = run("PEFT", net=net, loss_fn=next_token, batches=token_batches(), folder=folder)
    trained = [n for n, p in made["model"].named_parameters() if p.requires_grad]
    state = [made["optimizer"].state[p] for p in made["model"].parameters() if p in made["optimizer"].state]

    def in_place() -> None:
        with made["model"].whole() as whole:
            whole.merge_and_unload()

    return {
        "losses": made["losses"],
        "weights": weights(made["model"]),
        "trained": trained,
        "states": len(state),
        "in place": error_of(in_place),
    }


def with_averages(rank: int) -> dict[str, Any]:
    made = run("Averages of weights", net=cut_perceptron(), loader=pairs(8, STEPS))
    return {"weights": weights(made["model"]), "averages": weights(made["average"].module), "outputs": made["outputs"]}


def stages(model: sw.AutoParallel, *paths: str, feed: str = "full_batch") -> sw.AutoParallel:
    """A pipeline of two stages, of which each begins with one of these modules."""
    return model.dataset_strategy(feed).pipeline(stages=2, micro_batches=2, stage_config=dict(zip(paths, range(2))))


def plain_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, dtype=D), nn.Tanh(), nn.Linear(16, 4, dtype=D))


def piped(feed: str = "full_batch") -> sw.AutoParallel:
    return stages(sw.AutoParallel(plain_layers(), nn.MSELoss()), "0", "2", feed=feed)


def piped_gpt2(feed: str = "full_batch") -> sw.AutoParallel:
    return stages(sw.AutoParallel(gpt2(2)), "transformer.h.0", "transformer.h.1", feed=feed)


def pipeline_trainer(model: sw.AutoParallel, folder: str, **more: Any) -> Any:
    return hugging_face.Trainer(
        model=model,
        train_dataset=Rows(18),
        eval_dataset=Rows(18),
        args=transformers.TrainingArguments(
            **settings(folder, 4, ddp_backend="gloo", gradient_accumulation_steps=2, **more)
        ),
    )


def late_pipelines(folder: str, fitted: Callable[..., Any], task: type) -> dict[str, str]:
    """Settings that change after the libraries have been given the model, of each process's own part of a batch."""

    def trained() -> None:
        model = sw.AutoParallel(gpt2(2))
        trainer = pipeline_trainer(model, f"{folder}/run")
        stages(model, "transformer.h.0", "transformer.h.1", feed="data_parallel")
        trainer.train()

    def accelerated(feed: str, cut: bool = True) -> None:
        plain = sw.AutoParallel(plain_layers(), nn.MSELoss())
        model, loader = our_accelerate.Accelerator().prepare(plain, pairs(4, 2))
        stages(model, "0", "2", feed=feed) if cut else model.dataset_strategy(feed)
        for batch in loader:
            model(*batch)

    class Late(task):
        def __init__(self) -> None:
            super().__init__()
            self.model = sw.AutoParallel(plain_layers(), nn.MSELoss())

        def on_fit_start(self) -> None:
            stages(self.model, "0", "2", feed="data_parallel")

    return {
        "Trainer": error_of(trained),
        "accelerate": error_of(lambda: accelerated("data_parallel")),
        "accelerate, then whole": error_of(lambda: accelerated("full_batch")),
        "accelerate, whole alone": error_of(lambda: accelerated("full_batch", False)),
        "Lightning": error_of(lambda: fitted(Late())),
    }


def pipelines(rank: int, folder: str) -> dict[str, Any]:
    """Two stages, in each of the loops."""
    out: dict[str, Any] = {}
    trainer = pipeline_trainer(piped_gpt2(), f"{folder}/run")
    trainer.train()
    trainer.evaluate()
    again = pipeline_trainer(piped_gpt2(), f"{folder}/run")
    again.train(resume_from_checkpoint=f"{folder}/run/checkpoint-{STEPS // 2}")
    trainer.save_model(f"{folder}/saved")
    out["trainer"] = {
        "losses": logged(trainer),
        "evaluated": logged(trainer, "eval_loss"),
        "weights": weights(trainer.model),
        "resumed": weights(again.model),
    }
    out["accelerate"] = run("accelerate", sw=_Piped(), net=plain_layers(), loader=pairs(8, 2 * STEPS))

    class Task(lightning.LightningModule):
        def __init__(self, feed: str = "full_batch") -> None:
            super().__init__()
            self.model, self.losses = piped(feed), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.model(*batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.model(*batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), 1e-2)

    def fitted(task: Task, **more: Any) -> Any:
        trainer = lightning.Trainer(
            strategy=our_lightning.ShardwrightStrategy(),
            devices=2,
            use_distributed_sampler=False,
            **lightnings(folder) | more,
        )
        trainer.fit(task, pairs(8, 2 * STEPS), pairs(8, 2))
        return trainer

    task = Task()
    trainer = fitted(task)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    out["lightning"] = {"losses": task.losses, "weights": weights(task.model)}
    out["accelerate"] = {"losses": out["accelerate"]["losses"], "weights": weights(out["accelerate"]["model"])}
    parts = Task("data_parallel")
    kept = Task()
    out["errors"] = {
        "Trainer": error_of(lambda: pipeline_trainer(piped_gpt2("data_parallel"), f"{folder}/run")),
        "accelerate": error_of(lambda: our_accelerate.Accelerator().prepare(piped("data_parallel"))),
        "Lightning": error_of(lambda: fitted(parts)),
        "ModelCheckpoint": error_of(lambda: fitted(kept, enable_checkpointing=True)),
    }
    out["late"] = late_pipelines(folder, fitted, Task)
    out["ran"] = [len(parts.losses), len(kept.losses)]
    return out


class _Piped:
    """The package, whose models are pipelines."""

    def AutoParallel(self, net: nn.Module, loss_fn: Any) -> sw.AutoParallel:
        return stages(sw.AutoParallel(net, loss_fn), "0", "2")


def on_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one is forked from
    GradientState._reset_state()
    sw.init()
    told = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(told):
        warnings.simplefilter("ignore")
        out = {
            "trainer": the_trainer(rank, f"{folder}/whole"),
            "parts": the_trainer_by_parts(rank, f"{folder}/parts"),
            "accelerate": with_accelerate(rank),
            "lightning": with_lightning(rank, f"{folder}/lightning"),
            "peft": with_peft(rank, f"{folder}/peft"),
            "averages": with_averages(rank),
        }
        AcceleratorState._reset_state(reset_partial_state=True)
        out["pipelines"] = pipelines(rank, f"{folder}/pipelines")
        AcceleratorState._reset_state(reset_partial_state=True)
        out["bf16"] = the_trainer_by_parts(rank, f"{folder}/bf16", bf16=True)
        piped_bf16 = pipeline_trainer(piped_gpt2(), f"{folder}/pipelines/bf16", bf16=True, save_strategy="no")
        piped_bf16.train()
        piped_bf16.evaluate()
        out["bf16 pipeline"] = {
            "losses": logged(piped_bf16),
            "evaluated": logged(piped_bf16, "eval_loss"),
            "weights": weights(piped_bf16.model),
        }
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("integrations"))


@pytest.fixture(scope="module")
def ours(folder: str) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, WORLD, folder)


# -- and on one device -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_device():
    """Libraries' own state of a single process, for a while."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def assert_close(got: Any, expected: Any, double: bool = True, rounding: float = 1e-11) -> None:
    """Equal but for the order of sums; where Adam makes steps of a gradient that is rounding alone, but for
    `rounding`."""
    tolerance = {"rtol": 1e-9, "atol": rounding} if double else {"rtol": 2e-4, "atol": 2e-5}
    if isinstance(got, dict):
        assert got.keys() == expected.keys()
        for name in got:
            torch.testing.assert_close(got[name], expected[name], **tolerance, msg=lambda text: f"{name}: {text}")
    else:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), **tolerance)


def one_trainer(folder: str, rows: int, batch: int, layers: int = 1, **more: Any) -> Any:
    with one_device():
        trainer = transformers.Trainer(
            model=gpt2(layers),
            train_dataset=Rows(rows),
            eval_dataset=Rows(rows),
            args=transformers.TrainingArguments(**settings(folder, batch, **more)),
        )
        trainer.train()
        trainer.evaluate()
    return trainer


def test_the_trainer_trains_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    """In float32: their loss is computed in it."""
    one = one_trainer(f"{folder}/one", 18, 4, save_strategy="no")
    for result in (rank["trainer"] for rank in ours):
        assert len(result["losses"]) == STEPS and abs(result["losses"][0] - result["losses"][-1]) > 0.1
        assert_close(result["losses"], logged(one), double=False)
        assert_close(result["weights"], detached(one.model), double=False)
        assert_close(result["evaluated"], logged(one, "eval_loss"), double=False)
        assert result["cut"] == (16, 32)
        assert {"input_ids", "attention_mask", "labels"} <= set(result["columns"]) and "title" not in result["columns"]


def test_the_trainers_checkpoints_load_again(ours: list[dict[str, Any]], folder: str) -> None:
    for result in (rank["trainer"] for rank in ours):
        assert_close(result["resumed"], result["losses"], double=False)
        assert_close(result["resumed weights"], result["weights"], double=False)
        assert {"model.safetensors", "config.json", "shardwright", "scheduler.pt", "trainer_state.json"} <= set(
            result["files"]
        )
    read = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/whole/saved")
    assert_close(detached(read), ours[0]["trainer"]["weights"])
    last = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/whole/run/checkpoint-{STEPS}")
    assert_close(detached(last), ours[0]["trainer"]["resumed weights"])
    tokens = Rows(4).tokens
    plain = gpt2()
    plain.load_state_dict(ours[0]["trainer"]["weights"])
    assert read(tokens, labels=tokens).loss == plain(tokens, labels=tokens).loss
    prompt = torch.tensor([[1, 5, 9]])
    for result in (rank["trainer"] for rank in ours):
        assert torch.equal(result["generated"], plain.generate(prompt, max_new_tokens=6, do_sample=False))
        for what in ("net.generate", "model.transformer"):
            assert "is called by itself" in result[what] and "with model.whole()" in result[what]
            assert "test_integrations.py:" in result[what]


def test_the_trainer_feeds_parts_of_batches(ours: list[dict[str, Any]], folder: str) -> None:
    one = one_trainer(f"{folder}/one_by_parts", 40, 4, gradient_accumulation_steps=2, save_strategy="no")
    for result in (rank["parts"] for rank in ours):
        assert_close(result["losses"], logged(one), double=False)
        assert_close(result["weights"], detached(one.model), double=False)
        assert_close(result["loaded"], result["weights"])


def test_the_trainer_in_half_precision(ours: list[dict[str, Any]], folder: str) -> None:
    one = one_trainer(f"{folder}/one_bf16", 40, 4, gradient_accumulation_steps=2, save_strategy="no", bf16=True)
    for result in (rank["bf16"] for rank in ours):
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(logged(one)), rtol=1e-2, atol=1e-2)


def test_accelerate_trains_as_on_one_device(ours: list[dict[str, Any]]) -> None:
    """Processes take turns at batches of four: a batch of one device is two of them."""
    with one_device():
        made = one_accelerated()
    for rank, result in enumerate(rank["accelerate"] for rank in ours):
        assert len(result["losses"]) == STEPS
        assert_close(result["losses"], made["losses"])
        assert_close(result["weights"], made["weights"], rounding=1e-8)
        assert result["rows"] == [3, 3, 2]
        assert "sw.save_checkpoint" in result["save_state"] and "shardwright.integrations" in result["wrapped"]
        assert "prepare(model, optimizer, loader)" in result["loader first"]
        assert (result["state"] is None) == (rank != 0)
    assert_close(ours[0]["accelerate"]["state"], made["weights"], rounding=1e-8)


def one_accelerated() -> dict[str, Any]:
    net, accelerator, losses = perceptron(), accelerate.Accelerator(gradient_accumulation_steps=2), []
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), pairs(8, STEPS))
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.mse_loss(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "weights": detached(net)}


class Plain(lightning.LightningModule):
    """The page's, with the plain model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = net, []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 1e-2)


def test_lightning_trains_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    with one_device():
        task = Plain(perceptron())
        trainer = lightning.Trainer(devices=1, **lightnings(folder))
        trainer.fit(task, in_turns(8, STEPS))
        first, first_weights = task.losses, detached(task.model)
        task.losses = []
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        again = Plain(perceptron())
        lightning.Trainer(devices=1, **lightnings(folder) | {"max_steps": 2 * STEPS}).fit(
            again, in_turns(8, STEPS), ckpt_path=f"{folder}/one.ckpt"
        )
    for result in (rank["lightning"] for rank in ours):
        assert len(result["losses"]) == 2 * STEPS and len(result["again"]) >= STEPS
        assert_close(result["losses"], first)
        assert_close(result["weights"], first_weights, rounding=1e-8)
        assert_close(result["again"], again.losses)
        assert_close(result["again weights"], detached(again.model), rounding=1e-8)
        assert "'head.weight' is trained and lies outside" in result["outside"]
        assert "use_distributed_sampler=False" in result["whole"]
        assert "DistributedDataParallel around a parallel model" in result["ddp"]
    saved = torch.load(f"{folder}/lightning/last.ckpt", weights_only=False)
    alone = Plain(perceptron())
    alone.load_state_dict(saved["state_dict"])  # whole tensors, which plain torch reads
    assert_close(detached(alone.model), first_weights, rounding=1e-8)
    torch.optim.AdamW(alone.model.parameters()).load_state_dict(saved["optimizer_states"][0])


def in_turns(batch: int, steps: int) -> torch.utils.data.DataLoader:
    """Batches of which the rows are those of both ranks' halves, in the order of the ranks."""
    rows = pairs(batch, steps).dataset
    order = torch.arange(batch * steps).view(steps, batch // WORLD, WORLD).transpose(1, 2).reshape(-1)
    return torch.utils.data.DataLoader(torch.utils.data.Subset(rows, order.tolist()), batch)


def test_adapters_train_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    losses: list[float] = []
    torch.manual_seed(0)
    net = gpt2().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(
            net, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    for tokens in token_batches():
        loss = next_token(adapted(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for result in (rank["peft"] for rank in ours):
        assert_close(result["losses"], losses)
        assert_close(result["weights"], detached(adapted))
        assert result["trained"] and all("lora" in name for name in result["trained"])
        assert result["states"] == len(result["trained"])
        assert "copy.deepcopy(net).merge_and_unload()" in result["in place"]
    adapter = sorted(p.name for p in Path(f"{folder}/peft/adapter").iterdir())
    assert "adapter_model.safetensors" in adapter and "model.safetensors" not in adapter
    tokens = token_batches()[0]
    expected = next_token(adapted(tokens), tokens)
    read = peft.PeftModel.from_pretrained(gpt2().double(), f"{folder}/peft/adapter")
    torch.testing.assert_close(next_token(read(tokens), tokens), expected, rtol=1e-9, atol=0.0)
    merged = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/peft/merged", dtype=D)
    torch.testing.assert_close(next_token(merged(tokens), tokens), expected, rtol=1e-6, atol=0.0)


def test_pipelines_train_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    with one_device():
        one = transformers.Trainer(
            model=gpt2(2),
            train_dataset=Rows(18),
            eval_dataset=Rows(18),
            args=transformers.TrainingArguments(
                **settings(f"{folder}/one-pipeline", 4, save_strategy="no", gradient_accumulation_steps=2)
            ),
        )
        one.train()
        one.evaluate()
    expected = {}
    for library, limit in (("accelerate", 1.0), ("lightning", 0.5)):
        net, losses = plain_layers(), []
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step, (x, y) in enumerate(pairs(8, 2 * STEPS)):
            loss = F.mse_loss(net(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
            if step % 2:
                nn.utils.clip_grad_norm_(net.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
        expected[library] = {"losses": losses, "weights": detached(net)}
    for result in (rank["pipelines"] for rank in ours):
        assert len(result["trainer"]["losses"]) == STEPS
        assert_close(result["trainer"]["losses"], logged(one), double=False)
        assert_close(result["trainer"]["evaluated"], logged(one, "eval_loss"), double=False)
        assert_close(result["trainer"]["weights"], detached(one.model), double=False)
        assert_close(result["trainer"]["resumed"], detached(one.model), double=False)
        for library in ("accelerate", "lightning"):
            assert_close(result[library]["losses"], expected[library]["losses"])
            assert_close(result[library]["weights"], expected[library]["weights"])
    read = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/pipelines/saved")
    assert_close(detached(read), detached(one.model), double=False)
    held = torch.load(f"{folder}/pipelines/weights.ckpt", weights_only=False)["state_dict"]
    assert_close({name.removeprefix("model."): value for name, value in held.items()}, expected["lightning"]["weights"])


def test_pipelines_are_refused_before_anything_runs(ours: list[dict[str, Any]]) -> None:
    for result in (rank["pipelines"] for rank in ours):
        for library in ("Trainer", "accelerate", "Lightning"):
            said = result["errors"][library]
            assert (
                "hands each process its own part of a batch" in said and 'legal: dataset_strategy("full_batch")' in said
            )
        assert "ModelCheckpoint(save_weights_only=True)" in result["errors"]["ModelCheckpoint"]
        assert result["ran"] == [0, 0]


def test_settings_that_change_after_the_model_was_handed_over_are_refused(ours: list[dict[str, Any]]) -> None:
    for said in (rank["pipelines"]["late"] for rank in ours):
        for library in ("Trainer", "accelerate", "accelerate, then whole", "Lightning"):
            assert (
                "hands each process its own part of a batch, and a pipeline's stages work on the same one"
                in said[library]
            )
            assert 'legal: dataset_strategy("full_batch")' in said[library]
        assert "given dataset_strategy('full_batch') since" in said["accelerate, whole alone"]
        assert "legal: dataset_strategy before accelerate is given the model" in said["accelerate, whole alone"]


def test_a_pipeline_in_half_precision_trains_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    """Losses of float32 lie as near; the weights, whose Adam tells gradients of other roundings apart, do not."""
    one = {
        half: one_trainer(
            f"{folder}/one_piped_bf16", 18, 4, layers=2, gradient_accumulation_steps=2, save_strategy="no", bf16=half
        )
        for half in (True, False)
    }

    def apart(result: dict[str, Any], half: bool) -> float:
        return max(
            float((value - result["weights"][name]).abs().max()) for name, value in detached(one[half].model).items()
        )

    for result in (rank["bf16 pipeline"] for rank in ours):
        assert len(result["losses"]) == STEPS
        for key, name in (("losses", "loss"), ("evaluated", "eval_loss")):
            torch.testing.assert_close(
                torch.tensor(result[key]), torch.tensor(logged(one[True], name)), rtol=1e-3, atol=1e-3
            )
        assert apart(result, True) < 2e-3 < apart(result, False)


def test_averages_are_those_of_one_device(ours: list[dict[str, Any]]) -> None:
    net = perceptron()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in pairs(8, STEPS):
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    update_bn((x for x, _ in pairs(8, STEPS)), average.module)
    for result in (rank["averages"] for rank in ours):
        assert_close(result["weights"], detached(net))
        assert_close(result["averages"], detached(average.module))
        torch.testing.assert_close(result["outputs"], average.module.eval()(x), rtol=1e-9, atol=1e-11)


def test_the_page_is_what_the_tests_run() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    titles = [section.splitlines()[0] for section in sections if "```python" in section]
    assert titles == ["Trainer of transformers", "accelerate", "Lightning", "PEFT", "Averages of weights"]
