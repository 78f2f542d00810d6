"""Whole models of the packages: after `install`, the same loss, gradients, random draws and
checkpoints as before.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd as rg
from tests.packages import load

PACKAGES = ("reformer_pytorch", "axial_attention", "se3_transformer_pytorch", "nuwa_pytorch")


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    for package in PACKAGES:
        rg.compat.uninstall(package)


@pytest.fixture(autouse=True)
def _double_precision(monkeypatch):
    """nuwa's attention asks for its softmax in float32, and cannot go on from there in float64: it
    keeps its input's type.
    """
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


@pytest.fixture(autouse=True)
def _no_files(monkeypatch):
    """se3-transformer-pytorch keeps files in the home directory, unless this is set when it is
    imported.
    """
    monkeypatch.setenv("CLEAR_CACHE", "1")


# --- the models


class Case(NamedTuple):
    """A model: how to build it, and a loss of it with the tensors that it is given."""

    package: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, torch.dtype], tuple[Tensor, dict[str, Tensor]]]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-11  # of the largest gradient; measured: up to 2e-14


def leaf(*shape, dtype):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def mask(*shape):
    """About half of it, but always the first."""
    chosen = torch.rand(*shape) > 0.5
    chosen[:, 0] = True
    return chosen


def weighted(*outputs):
    """A loss in which every number of the outputs has a weight of its own."""
    return sum((output * torch.randn_like(output)).sum() for output in outputs)


def reformer(**options):
    """16 tokens in buckets of 4: LSH attention, as the limit up to which attention is full is 0."""
    options = {
        "depth": 3,
        "heads": 2,
        "dim_head": 4,
        "bucket_size": 4,
        "n_hashes": 2,
        "ff_chunks": 4,
        **options,
    }

    def build():
        return load("reformer_pytorch").ReformerLM(num_tokens=11, dim=8, max_seq_len=16, **options)

    def run(model, dtype):
        tokens = torch.randint(11, (2, 17))
        return F.cross_entropy(
            model(tokens[:, :-1], input_mask=mask(2, 16)).transpose(1, 2), tokens[:, 1:]
        ), {}

    return Case("reformer_pytorch", build, run)


def reformer_encoder_decoder():
    """The decoder's keyword argument `keys` comes from an encoder that is reversible, too."""
    shared = {
        "num_tokens": 11,
        "max_seq_len": 16,
        "heads": 2,
        "dim_head": 4,
        "bucket_size": 4,
        "n_hashes": 2,
        "ff_chunks": 2,
    }
    options = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in shared.items()}

    def build():
        package = load("reformer_pytorch")
        return package.ReformerEncDec(
            dim=8, enc_depth=2, dec_depth=3, enc_ff_dropout=0.1, dec_lsh_dropout=0.1, **options
        )

    def run(model, dtype):
        texts = torch.randint(1, 11, (2, 16)), torch.randint(1, 11, (2, 17))
        return model(*texts, return_loss=True, enc_input_mask=mask(2, 16)), {}

    return Case("reformer_pytorch", build, run)


def axial(**options):
    def build():
        return load("axial_attention").AxialImageTransformer(
            dim=4, depth=2, heads=2, reversible=True, **options
        )

    def run(model, dtype):
        image = leaf(2, 4, 3, 5, dtype=dtype)
        return weighted(model(image)), {"image": image}

    return Case("axial_attention", build, run)


def se3(tolerance=1e-11, **options):
    options = {
        "heads": 2,
        "dim_head": 4,
        "depth": 2,
        "num_degrees": 2,
        "output_degrees": 2,
        "num_neighbors": 3,
        **options,
    }

    def build():
        return load("se3_transformer_pytorch").SE3Transformer(dim=4, reversible=True, **options)

    def run(model, dtype):
        features, places = leaf(2, 5, 4, dtype=dtype), leaf(2, 5, 3, dtype=dtype)
        edges = {"edges": torch.randint(3, (2, 5, 5))} if "num_edge_tokens" in options else {}
        outputs = model(features, places, mask(2, 5), **edges)
        return weighted(*outputs.values()), {"features": features, "places": places}

    return Case("se3_transformer_pytorch", build, run, tolerance=tolerance)


def nuwa(**options):
    options = {"depth": 2, "heads": 2, "dim_head": 4, **options}

    def build():
        return load("nuwa_pytorch.nuwa_pytorch").ReversibleTransformer(
            dim=8, cross_attend=True, **options
        )

    def run(model, dtype):
        x, context, rotary = (
            leaf(2, 8, 8, dtype=dtype),
            leaf(2, 4, 8, dtype=dtype),
            leaf(8, 4, dtype=dtype),
        )
        kwargs = {"context": context, "context_mask": mask(2, 4), "mask": mask(2, 8)}
        if "sparse_3dna_attn" not in options:
            kwargs["rotary_pos_emb"] = rotary
        return weighted(model(x, **kwargs)), {"x": x, "context": context, "rotary": rotary}

    return Case("nuwa_pytorch", build, run)


