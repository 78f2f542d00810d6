"""Converted models under other people's trainers and wrappers.

Each is trained twice: by the tool, and by a loop in plain autograd. A converted model with
`memory=rg.Reverse()` must end with the bits of the same conversion with `memory=rg.Keep()`; with
`Euler`, with those of the original model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import retrograd as rg
from tests import processes
from tests.processes import WORLD

pytestmark = [
    pytest.mark.integration,
    # transformers 5 has other names for these; Trainer and peft use the old ones.
    pytest.mark.filterwarnings(
        "ignore:`(is_)?gradient_checkpointing.* is deprecated:FutureWarning"
    ),
    # Lightning, with torch 2.13.
    pytest.mark.filterwarnings(
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
    ),
]

VOCABULARY, DEPTH, BATCH, ROWS = 40, 4, 4, 16
PADDING = 2
EXACT = rg.Grid(dtype=torch.float64)  # chosen, so that the first step has it, too
RULES: dict[str, Any] = {
    "euler": (rg.Euler(), False),
    "midpoint": (rg.Midpoint(), EXACT),
    "blend": (rg.Blend(1 / 4), EXACT),
}
rules = pytest.mark.parametrize("rule", RULES)
State = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def _packages():
    for package in ("transformers", "accelerate", "lightning", "peft"):
        pytest.importorskip(package)


# --- models and data


def llama(dropout: float = 0.1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=PADDING,
    )
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=DEPTH,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=PADDING,
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2}
models = pytest.mark.parametrize("kind", MODELS)


def build(kind: str, rule: str | None = None, memory: Any = rg.Reverse(), **options: Any) -> Any:
    """A model; converted, if there is a rule."""
    torch.manual_seed(0)
    model = MODELS[kind](**options).train()
    if rule is None:
        return model
    chosen, exact = RULES[rule]
    return rg.convert(model, chosen, memory, exact)


def oracle(kind: str, rule: str, **options: Any) -> Any:
    """The same network in plain autograd: the original one, if the rule is its own."""
    if rule == "euler":
        return build(kind, **options)
    return build(kind, rule, rg.Keep(), **options)


class Texts(Dataset[Any]):
    """Rows of 3 to 7 tokens."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, VOCABULARY, (3 + index % 5,), generator=generator)}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows, padded on the right."""
    lines = [row["input_ids"] for row in rows]
    tokens = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PADDING)
    is_text = tokens != PADDING
    labels = tokens.masked_fill(~is_text, -100)
    return {"input_ids": tokens, "attention_mask": is_text.long(), "labels": labels}


def batches() -> list[dict[str, Tensor]]:
    return list(DataLoader(Texts(), BATCH, collate_fn=padded))


def parameters(model: nn.Module) -> State:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


def assert_trained(found: State, kind: str, rule: str, **options: Any) -> None:
    """Raise if a trainer changed nothing."""
    before = parameters(build(kind, rule, **options))
    assert any(not torch.equal(value, before[name]) for name, value in found.items())


# --- Hugging Face's Trainer


def hugging_face(model: Any, folder: Any, **options: Any) -> State:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=5,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), data_collator=padded)
    trainer.train()
    return parameters(model)


@models
@rules
@pytest.mark.parametrize("bf16", [False, True])
def test_hugging_face_trainer(kind, rule, bf16, tmp_path):
    """With AdamW, accumulation over two padded batches, and clipping."""
    found = hugging_face(build(kind, rule), tmp_path, bf16=bf16)
    assert_same(found, hugging_face(oracle(kind, rule), tmp_path, bf16=bf16))
    assert_trained(found, kind, rule)


@rules
def test_hugging_face_trainer_evaluates_and_goes_on(rule, tmp_path):
    """Evaluation in between; checkpoints are those of an unconverted model, and training resumes
    from them.
    """
    from transformers import Trainer, TrainingArguments

    def train(model: Any, folder: Any, resume: bool) -> tuple[State, list[float]]:
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        texts = Texts()
        trainer = Trainer(
            model, arguments, train_dataset=texts, eval_dataset=texts, data_collator=padded
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        return parameters(model), losses

    found = train(build("llama", rule, dropout=0.0), tmp_path / "one", False)
    expected = train(oracle("llama", rule, dropout=0.0), tmp_path / "two", False)
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    resumed = train(build("llama", rule, dropout=0.0), tmp_path / "one", True)
    assert_same(resumed[0], found[0])


def test_gradient_checkpointing_of_a_trainer_raises(tmp_path):
    with pytest.raises(rg.ConversionError, match="gradient_checkpointing_disable"):
        hugging_face(build("llama", "midpoint"), tmp_path, gradient_checkpointing=True)


# --- Lightning and Accelerate, against a loop by hand


def by_hand(model: Any, bf16: bool = False) -> State:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)  # for dropout: loaders draw random numbers, too
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def lightning(model: Any, bf16: bool) -> State:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            torch.manual_seed(number)
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="bf16-mixed" if bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Texts(), BATCH, collate_fn=padded))
    return parameters(model)


