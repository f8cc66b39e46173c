"""Training runs of other libraries' loops, by the code of ``docs/integrations.md``, on one rank of several."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from optional_library import OptionalLibrary
from paths import DOCS
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw

transformers, accelerate, peft, lightning = map(OptionalLibrary, ("transformers", "accelerate", "peft", "lightning"))
our_accelerate = OptionalLibrary("shardwright.integrations.accelerate")
our_lightning = OptionalLibrary("shardwright.integrations.lightning")
hugging_face = OptionalLibrary("shardwright.integrations.hugging_face")

WORLD, STEPS = 2, 20
PAGE = (DOCS / "integrations.md").read_text()


def load() -> None:
    """Import the libraries, before ranks are forked; they print errors alone."""
    for library in (transformers, accelerate, peft, lightning, our_accelerate, our_lightning, hugging_face):
        library.load()
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


def monitored() -> list[str]:
    """The lines that monitors have printed so far; those of the last run of a page's code alone."""
    reported = sys.stdout.getvalue()
    sys.stdout.seek(0), sys.stdout.truncate()
    return [line for line in reported.splitlines() if line.startswith("step ")]


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
    model, trainer, lines = made["model"], made["trainer"], monitored()
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
        "lines": lines,
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
    task, lines = type(made["task"]), monitored()
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
        "lines": lines,
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


def pipeline_trainer(model: sw.AutoParallel, folder: str, rows: int = 20, **more: Any) -> Any:
    """Batches of 8 rows; of 20 rows, the last of each epoch is of 4."""
    return hugging_face.Trainer(
        model=model,
        train_dataset=Rows(rows),
        eval_dataset=Rows(rows),
        args=transformers.TrainingArguments(
            **settings(folder, 8, ddp_backend="gloo", gradient_accumulation_steps=2, **more)
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


class Layers(nn.Module):
    """Two layers that adapters find by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(8, 16, dtype=D), nn.Linear(16, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def adapted_late(net: Layers, loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The losses of two steps, and of two more with adapters that PEFT has put into the model in between."""
    losses = []
    for late in (False, True):
        if late:
            settings = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
            torch.manual_seed(5)
            peft.inject_adapter_in_model(settings, net)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
        for x, y in pairs(8, 2):
            value = loss(x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
    return losses


def peft_late() -> tuple[list[Tensor], dict[str, Tensor]]:
    net = Layers()
    sw.shard(net.up, ((1, 1), (2, 1)))
    sw.shard(net.down, ((1, 2), (1, 2)))
    model = sw.AutoParallel(net, F.mse_loss).dataset_strategy("full_batch")
    return adapted_late(net, model), weights(model)


class _Piped:
    """The package, whose models are pipelines."""

    def AutoParallel(self, net: nn.Module, loss_fn: Any) -> sw.AutoParallel:
        return stages(sw.AutoParallel(net, loss_fn), "0", "2")


def on_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one is forked from
    GradientState._reset_state()
    sw.init()
    reported = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(reported):
        warnings.simplefilter("ignore")
        out = {
            "trainer": the_trainer(rank, f"{folder}/whole"),
            "parts": the_trainer_by_parts(rank, f"{folder}/parts"),
            "accelerate": with_accelerate(rank),
            "lightning": with_lightning(rank, f"{folder}/lightning"),
            "peft": with_peft(rank, f"{folder}/peft"),
            "peft late": peft_late(),
            "averages": with_averages(rank),
        }
        AcceleratorState._reset_state(reset_partial_state=True)
        out["pipelines"] = pipelines(rank, f"{folder}/pipelines")
        AcceleratorState._reset_state(reset_partial_state=True)
        out["bf16"] = the_trainer_by_parts(rank, f"{folder}/bf16", bf16=True)
        without_files = {"bf16": True, "save_strategy": "no"}
        piped_bf16 = pipeline_trainer(piped_gpt2(), f"{folder}/pipelines/bf16", rows=16, **without_files)
        piped_bf16.train()
        piped_bf16.evaluate()
        out["bf16 pipeline"] = {
            "losses": logged(piped_bf16),
            "evaluated": logged(piped_bf16, "eval_loss"),
            "weights": weights(piped_bf16.model),
        }
    return out