def nuwa_video_audio(**options):
    """A block of each type, twice. The length of the audio is drawn: the model keeps a mask for the
    last one as a buffer.
    """
    options = {"depth": 2, "heads": 2, "dim_head": 4, "cross_modality_attn_every": 1, **options}
    shapes = {
        "num_audio_tokens_per_video_frame": 2,
        "num_video_tokens_per_frame": 4,
        "sparse_3dna_video_shape": (2, 2, 2),
    }

    def build():
        module = load("nuwa_pytorch.nuwa_pytorch")
        return module.ReversibleDualModalityDecoder(
            dim=8, sparse_2dna_kernel_size=3, **shapes, **options
        )

    def run(model, dtype):
        length = torch.randint(3, 6, ()).item()
        video, audio, context = (
            leaf(2, 8, 8, dtype=dtype),
            leaf(2, length, 8, dtype=dtype),
            leaf(2, 4, 8, dtype=dtype),
        )
        masks = {
            "context_mask": mask(2, 4),
            "video_mask": mask(2, 8),
            "audio_mask": mask(2, length),
        }
        return weighted(*model(video, audio, context=context, **masks)), {
            "video": video,
            "audio": audio,
            "context": context,
        }

    return Case("nuwa_pytorch", build, run)


class NoImages(nn.Module):
    """In place of nuwa's autoencoder: the videos are given as tokens."""

    image_size, num_layers, codebook_size = 4, 1, 7

    def copy_for_eval(self):
        return self


NUWA = {"dim": 8, "text_num_tokens": 11, "text_max_seq_len": 6, "max_video_frames": 2}
NUWA |= {"text_enc_depth": 2, "text_enc_heads": 2, "text_enc_dim_head": 4, "enc_reversible": True}
NUWA |= {"dec_depth": 2, "dec_heads": 2, "dec_dim_head": 4, "dec_reversible": True}
NUWA |= {"attn_dropout": 0.1, "ff_dropout": 0.1}


def texts_and_videos(**sounds):
    text = torch.randint(1, 11, (2, 6))
    text[:, -1] = 0  # padding
    return {"text": text, "video": torch.randint(7, (2, 2, 2, 2)), "return_loss": True, **sounds}


def whole_nuwa(drop_condition=0.0):
    """From text to video: a reversible encoder gives the context of a reversible decoder with
    sparse attention.
    """

    def build():
        return load("nuwa_pytorch").NUWA(vae=NoImages(), **NUWA)

    def run(model, dtype):
        return model(**texts_and_videos(), cond_dropout_prob=drop_condition), {}

    return Case("nuwa_pytorch", build, run)


def whole_nuwa_video_audio():
    def build():
        options = {
            "num_audio_tokens": 9,
            "num_audio_tokens_per_video_frame": 2,
            "cross_modality_attn_every": 1,
        }
        return load("nuwa_pytorch").NUWAVideoAudio(
            vae=NoImages(), image_size=4, sparse_3dna_rel_pos_bias=False, **options, **NUWA
        )

    def run(model, dtype):
        return model(**texts_and_videos(audio=torch.randint(9, (2, 4))), cond_dropout_prob=0.0), {}

    return Case("nuwa_pytorch", build, run)


