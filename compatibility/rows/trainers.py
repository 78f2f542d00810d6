"""Whole trainers, which must end with the parameters of a loop written by hand.

Two processes get the environment variables that torchrun sets.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from compatibility import networks
from compatibility.networks import BATCH, Model
from compatibility.verdict import Rows, Scene

ROWS = Rows("Trainers")
EPOCHS, RATE = 3, 0.1


class Samples(Dataset[Any]):
    """One batch. Each epoch is one step of all processes, so the order does not matter."""

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, targets = networks.batch_on_host()
        return {"tokens": tokens[index], "targets": targets[index]}


class WithLoss(nn.Module):
    """The model with its loss, as trainers expect it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.model(tokens), targets)}


def by_hand(scene: Scene) -> Any:
    model = Model("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        networks.loss(model).backward()
        optimizer.step()
    return networks.parameters(model)


def hugging_face(processes: int, scene: Scene) -> Any:
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    model = Model(scene.contestant)
    arguments = TrainingArguments(
        output_dir=str(scene.folder / "run"),
        per_device_train_batch_size=BATCH // processes,
        num_train_epochs=EPOCHS,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=networks.DEVICE == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_backend="gloo" if processes > 1 else None,
    )
    Trainer(WithLoss(model), arguments, train_dataset=Samples()).train()
    return networks.parameters(model)


def lightning(processes: int, scene: Scene) -> Any:
    import lightning as L  # type: ignore[import-not-found]

    model = Model(scene.contestant)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WithLoss(model)

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = "ddp" if processes > 1 else "auto"
    accelerator = "cpu" if networks.DEVICE == "cpu" else "auto"
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=processes,
        strategy=strategy,
        max_epochs=EPOCHS,
        **quiet,
    )
    trainer.fit(Module(), DataLoader(Samples(), batch_size=BATCH // processes))
    return networks.parameters(model)


def accelerate(processes: int, scene: Scene) -> Any:
    from accelerate import Accelerator  # type: ignore[import-not-found]

    model = Model(scene.contestant)
    accelerator = Accelerator(cpu=networks.DEVICE == "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    wrapped, optimizer, loader = accelerator.prepare(
        WithLoss(model), optimizer, DataLoader(Samples(), batch_size=BATCH // processes)
    )
    for _ in range(EPOCHS):
        for samples in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(**samples)["loss"])
            optimizer.step()
    assert not dist.is_initialized() or dist.get_world_size() == processes
    return networks.parameters(model)


for title, run, package in (
    ("Hugging Face Trainer", hugging_face, "transformers"),
    ("Lightning Trainer", lightning, "lightning"),
    ("Accelerate", accelerate, "accelerate"),
):
    for processes in (1, 2):
        several = f"{title}, {processes} process{'es' if processes > 1 else ''}"
        ROWS.add(
            several,
            functools.partial(run, processes),
            by_hand,
            processes=processes,
            needs=(package,),
            launched=True,
        )


def low_rank(scene: Scene) -> Any:
    """LoRA on a frozen model: the parameters that it trains, after three steps."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    model = Model(scene.contestant)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["up", "down"]))  # type: ignore[arg-type]
    trained = {name: p for name, p in model.named() if p.requires_grad}
    torch.manual_seed(5)
    for p in trained.values():
        nn.init.normal_(p, std=0.1)
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    for step in range(EPOCHS):
        optimizer.zero_grad()
        networks.loss(adapted, step).backward()
        optimizer.step()
    assert all("lora" in name for name in trained) and len(trained) == 4 * len(model.functions)
    return trained


ROWS.add("LoRA by peft, on a frozen stack", low_rank, low_rank, needs=("peft",))
