"""A ball in a box, seen and heard, on NUWA's reversible layers for two modalities
(`retrograd.compat.nuwa_video_audio`).

Each wall hums, the more the nearer the ball, and as loudly as the text says. Half of the frames are
hidden, and the other half of the sound: what is missing of one is in the other and in the text. All
three block types take part: python examples/nuwa_video_audio_bounce.py    (draws
examples/out/nuwa_video_audio_bounce.png)
"""

import argparse
import copy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import retrograd as rg
from retrograd.measure import activation_bytes

FRAMES, TICKS, WIDTH, BATCH = 16, 32, 48, 64
TYPES = ["intra_modality_self_attn", "intra_modality_cross_attn", "inter_modality_cross_attn"] * 2


def scenes(count):
    """Positions [count, FRAMES, 2], the hum of four walls [count, TICKS, 4], and how loud each wall
    is [count, 4, 1].
    """
    start, speed = torch.rand(count, 1, 2), (torch.rand(count, 1, 2) - 0.5) * 0.5
    place = (
        1 - ((start + speed * torch.arange(TICKS).view(1, -1, 1) / 2) % 2 - 1).abs()
    )  # reflected at 0 and 1
    loud = torch.rand(count, 4, 1) + 0.5
    return (
        place[:, ::2],
        (-3 * torch.cat((place, 1 - place), -1)).exp() * loud.view(count, 1, 4),
        loud,
    )


def hidden(
    values, first
):  # half of the values zeroed, with a flag that says so, and the time, in waves of many lengths
    count, length, _ = values.shape
    shown = ((torch.arange(length) < length // 2) != first).float().view(-1, 1)
    time = torch.arange(length).view(-1, 1) / length * 2 ** torch.linspace(0, 5, 16) * 3
    return torch.cat(
        (values * shown, torch.cat((shown, time.sin(), time.cos()), -1).expand(count, -1, -1)), -1
    )


class Attention(
    nn.MultiheadAttention
):  # of a modality to itself; to the text; or to the other modality
    def forward(self, x, other=None, context=None, mask=None, context_mask=None):
        source = x if other is None and context is None else other if context is None else context
        return super().forward(
            nn.functional.layer_norm(x, x.shape[-1:]), source, source, need_weights=False
        )[0]


class Imagination(nn.Module):
    def __init__(self):
        super().__init__()
        self.video, self.audio, self.text = (
            nn.Linear(35, WIDTH),
            nn.Linear(37, WIDTH),
            nn.Linear(1, WIDTH),
        )
        self.walls = nn.Parameter(torch.randn(4, WIDTH))
        feed = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        pair = [Attention(WIDTH, 4, batch_first=True), nn.Sequential(*feed)]
        blocks = [[copy.deepcopy(function) for function in pair * 2] for _ in TYPES]  # f, g, j, k
        self.stack = rg.compat.nuwa_video_audio.DualModalityReversibleSequence(blocks, TYPES)
        self.see, self.hear = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size)) for size in (2, 4)
        )

    def forward(self, place, hum, loud, reverse=True):
        video, audio = self.video(hidden(place, False)), self.audio(hidden(hum, True))
        video, audio = self.stack(
            video, audio, context=self.text(loud) + self.walls, reverse=reverse
        )
        return self.see(video)[:, FRAMES // 2 :], self.hear(audio)[
            :, : TICKS // 2
        ]  # what was hidden


def errors(model, scene, **options):  # squared, on what was hidden, relative to predicting the mean
    truth = scene[0][:, FRAMES // 2 :], scene[1][:, : TICKS // 2]
    return [
        nn.functional.mse_loss(found, true) / true.var()
        for found, true in zip(model(*scene, **options), truth)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="training steps")
    parser.add_argument(
        "--out", type=Path, default=Path("examples/out"), help="where the picture goes"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    model, mib = Imagination(), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in tqdm(range(options.steps), desc="training"):
        optimizer.zero_grad()
        sum(errors(model, scenes(BATCH))).backward()
        optimizer.step()
    for reverse in (True, False):
        step = lambda: sum(errors(model, scenes(BATCH), reverse=reverse)).backward()  # noqa: B023, E731
        mib.append(activation_bytes(step, model.parameters()) / 2**20)
    with torch.no_grad():
        (video, audio), (seen, heard) = errors(model, test := scenes(256)), model(*test)
    print(
        f"held out: {video:.0%} of the variance of hidden frames is left unexplained, and "
        f"{audio:.0%} of the hidden sound's"
    )
    print(
        f"activations of one step: {mib[0]:.1f} MiB with retrograd, {mib[1]:.1f} MiB without "
        "reversal"
    )
    left, right = (figure := Figure(figsize=(11, 4.5), layout="constrained")).subplots(1, 2)
    left.plot(*test[0][:4].permute(2, 1, 0), alpha=0.4)
    left.set_prop_cycle(None)  # the same colors again
    left.plot(*seen[:4].permute(2, 1, 0), ".")
    left.set(
        title="Paths, and hidden frames as imagined (dots)", xlabel="x", ylabel="y", aspect="equal"
    )
    right.plot(test[1][0, : TICKS // 2], "gray")
    right.plot(heard[0], "--")
    right.set(
        title="Hidden hum of four walls (gray), and as imagined", xlabel="tick", ylabel="loudness"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "nuwa_video_audio_bounce.png", dpi=120)


if __name__ == "__main__":
    main()