DROPOUT = {"attn_dropout": 0.2, "ff_dropout": 0.2}
SPARSE = {
    "sparse_3dna_attn": True,
    "sparse_3dna_video_shape": (2, 2, 2),
    "shift_video_tokens": True,
}
CASES = {
    "reformer": reformer(),
    "reformer-causal": reformer(causal=True),
    "reformer-dropout": reformer(causal=True, lsh_dropout=0.2, ff_dropout=0.2),
    "reformer-layer-dropout": reformer(depth=4, layer_dropout=0.5, lsh_dropout=0.2, ff_dropout=0.2),
    "reformer-short": reformer(reverse_thres=16, lsh_dropout=0.2, ff_dropout=0.2),
    "reformer-long": reformer(reverse_thres=15, lsh_dropout=0.2, ff_dropout=0.2),
    "reformer-tied": reformer(weight_tie=True, num_mem_kv=8, n_local_attn_heads=1),
    "reformer-encoder-decoder": reformer_encoder_decoder(),
    "axial": axial(),
    "axial-positions": axial(axial_pos_emb_shape=(3, 5)),
    "se3": se3(),
    "se3-edges": se3(num_edge_tokens=3, edge_dim=2, rotary_position=True, use_null_kv=True),
    # The package makes rotary embeddings in float32: gradients through that keyword argument agree
    # to 1e-7.
    "se3-distances": se3(
        tolerance=1e-5, rotary_rel_dist=True, fourier_encode_dist=True, one_headed_key_values=True
    ),
    "nuwa": nuwa(),
    "nuwa-dropout": nuwa(causal=True, ff_chunk_size=3, **DROPOUT),
    "nuwa-sparse": nuwa(causal=True, **SPARSE, **DROPOUT),
    "nuwa-video-audio": nuwa_video_audio(),
    "nuwa-video-audio-dropout": nuwa_video_audio(
        shift_video_tokens=True, shift_audio_tokens=True, **DROPOUT
    ),
    "whole-nuwa": whole_nuwa(),
    "whole-nuwa-video-audio": whole_nuwa_video_audio(),
}
# As users run them. Rebuilding a stream rounds at 1e-7 of its size, and normalisations enlarge that
# a hundredfold.
FLOAT32 = ("reformer-dropout", "axial", "se3-edges", "nuwa-dropout", "nuwa-video-audio-dropout")
CASES |= {
    f"{name}-float32": CASES[name]._replace(dtype=torch.float32, tolerance=1e-4) for name in FLOAT32
}

SYSTEMS = {
    name: CASES[name]
    for name in (
        "reformer-dropout",
        "axial",
        "se3-edges",
        "nuwa-dropout",
        "nuwa-video-audio-dropout",
    )
}


# --- running them


def made(case, seed=1):
    torch.manual_seed(seed)
    return case.build().to(case.dtype)


class Step(NamedTuple):
    loss: float
    gradients: dict[str, Any]
    random: Tensor


def step(model, case, seed=7):
    """Forward and backward, in training, with the inputs and dropouts of this seed."""
    torch.manual_seed(seed)
    model.train().zero_grad()
    loss, inputs = case.run(model, case.dtype)
    loss.backward()
    leaves = dict(model.named_parameters()) | inputs
    gradients = {
        name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()
    }
    return Step(loss.item(), gradients, torch.get_rng_state())


@contextlib.contextmanager
def installed(case):
    load(case.package)
    rg.compat.install(case.package)
    try:
        yield
    finally:
        rg.compat.uninstall(case.package)


def step_on_retrograd(model, case, seed=7):
    with installed(case):
        return step(model, case, seed)


def difference(ours, theirs):
    """The largest difference of two steps' gradients, of the largest gradient. Both have to lack
    the same ones.
    """
    names = [name for name, grad in theirs.gradients.items() if grad is not None]
    assert names == [name for name, grad in ours.gradients.items() if grad is not None]
    scale = max(theirs.gradients[name].abs().max() for name in names)
    assert 0 < scale < float("inf")
    return max(
        (ours.gradients[name] - theirs.gradients[name]).abs().max() / scale for name in names
    ).item()


def assert_same(ours, theirs, case):
    assert ours.loss == pytest.approx(theirs.loss, rel=case.tolerance)
    assert difference(ours, theirs) <= case.tolerance
    assert torch.equal(ours.random, theirs.random)


# --- the promise


@pytest.mark.parametrize("name", CASES)
def test_the_same_step(name):
    """Loss, gradients of parameters and inputs, and random state; and the same keys. Both models
    were built before `install`.
    """
    case = CASES[name]
    ours, theirs = made(case), made(case)
    keys = list(ours.state_dict())
    assert_same(step_on_retrograd(ours, case), step(theirs, case), case)
    assert list(ours.state_dict()) == keys == list(theirs.state_dict())


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_engine_is_not_theirs(name, monkeypatch):
    """No block's own backward runs, nor its forward except on noise."""
    case = SYSTEMS[name]
    model = made(case)
    for part in model.modules():
        if hasattr(part, "backward_pass"):
            monkeypatch.setattr(type(part), "backward_pass", lambda *_, **__: pytest.fail("theirs"))
    step_on_retrograd(model, case)