def accelerate(model: Any, bf16: bool) -> State:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16" if bf16 else "no"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), BATCH, collate_fn=padded)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        torch.manual_seed(number)
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return parameters(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False))


# Lightning says it of every loader without processes of its own, and of short epochs.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@models
@rules
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("trainer", [lightning, accelerate])
def test_lightning_and_accelerate(trainer, kind, rule, bf16):
    found = trainer(build(kind, rule), bf16)
    assert_same(found, by_hand(oracle(kind, rule), bf16))
    assert_trained(found, kind, rule)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@rules
def test_lightning_validates(rule):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.losses: list[Tensor] = []

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.model(**batch).loss

        def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
            assert not torch.is_grad_enabled()
            self.losses.append(self.model(**batch).loss.clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    def losses(model: Any) -> list[Tensor]:
        module = Module(model)
        loader = DataLoader(Texts(), BATCH, collate_fn=padded)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, loader)
        return module.losses

    found = losses(build("llama", rule, dropout=0.0))
    expected = losses(oracle("llama", rule, dropout=0.0))
    assert len(found) == 2 * ROWS // BATCH + 2  # the sanity check before training has two
    assert all(map(torch.equal, found, expected))


# --- peft


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False
    )
    return get_peft_model(model, config)


def with_adapters(rule: str | None, order: str, memory: Any = rg.Reverse()) -> Any:
    if order == "converted first":
        return adapted(build("llama", rule, memory))
    model = adapted(build("llama"))
    return model if rule is None else rg.convert(model, RULES[rule][0], memory, RULES[rule][1])


@rules
@pytest.mark.parametrize("order", ["converted first", "adapted first"])
def test_lora(rule, order, tmp_path):
    from peft import PeftModel

    model = with_adapters(rule, order)
    names = list(with_adapters(None, "adapted first").state_dict())
    assert list(model.state_dict()) == names
    before = parameters(model)
    found = by_hand(model)
    is_euler = rule == "euler"
    plain = with_adapters(None if is_euler else rule, "adapted first", rg.Keep())
    assert_same(found, by_hand(plain))
    for name, value in found.items():
        assert torch.equal(value, before[name]) == ("lora_" not in name), name
    assert_can_be_saved(model, rule, tmp_path, PeftModel)


def assert_can_be_saved(model: Any, rule: str, folder: Any, kind: Any) -> None:
    """Adapters are saved, loaded onto another converted model, and merged."""
    tokens = batches()[0]["input_ids"]

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            return model.eval()(tokens).logits

    expected = logits(model)
    model.save_pretrained(folder)
    loaded = kind.from_pretrained(build("llama", rule), folder)
    assert torch.equal(logits(loaded), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-6)
    assert list(merged.state_dict()) == list(build("llama").state_dict())
    rg.revert(merged)
    assert not any("forward" in vars(module) for module in merged.modules())


@rules
def test_prefix_tuning(rule):
    """Layers get a cache with the prefix, so they run in plain autograd."""
    from peft import PrefixTuningConfig, get_peft_model

    def trained(model: Any) -> State:
        torch.manual_seed(7)
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        adapted = get_peft_model(model, config)
        before = parameters(adapted)
        by_hand(adapted)
        after = {n: p.detach() for n, p in adapted.named_parameters() if p.requires_grad}
        assert len(after) == 1
        assert all(not torch.equal(value, before[name]) for name, value in after.items())
        return after

    assert_same(trained(build("llama", rule)), trained(oracle("llama", rule)))


# --- DDP and FSDP2, in two processes

STEPS = 3
TOLERANCE = 1e-9


