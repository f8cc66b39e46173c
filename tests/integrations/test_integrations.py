"""Other libraries' training loops on two processes, by the code of ``docs/integrations.md``: twenty steps as on one
device."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from integration_runs import (
    PAGE,
    STEPS,
    WORLD,
    Layers,
    Rows,
    accelerate,
    adapted_late,
    detached,
    gpt2,
    hugging_face,
    lightning,
    lightnings,
    load,
    logged,
    next_token,
    on_ranks,
    pairs,
    peft,
    perceptron,
    plain_layers,
    settings,
    token_batches,
    transformers,
)
from ranks import run_ranks
from small_networks import D
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import shardwright as sw

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("integrations"))


@pytest.fixture(scope="module")
def ours(folder: str) -> list[dict[str, Any]]:
    load()
    return run_ranks(on_ranks, WORLD, folder)


# -- and on one device -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_device():
    """Libraries' own state of a single process, for a while."""
    load()
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
    """Training in float32: the Trainer computes the loss in float32."""
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
            assert "integration_runs.py:" in result[what]


@pytest.mark.parametrize(("library", "rows"), [("trainer", 3.6), ("lightning", 16.0)])
def test_monitors_write_lines_of_rank_0(ours: list[dict[str, Any]], library: str, rows: float) -> None:
    """Trainer feeds whole batches of 4 rows, the last of each epoch of 2; Lightning halves of 8 rows, twice a step."""
    lines, silent = (rank[library]["lines"] for rank in ours)
    assert silent == [] and [line.split("  ")[0] for line in lines] == ["step 9", "step 19"]
    for line in lines:
        rates = {noun: float(number.replace(",", "")) for number, noun in re.findall(r"([\d,.]+) (\w+)/s", line)}
        assert rates["samples"] / rates["steps"] == pytest.approx(rows, rel=0.05)
        assert ("tokens" in rates) == (library == "trainer")
        assert " loss " in line and " computation  " in line and " exposed communication  " in line
        assert "peak of" not in line and " resident" in line  # on a CPU, without a named cluster


def test_a_schedule_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sw.save_checkpoint(net, optimizer, tmp_path / "shardwright", step=1)
    trainer = SimpleNamespace(model=net, optimizer=optimizer, lr_scheduler=None)
    for content in (b"", b"no archive", b"\x80\x04garbage"):
        (tmp_path / "scheduler.pt").write_bytes(content)
        with pytest.raises(
            sw.CheckpointError, match=r"scheduler.pt: the state of the schedule cannot be read: \w+Error"
        ):
            hugging_face.TrainerMixin._load_optimizer_and_scheduler(trainer, str(tmp_path))


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


def plain_task(net: nn.Module) -> Any:
    """The page's task, with the plain model."""

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = net, []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), 1e-2)

    return Plain()


def test_lightning_trains_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    with one_device():
        task = plain_task(perceptron())
        trainer = lightning.Trainer(devices=1, **lightnings(folder))
        trainer.fit(task, in_turns(8, STEPS))
        first, first_weights = task.losses, detached(task.model)
        task.losses = []
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        again = plain_task(perceptron())
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
    alone = plain_task(perceptron())
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


def test_adapters_that_are_added_after_the_first_call_train_as_on_one_device(ours: list[dict[str, Any]]) -> None:
    net = Layers()
    losses = adapted_late(net, lambda x, y: F.mse_loss(net(x), y))
    for mine, values in (rank["peft late"] for rank in ours):
        assert_close(mine, losses)
        assert_close(values, detached(net))


def test_pipelines_train_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    with one_device():
        one = transformers.Trainer(
            model=gpt2(2),
            train_dataset=Rows(20),
            eval_dataset=Rows(20),
            args=transformers.TrainingArguments(
                **settings(f"{folder}/one-pipeline", 8, save_strategy="no", gradient_accumulation_steps=2)
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
            message = result["errors"][library]
            assert (
                "hands each process its own part of a batch" in message
                and 'legal: dataset_strategy("full_batch")' in message
            )
        assert "ModelCheckpoint(save_weights_only=True)" in result["errors"]["ModelCheckpoint"]
        assert result["ran"] == [0, 0]


def test_settings_that_change_after_the_model_was_handed_over_are_refused(ours: list[dict[str, Any]]) -> None:
    for message in (rank["pipelines"]["late"] for rank in ours):
        for library in ("Trainer", "accelerate", "accelerate, then whole", "Lightning"):
            assert (
                "hands each process its own part of a batch, and a pipeline's stages work on the same one"
                in message[library]
            )
            assert 'legal: dataset_strategy("full_batch")' in message[library]
        assert "given dataset_strategy('full_batch') since" in message["accelerate, whole alone"]
        assert "legal: dataset_strategy before accelerate is given the model" in message["accelerate, whole alone"]


def test_a_pipeline_in_half_precision_trains_as_on_one_device(ours: list[dict[str, Any]], folder: str) -> None:
    """Losses of float32 lie as near; the weights, whose Adam tells gradients of other roundings apart, do not."""
    one = {
        half: one_trainer(
            f"{folder}/one_piped_bf16", 16, 8, layers=2, gradient_accumulation_steps=2, save_strategy="no", bf16=half
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
