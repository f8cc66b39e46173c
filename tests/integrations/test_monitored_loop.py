"""Callbacks that drive a monitor, in one process: what each line is made of, and the end where training raises. On two
processes `test_integrations` runs them, by the code of the page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integration_runs import (
    Rows,
    gpt2,
    hugging_face,
    lightning,
    lightnings,
    load,
    logged,
    our_lightning,
    settings,
    transformers,
)

import shardwright as sw

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


class Run:
    """A run of W&B, to which exact figures go."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def of(self, tag: str) -> list[Any]:
        return [line[tag] for line in self.logged]


class OfTensorBoard:
    """A user's writer, which a monitor brings to disk when it is closed."""

    flushed = 0

    def add_scalar(self, *given: Any) -> None: ...

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    load()
    from accelerate.state import AcceleratorState, GradientState

    def fresh() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    fresh()
    sw.init(devices=2)
    yield
    fresh()


def assert_figures(run: Run, rows: int) -> None:
    """Rows of 8 tokens."""
    for line in run.logged:
        steps = line["throughput/steps_per_s"]
        assert line["throughput/samples_per_s"] == pytest.approx(rows * steps)
        assert line["throughput/tokens_per_s"] == pytest.approx(8 * rows * steps)
        assert line["throughput/TFLOP_per_s"] > 0


# -- Trainer of transformers -------------------------------------------------------------------------------------------


def failing(step: int) -> Any:
    """A callback that raises at the end of a step."""

    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise KeyError("the disk is full")

    return Failing()


def trained(folder: str, kind: type, *callbacks: Any, **more: Any) -> Any:
    given = settings(folder, 4, max_steps=4, save_strategy="no", gradient_accumulation_steps=2) | more
    trainer = kind(
        model=sw.AutoParallel(gpt2()).dataset_strategy("full_batch") if kind is hugging_face.Trainer else gpt2(),
        train_dataset=Rows(32),
        eval_dataset=Rows(4),
        args=transformers.TrainingArguments(**given),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def test_the_trainers_callback_writes_lines_of_steps(tmp_path, monkeypatch) -> None:
    out, run, left_out = io.StringIO(), Run(), []
    leave_out = sw.Monitor.leave_out
    monkeypatch.setattr(sw.Monitor, "leave_out", lambda *given: left_out.append(leave_out(*given)))
    writer = OfTensorBoard()
    monitor = hugging_face.HuggingFaceMonitor(every=2, tensorboard=writer, wandb=run, out=out)
    more = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4}
    trainer = trained(f"{tmp_path}", hugging_face.Trainer, monitor, **more)
    losses = logged(trainer)
    assert run.of("step") == [1, 3]
    assert run.of("loss") == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-3)
    assert_figures(run, 8)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(" tokens/s  " in line and "resident" in line for line in lines)
    assert len(left_out) == len(logged(trainer, "eval_loss")) + 1 > 1, "evaluations and the checkpoint are no training"
    assert writer.flushed == 1


def test_the_trainers_monitor_is_closed_where_training_raises(tmp_path) -> None:
    writer, out = OfTensorBoard(), io.StringIO()
    monitor = hugging_face.HuggingFaceMonitor(every=1, tensorboard=writer, out=out)
    with pytest.raises(KeyError, match="disk"):
        trained(f"{tmp_path}", hugging_face.Trainer, monitor, failing(2))
    assert writer.flushed == 1 and len(out.getvalue().splitlines()) == 2


def test_the_trainer_of_transformers_itself_has_lines_of_rates(tmp_path) -> None:
    out = io.StringIO()
    trained(f"{tmp_path}", transformers.Trainer, hugging_face.HuggingFaceMonitor(every=2, out=out))
    assert len(out.getvalue().splitlines()) == 2 and "steps/s" in out.getvalue() and "loss" not in out.getvalue()


# -- Lightning ---------------------------------------------------------------------------------------------------------


def rows_task(fails_at: int = -1) -> Any:
    """A task that trains on rows of tokens."""

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = sw.AutoParallel(gpt2()).dataset_strategy("full_batch")
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == fails_at:
                raise KeyError("the disk is full")
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), 1e-2)

    return Task()


def fitted(folder: str, task: Any, *callbacks: Any, **more: Any) -> None:
    loader = torch.utils.data.DataLoader(Rows(32), 4)
    given = lightnings(folder) | {"max_steps": 4, "val_check_interval": 3, "check_val_every_n_epoch": None} | more
    lightning.Trainer(devices=1, callbacks=list(callbacks), **given).fit(task, loader, loader)


def test_lightnings_callback_writes_lines_of_steps(tmp_path, monkeypatch) -> None:
    out, run, left_out = io.StringIO(), Run(), []
    leave_out = sw.Monitor.leave_out
    monkeypatch.setattr(sw.Monitor, "leave_out", lambda *given: left_out.append(leave_out(*given)))
    writer, task = OfTensorBoard(), rows_task()
    monitor = our_lightning.LightningMonitor(every=2, tensorboard=writer, wandb=run, out=out)
    fitted(f"{tmp_path}", task, monitor)
    assert len(task.losses) == 8 and run.of("step") == [1, 3]
    assert run.of("loss") == pytest.approx([sum(task.losses[:4]) / 4, sum(task.losses[4:]) / 4])
    assert_figures(run, 8)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(" tokens/s  " in line and "resident" in line for line in lines)
    assert left_out and writer.flushed == 1


def test_lightnings_monitor_is_closed_where_training_raises(tmp_path) -> None:
    writer, out = OfTensorBoard(), io.StringIO()
    monitor = our_lightning.LightningMonitor(every=1, tensorboard=writer, out=out)
    with pytest.raises(KeyError, match="disk"):
        fitted(f"{tmp_path}", rows_task(fails_at=5), monitor)
    assert writer.flushed == 1 and len(out.getvalue().splitlines()) == 2


def test_lightnings_strategy_in_a_notebook_is_one_process(tmp_path, monkeypatch) -> None:
    """Lightning knows a notebook by the prompts of `sys`, once, when it is imported."""
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    task = rows_task()
    fitted(f"{tmp_path}", task, strategy=our_lightning.ShardwrightStrategy())
    assert len(task.losses) == 8
    with pytest.raises(Exception, match="not compatible with an interactive environment"):
        lightning.Trainer(strategy=our_lightning.ShardwrightStrategy(), **lightnings(f"{tmp_path}") | {"devices": 2})
