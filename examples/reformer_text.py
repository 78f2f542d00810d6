"""A language model of Python source, character by character, on Reformer's reversible layers
(`retrograd.compat.reformer`). It reads modules of the standard library (four spaces are one
character) and is tested on others, against tables that count pairs and triples. All blocks share a
learned bias on distance: `arg_route` sends it to attention, not to the feed-forward functions, and
its gradient comes back from every block. Draws examples/out/reformer_text.png:    python
examples/reformer_text.py"""

import argparse
import sysconfig
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import trange

import retrograd as rg
from retrograd.measure import LiveBytes

DEPTH, WIDTH, HEADS, LENGTH, BATCH, ALPHABET = 6, 64, 4, 64, 16, 128
LINE, ROWS = (
    "\tdef names(self):\n\t\tfor name in self.items:\n\t\t\tif not ",
    "\n\t abcdefghijklmnopqrstuvwxyz_.,:()=",
)


class Attention(nn.Sequential):
    def forward(self, x, bias):
        norm, qkv, out = self
        q, k, v = (
            qkv(norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )  # each: batch, heads, tokens, channels
        return out(
            ((q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        )


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(ALPHABET, WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Linear(WIDTH, ALPHABET),
        )
        f = [
            Attention(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(DEPTH)
        ]
        g = [
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)
            )
            for _ in range(DEPTH)
        ]
        self.distance, self.stack = (
            nn.Embedding(LENGTH, HEADS),
            rg.compat.reformer.ReversibleSequence(zip(f, g)),
        )

    def forward(self, tokens):
        x, place = self.embed(tokens), torch.arange(tokens.shape[1])
        x = self.mix(
            torch.cat([nn.functional.pad(x, (0, 0, i, -i)) for i in range(4)], -1)
        )  # spelling is local
        back = (
            place[:, None] - place
        )  # how far back a token lies; below zero in the future, which must not be seen
        bias = self.distance(back.clamp(min=0)).permute(2, 0, 1).masked_fill(back < 0, -torch.inf)
        return self.head(
            sum(self.stack(torch.cat((x, x), -1), arg_route=(True, False), bias=bias).chunk(2, -1))
        )


def bits(model, text, windows):
    tokens = text[torch.randint(len(text) - LENGTH, (windows, 1)) + torch.arange(LENGTH + 1)]
    return (
        nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        / torch.tensor(2.0).log()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument(
        "--out", type=Path, default=Path("examples/out"), help="folder of the picture"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = [
        path.read_bytes().replace(b"    ", b"\t")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ]
    train, test = [text for i, text in enumerate(texts) if i % 10], texts[::10]
    train, test = (
        torch.tensor(list(b"".join(part))).clamp(max=ALPHABET - 1) for part in (train, test)
    )
    model, losses, mib, tables, text = LanguageModel(), [], [], [], LINE
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - step / args.steps)
    )
    for _ in trange(args.steps):
        optimizer.zero_grad()
        loss = bits(model, train, BATCH)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    for run in (2, 3):
        counts = torch.full([ALPHABET] * run, 0.01).index_put_(
            tuple(train.unfold(0, run, 1).T), torch.ones(()), accumulate=True
        )
        tables.append(
            -(counts / counts.sum(-1, keepdim=True))
            .log2()[tuple(test.unfold(0, run, 1).T)]
            .mean()
            .item()
        )
    for model.stack.reverse_thres in (
        LENGTH,
        0,
    ):  # inputs up to this length are left to plain autograd
        model.zero_grad()
        with LiveBytes() as live:
            bits(model, train, BATCH).backward()
        mib.append((live.peak - sum(p.grad.nbytes for p in model.parameters())) / 2**20)
    with torch.no_grad():
        found, chances = (
            bits(model, test, 400).item(),
            model(torch.tensor([list(LINE.encode())]))[0].softmax(-1).numpy(),
        )
        for _ in range(160):
            text += chr(
                model(torch.tensor([list(text.encode())[-LENGTH:]]))[0, -1]
                .div(0.8)
                .softmax(-1)
                .multinomial(1)
            )
    top, bottom = (figure := Figure(figsize=(11, 10), layout="tight")).subplots(
        2, height_ratios=(2, 3)
    )
    top.plot(losses, linewidth=1, alpha=0.5)
    for bar, name, color in (
        (tables[0], "counting pairs", "gray"),
        (tables[1], "triples", "black"),
        (found, "model", "tab:red"),
    ):
        top.axhline(bar, color=color, linestyle="--", label=f"unseen modules, {name}: {bar:.2f}")
    top.set(
        title="Learning to write Python",
        xlabel="step",
        ylabel="bits per character",
        xlim=(0, args.steps),
        ylim=(2, 6),
    )
    top.legend(frameon=False)
    figure.colorbar(
        bottom.imshow(chances[:, list(ROWS.encode())].T, cmap="Blues", aspect="auto"),
        label="probability",
        pad=0.01,
    )
    bottom.set(
        title="What it expects next", xlabel="after the text up to here", ylabel="next character"
    )
    for ticks, characters in ((bottom.set_xticks, LINE), (bottom.set_yticks, ROWS)):
        ticks(
            range(len(characters)),
            list(characters.translate({32: "␣", 10: "↵", 9: "⇥"})),
            family="monospace",
        )
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "reformer_text.png", dpi=120)
    print(f"a continuation:\n{text.expandtabs(4)}")
    print(
        f"activations of one step: {mib[1]:.1f} MiB with retrograd, {mib[0]:.1f} MiB without "
        "reversal"
    )
    print(
        f"held out: {found:.2f} bits per character; counting pairs {tables[0]:.2f}, counting "
        f"triples {tables[1]:.2f}"
    )


if __name__ == "__main__":
    main()