@pytest.mark.parametrize("name", SYSTEMS)
def test_construction_draws_what_it_drew(name):
    case = SYSTEMS[name]
    theirs = made(case)
    with installed(case):
        ours = made(case)
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values())
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_training(name):
    """Three steps, with inputs of several lengths where the model takes them: caches, buffers, what
    is remembered of a step.
    """
    case = SYSTEMS[name]
    losses = []
    for surroundings in (contextlib.nullcontext(), installed(case)):
        model = made(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses.append([])
        with surroundings:
            for seed in range(3):
                losses[-1].append(step(model, case, seed).loss)
                optimizer.step()
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_evaluation(name):
    case = SYSTEMS[name]
    losses, states = [], []
    for surroundings in (contextlib.nullcontext(), installed(case)):
        model = made(case).eval()
        torch.manual_seed(7)
        with torch.no_grad(), surroundings:
            losses.append(case.run(model, case.dtype)[0].item())
        states.append(torch.get_rng_state())
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert torch.equal(*states)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_copy_is_a_model_of_its_own(name):
    """Made after a step, when the model has remembered things. Its step is the same, and leaves the
    other's gradients alone.
    """
    case = SYSTEMS[name]
    ours = made(case)
    before = step_on_retrograd(ours, case)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.mul_(2)
    assert_same(step_on_retrograd(twin, case), before, case)
    after = {name: weight.grad for name, weight in ours.named_parameters()}
    assert all(
        grad is None or torch.equal(grad, before.gradients[name]) for name, grad in after.items()
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_budget_reaches_an_installed_model(name):
    """`rg.set_memory` and `rg.plan` see its blocks, and gradients stay."""
    case = SYSTEMS[name]
    model = made(case)
    theirs = step(made(case), case)
    with installed(case):
        rg.set_memory(model, "75%")
        assert_same(step(model, case), theirs, case)
        holders = rg.compat.installing.engines_of(model)
        assert holders and all("75%" in repr(each.memory) for each in holders.values())


# --- reformer: hashing, layer dropout, attention in chunks


def test_attention_is_hashed_and_only_the_last_function_is_not_recomputed():
    """A hash that is recomputed is told so, and takes the buckets of forward."""
    case, logs = CASES["reformer"], []
    for one_step in (step, step_on_retrograd):
        model = made(case)
        log = []
        for block in model.reformer.layers.blocks:

            def hashed(module, args, kwargs, output, log=log):
                log.append(f"{'re' * kwargs['_reverse']}hash {kwargs['_depth']}")

            def fed(*_, log=log, depth=block.depth):
                log.append(f"feed {depth}")

            block.f.net.fn.lsh_attn.register_forward_hook(hashed, with_kwargs=True)
            block.f.net.fn.full_attn.register_forward_hook(lambda *_: pytest.fail("full attention"))
            block.g.net.fn.register_forward_hook(fed)
        one_step(model, case)
        logs.append(", ".join(log))
    forward = "hash 0, feed 0, hash 1, feed 1, hash 2, feed 2"
    assert logs[0] == f"{forward}, feed 2, rehash 2, feed 1, rehash 1, feed 0, rehash 0"  # theirs
    assert logs[1] == f"{forward}, rehash 2, feed 1, rehash 1, feed 0, rehash 0"


def test_layer_dropout_leaves_the_same_blocks_out():
    """Some, and not the same in every step."""
    case = CASES["reformer-layer-dropout"]
    theirs, ours = made(case), made(case)
    seen = set()
    for seed in range(4):
        steps = step_on_retrograd(ours, case, seed), step(theirs, case, seed)
        assert_same(*steps, case)
        seen.add(tuple(name for name, grad in steps[0].gradients.items() if grad is None))
    assert len(seen) > 1


def test_attention_in_chunks_raises_where_theirs_is_wrong():
    """reformer-pytorch remembers one chunk's buckets for all chunks. Its own ordinary path shows
    what gradients should be.
    """
    chunked = {"attn_chunks": 2, "lsh_dropout": 0.0, "ff_dropout": 0.0}
    reversible, ordinary = reformer(**chunked), reformer(**chunked, reverse_thres=16)
    truth = step(made(ordinary), ordinary)
    assert difference(step(made(reversible), reversible), truth) > 1e-3
    with pytest.raises(rg.RecomputeError, match="did something else when it ran again"):
        step_on_retrograd(made(reversible), reversible)
    assert_same(step_on_retrograd(made(ordinary), ordinary), truth, ordinary)


# --- nuwa: a mask that is edited after the encoder has seen it


def test_the_same_step_with_dropped_conditions():
    """nuwa's default in training. Theirs is right: with a copy of the mask for the encoder, it
    gives the same gradients.
    """
    case = whole_nuwa(drop_condition=0.5)
    theirs, careful = made(case), made(case)
    careful.text_transformer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "mask": kwargs["mask"].clone()}),
        with_kwargs=True,
    )
    assert_same(step(theirs, case), step(careful, case), case)
    assert_same(step_on_retrograd(made(case), case), step(theirs, case), case)