def share(rank: int | None) -> Iterator[dict[str, Tensor]]:
    """A rank's part of the batches; without a rank, all of them. As many tokens in each part."""
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, VOCABULARY, (2 * WORLD, 6), generator=generator)
        mask = torch.ones_like(tokens)
        mask[::2, 4:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        if rank is not None:
            batch = {name: value.chunk(WORLD)[rank] for name, value in batch.items()}
        yield batch


def train(model: Any, wrapped: Any, rank: int | None) -> State:
    """The gradients of the first step that has them, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients: State = {}
    for batch in share(rank):
        optimizer.zero_grad()
        wrapped(**batch).loss.backward()
        named = model.named_parameters()
        gradients = {f"gradient of {n}": whole(p.grad).clone() for n, p in named}
        optimizer.step()
    return {**gradients, **parameters(model)}


def double(kind: str, rule: str | None, memory: Any = rg.Reverse()) -> Any:
    options = {"dropout": 0.0} if kind == "llama" else {}
    model = build(kind, None, **options).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model if rule is None else rg.convert(model, RULES[rule][0], memory, RULES[rule][1])


def ddp(kind: str, rule: str | None, memory: Any, rank: int) -> State:
    model = double(kind, rule, memory)
    return train(model, nn.parallel.DistributedDataParallel(model), rank)


def fsdp(
    order: str,
    kind: str,
    rule: str | None,
    memory: Any,
    rank: int,
    float32: bool = False,
    **options: Any,
) -> State:
    """`fully_shard` on each layer and on the model, before or after the conversion."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = double(kind, None)
    if float32:
        model.float()
    mesh = init_device_mesh("cpu", (WORLD,))
    if order == "converted first" and rule is not None:
        rg.convert(model, RULES[rule][0], memory, RULES[rule][1])
    for layer in model.model.layers if kind == "llama" else model.transformer.h:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if order == "sharded first" and rule is not None:
        rg.convert(model, RULES[rule][0], memory, RULES[rule][1])
    return train(model, model, rank)


def accumulated(kind: str, rule: str | None, memory: Any, rank: int) -> State:
    """DDP that communicates after the last of three batches."""
    model = double(kind, rule, memory)
    wrapped = nn.parallel.DistributedDataParallel(model)
    *first, last = share(rank)
    with wrapped.no_sync():
        for batch in first:
            wrapped(**batch).loss.backward()
    wrapped(**last).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def mixed(kind: str, rule: str | None, memory: Any, rank: int) -> State:
    """FSDP2 in bfloat16, which casts what layers get."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return fsdp("converted first", kind, rule, memory, rank, float32=True, mp_policy=policy)


WRAPPERS: dict[str, Callable[..., State]] = {
    "ddp": ddp,
    "fsdp-converted": functools.partial(fsdp, "converted first"),
    "fsdp-sharded": functools.partial(fsdp, "sharded first"),
}
OTHERS = {"ddp-accumulated": accumulated, "fsdp-mixed": mixed}
MEMORY = {"keep": rg.Keep(), "reverse": rg.Reverse()}
CASES: dict[str, processes.Case] = {
    f"{wrapper}-{kind}-{rule}-{memory}": functools.partial(run, kind, rule, MEMORY[memory])
    for wrapper, run in {**WRAPPERS, **OTHERS}.items()
    for kind in MODELS
    for rule in RULES
    for memory in MEMORY
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    # FSDP says so of linear layers' outputs. Nothing edits them in place.
    view = "FSDP2-wrapped module .* returned a view tensor"
    return processes.run(CASES, tmp_path_factory.mktemp("converted"), ignore=[view])


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", WRAPPERS)
@models
@rules
def test_several_processes(results, wrapper, kind, rule):
    """The bits of the same wrapper with `Keep`; close to one process on all of the batch."""
    model = double(kind, None if rule == "euler" else rule, rg.Keep())
    expected = train(model, model, None)
    found = results[f"{wrapper}-{kind}-{rule}-reverse"]
    kept = results[f"{wrapper}-{kind}-{rule}-keep"]
    for got, same in zip(found, kept):
        assert_same(got, same)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE)


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", OTHERS)
@models
@rules
def test_accumulation_and_mixed_precision_in_several_processes(results, wrapper, kind, rule):
    """The bits of the same wrapper with `Keep`, whose network it is."""
    found = results[f"{wrapper}-{kind}-{rule}-reverse"]
    for got, same in zip(found, results[f"{wrapper}-{kind}-{rule}-keep"]):
        assert_same(got, same)
