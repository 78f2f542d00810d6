"""Numbers in words, written in digits: an encoder and a decoder on NUWA's reversible layers
(`retrograd.compat.nuwa`).

The encoder reads "three hundred thousand two"; the decoder writes all digits at once, and looks at
the encoder's output through `context`, which `args_route` sends to its attention only: python
examples/nuwa_numbers.py    (20 seconds)
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import retrograd as rg
from retrograd.measure import activation_bytes

DEPTH, WIDTH, DIGITS, LENGTH, BATCH = 6, 48, 6, 11, 64  # no number has more than 11 words
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen"
)
ONES, TENS = (
    f"{ONES} nineteen".split(),
    "twenty thirty forty fifty sixty seventy eighty ninety".split(),
)
WORDS = ["", *ONES, *TENS, "hundred", "thousand"]


def in_words(n):
    for unit, word in ((1000, "thousand"), (100, "hundred")):
        if n >= unit:
            return in_words(n // unit) + [word] + (in_words(n % unit) if n % unit else [])
    return [ONES[n]] if n < 20 else [TENS[n // 10 - 2]] + ([ONES[n % 10]] if n % 10 else [])


def examples(numbers):  # word indices [count, LENGTH], and digits [count, DIGITS]
    words = [
        [WORDS.index(word) for word in [*in_words(n), *[""] * LENGTH][:LENGTH]]
        for n in numbers.tolist()
    ]
    return torch.tensor(words), torch.tensor(
        [[int(digit) for digit in f"{n:0{DIGITS}d}"] for n in numbers.tolist()]
    )


class Attention(nn.MultiheadAttention):  # to itself, and to a context
    def forward(self, x, context=None):
        x = nn.functional.layer_norm(x, x.shape[-1:])
        source = x if context is None else torch.cat((x, context), 1)
        return super().forward(x, source, source, need_weights=False)[0]


def pairs(depth):
    for _ in range(depth):
        feed = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        yield Attention(WIDTH, 4, batch_first=True), nn.Sequential(*feed)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.read = (
            nn.Embedding(len(WORDS), WIDTH),
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)),
        )
        self.places, self.blank = (
            nn.Parameter(torch.randn(length, WIDTH)) for length in (LENGTH, DIGITS)
        )
        self.encoder = rg.compat.nuwa.ReversibleSequence(pairs(DEPTH // 2))
        to_f_only = {"context": [(True, False)] * DEPTH}
        self.decoder = rg.compat.nuwa.ReversibleSequence(pairs(DEPTH), args_route=to_f_only)

    def forward(self, words):
        context = self.encoder(self.words(words) + self.places)
        return self.read(self.decoder(self.blank.expand(len(words), -1, -1), context=context))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument(
        "--out", type=Path, default=Path("examples/out"), help="where the picture goes"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    test, train = torch.randperm(10**DIGITS)[:20_500].split([500, 20_000])
    (words, digits), (test_words, test_digits), model, mib = (
        examples(train),
        examples(test),
        Translator(),
        [],
    )
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.steps)

    def backward():
        batch = torch.randint(len(words), (BATCH,))
        nn.functional.cross_entropy(
            model(words[batch]).flatten(0, 1), digits[batch].flatten()
        ).backward()

    for _ in tqdm(range(options.steps), desc="training"):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        schedule.step()
    chances = model(test_words).softmax(-1).detach()
    for model.encoder.engine.memory in (
        rg.Reverse(),
        rg.Keep(),
    ):  # `Keep` stores everything, as plain autograd does
        model.decoder.engine.memory = model.encoder.engine.memory
        mib.append(activation_bytes(backward, model.parameters()) / 2**20)
    right = (chances.argmax(-1) == test_digits).all(-1)
    print(
        f"held out: {right.float().mean():.1%} of {len(test)} numbers right in all {DIGITS} digits "
        "(chance: one in a million)"
    )
    print(
        f"activations of one step: {mib[0]:.1f} MiB with retrograd, {mib[1]:.1f} MiB without "
        "reversal"
    )
    figure = Figure(figsize=(13, 9), layout="constrained")
    for panel, number, chance in zip(figure.subplots(3, 2).flat, test.tolist(), chances):
        panel.imshow(chance.T.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        panel.set(
            title=" ".join(in_words(number)), xlabel="place", ylabel="digit", yticks=range(10)
        )
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "nuwa_numbers.png", dpi=120)


if __name__ == "__main__":
    main()
