"""The smallest real model of each package of the family: how to build it, and a loss of it.

Used by `benchmarks.family`, which writes the table, and by the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Imported by these packages for training loops, image files and proteins, which nothing here uses.
STAND_INS = (
    *("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.transforms"),
    *("torchvision.utils", "sidechainnet", "sidechainnet.utils", "sidechainnet.utils.sequence"),
    *("sidechainnet.utils.measure", "sidechainnet.structure"),
    *("sidechainnet.structure.build_info", "sidechainnet.structure.StructureBuilder"),
    *("pytorch3d", "pytorch3d.transforms", "Bio", "Bio.SeqIO", "mp_nerf", "mdtraj", "prody"),
    *("omegaconf", "taming", "taming.models", "taming.models.vqgan", "dall_e", "youtokentome"),
    *(
        "tokenizers",
        "tokenizers.processors",
        "transformers",
        "requests",
        "tqdm",
        "PIL",
        "pkg_resources",
    ),
)


class StandIn(ModuleType):
    """A module of which every attribute is one, too. Calling it gives itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> StandIn:
        return self

    def __radd__(self, other: Any) -> Any:
        return other


def load(name: str) -> Any:
    """The package or module of this name, with stand-ins for what is only imported."""
    os.environ.setdefault("CLEAR_CACHE", "1")  # some keep files in the home directory otherwise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_real = name.partition(".")[0] == "transformers"  # it asks what else is installed
        made = [part for part in STAND_INS if is_missing(part) and not is_real]
        sys.modules.update({part: StandIn(part) for part in made})
        try:
            return importlib.import_module(name)
        finally:
            for part in made:
                del sys.modules[part]


def is_missing(name: str) -> bool:
    top = name.partition(".")[0]
    if name in sys.modules:
        return False
    if isinstance(sys.modules.get(top), StandIn) or top == "transformers":
        return True
    return importlib.util.find_spec(top) is None


class Case(NamedTuple):
    """A model of a package."""

    package: str  # as it is imported
    distribution: str  # as it is installed
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]  # a loss
    engine: str  # the module that has the autograd function
    reads: str = "torch"  # the name of torch in that module


def weighted(*outputs: Tensor) -> Tensor:
    """A loss in which every number of the outputs has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        total = total + (output * weights).sum()
    return total


def tokens(length: int = 16) -> Tensor:
    return torch.randint(1, 11, (2, length))


def on_tokens(model: nn.Module) -> Tensor:
    output = model(tokens())
    aux: Any = 0.0
    if isinstance(output, tuple):
        output, aux = output
    return weighted(output) + aux


def language_model(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(load(module), name)(**options)


def leaf(*shape: int) -> Tensor:
    """An input that requires grad: without, most of these engines give no gradients at all."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def axial_image(model: nn.Module) -> Tensor:
    return weighted(model(leaf(2, 4, 3, 5)))


def points(model: nn.Module) -> Tensor:
    features = leaf(1, 5, 4)
    places = leaf(1, 5, 3)
    output = model(features, places, torch.ones(1, 5, dtype=torch.bool))
    if isinstance(output, dict):
        return weighted(*output.values())
    if hasattr(output, "type0"):
        return weighted(output.type0, output.type1)
    return weighted(output)


def nuwa_decoder() -> nn.Module:
    module = load("nuwa_pytorch.nuwa_pytorch")
    options = {"depth": 2, "heads": 2, "dim_head": 4, "attn_dropout": 0.2, "ff_dropout": 0.2}
    return module.ReversibleTransformer(dim=8, cross_attend=True, causal=True, **options)


def nuwa_step(model: nn.Module) -> Tensor:
    x, context = (leaf(2, n, 8) for n in (8, 4))
    mask = torch.ones(2, 4, dtype=torch.bool)
    return weighted(model(x, context=context, context_mask=mask))


def nuwa_two() -> nn.Module:
    module = load("nuwa_pytorch.nuwa_pytorch")
    options = {"depth": 2, "heads": 2, "dim_head": 4, "cross_modality_attn_every": 1}
    shapes = {"num_audio_tokens_per_video_frame": 2, "num_video_tokens_per_frame": 4}
    return module.ReversibleDualModalityDecoder(
        dim=8, sparse_2dna_kernel_size=3, sparse_3dna_video_shape=(2, 2, 2), **shapes, **options
    )


def nuwa_two_step(model: nn.Module) -> Tensor:
    video, audio, context = (leaf(2, n, 8) for n in (8, 4, 4))
    masks = {
        "context_mask": torch.ones(2, 4, dtype=torch.bool),
        "video_mask": torch.ones(2, 8, dtype=torch.bool),
        "audio_mask": torch.ones(2, 4, dtype=torch.bool),
    }
    return weighted(*model(video, audio, context=context, **masks))


def dalle() -> nn.Module:
    module = load("dalle_pytorch.transformer")
    return module.Transformer(
        dim=8,
        depth=2,
        seq_len=8,
        heads=2,
        dim_head=4,
        reversible=True,
        rotary_emb=False,
        attn_dropout=0.2,
        ff_dropout=0.2,
        image_fmap_size=2,
    )


def dalle_step(model: nn.Module) -> Tensor:
    return weighted(model(leaf(2, 8, 8)))


def attention_only() -> nn.Module:
    module = load("memory_efficient_attention_pytorch.transformer")
    return module.Transformer(
        num_tokens=11, max_seq_len=16, dim=8, depth=2, heads=2, dim_head=4, use_flash_attn=False
    )


class Rotating(nn.Module):
    """A function of alphafold2's blocks: it uses every keyword argument that it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Tensor:
        for other in others:
            x = x + other.mean(1, keepdim=True)
        rotary = kwargs.get("rotary_emb")
        if rotary is not None:
            x = x * rotary
        for name in ("mask", "context_mask"):
            mask = kwargs.get(name)
            if mask is not None and mask.shape[1] == x.shape[1]:
                x = x.masked_fill(~mask[..., None], 0.0)
        return self.dropout(self.inner(x).tanh())


class Alphafold2Trunk(nn.Module):
    """alphafold2-pytorch's reversible sequence: its two modalities and three types of blocks. The
    released model does not build it.
    """

    def __init__(self) -> None:
        super().__init__()
        module = load("alphafold2_pytorch.reversible")
        types = ["self", "cross", "conv"]
        blocks = [[Rotating(8) for _ in range(4)] for _ in types]
        self.positions = nn.Parameter(torch.randn(1, 1, 8))
        self.sequence = module.ReversibleSequence(blocks, types)

    def forward(self, x: Tensor, m: Tensor) -> Any:
        return self.sequence(
            x,
            m,
            seq_shape=x.shape,
            msa_shape=m.shape,
            mask=torch.ones(x.shape[:2], dtype=torch.bool),
            seq_pos_emb=self.positions * 2,
        )


def alphafold2_step(model: nn.Module) -> Tensor:
    x, m = (leaf(2, n, 8) for n in (6, 4))
    return weighted(*model(x, m))


def reformer_of_transformers() -> nn.Module:
    module = importlib.import_module("transformers.models.reformer")
    config = module.ReformerConfig(
        attn_layers=["lsh", "local", "lsh"],
        hidden_size=16,
        attention_head_size=8,
        num_attention_heads=2,
        feed_forward_size=32,
        vocab_size=11,
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(8, 8),
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_hashes=2,
        num_buckets=4,
        max_position_embeddings=16,
        lsh_attention_probs_dropout_prob=0.1,
        is_decoder=True,
        use_cache=False,
    )
    return module.ReformerModelWithLMHead(config)


def reformer_of_transformers_step(model: nn.Module) -> Tensor:
    return weighted(model(input_ids=tokens()).logits)


SMALL = {"num_tokens": 11, "dim": 8, "depth": 2, "heads": 2}
DROPOUT = {"attn_dropout": 0.2, "ff_dropout": 0.2}

CASES = {
    "reformer-pytorch": Case(
        "reformer_pytorch",
        "reformer-pytorch",
        # f, g; layer dropout; tells functions whether they run again
        language_model(
            "reformer_pytorch",
            "ReformerLM",
            **SMALL,
            max_seq_len=16,
            dim_head=4,
            bucket_size=4,
            n_hashes=2,
            ff_chunks=4,
            lsh_dropout=0.2,
            ff_dropout=0.2,
            layer_dropout=0.2,
        ),
        on_tokens,
        "reformer_pytorch.reversible",
    ),
    "axial-attention": Case(
        "axial_attention",
        "axial-attention",
        # f, g; images
        language_model(
            "axial_attention", "AxialImageTransformer", dim=4, depth=2, heads=2, reversible=True
        ),
        axial_image,
        "axial_attention.reversible",
    ),
    "se3-transformer-pytorch": Case(
        "se3_transformer_pytorch",
        "se3-transformer-pytorch",
        # f, g; dicts of features by degree
        language_model(
            "se3_transformer_pytorch",
            "SE3Transformer",
            dim=4,
            reversible=True,
            heads=2,
            dim_head=4,
            depth=2,
            num_degrees=2,
            output_degrees=2,
            num_neighbors=3,
        ),
        points,
        "se3_transformer_pytorch.reversible",
    ),
    "nuwa-pytorch": Case(
        "nuwa_pytorch",
        "nuwa-pytorch",
        # f, g; arguments by block; sum
        nuwa_decoder,
        nuwa_step,
        "nuwa_pytorch.reversible",
    ),
    "nuwa-pytorch, video and audio": Case(
        "nuwa_pytorch",
        "nuwa-pytorch",
        # f, g, j, k on two modalities
        nuwa_two,
        nuwa_two_step,
        "nuwa_pytorch.reversible_video_audio",
    ),
    "performer-pytorch": Case(
        "performer_pytorch",
        "performer-pytorch",
        # nuwa's
        language_model(
            "performer_pytorch",
            "PerformerLM",
            **SMALL,
            max_seq_len=16,
            dim_head=4,
            causal=False,
            reversible=True,
            **DROPOUT,
        ),
        on_tokens,
        "performer_pytorch.reversible",
    ),
    "memory-efficient-attention-pytorch": Case(
        "memory_efficient_attention_pytorch",
        "memory-efficient-attention-pytorch",
        # nuwa's
        attention_only,
        on_tokens,
        "memory_efficient_attention_pytorch.reversible",
    ),
    "dalle-pytorch": Case(
        "dalle_pytorch",
        "dalle-pytorch",
        # nuwa's with mean
        dalle,
        dalle_step,
        "dalle_pytorch.reversible",
    ),
    "linformer": Case(
        "linformer",
        "linformer",
        # nuwa's with layer dropout
        language_model("linformer", "LinformerLM", **SMALL, seq_len=16, k=4, reversible=True),
        on_tokens,
        "linformer.reversible",
    ),
    "sinkhorn-transformer": Case(
        "sinkhorn_transformer",
        "sinkhorn-transformer",
        # nuwa's with layer dropout
        language_model(
            "sinkhorn_transformer",
            "SinkhornTransformerLM",
            **SMALL,
            max_seq_len=16,
            bucket_size=4,
            reversible=True,
            layer_dropout=0.2,
            **DROPOUT,
        ),
        on_tokens,
        "sinkhorn_transformer.reversible",
    ),
    "h-transformer-1d": Case(
        "h_transformer_1d",
        "h-transformer-1d",
        # nuwa's with layer dropout
        language_model(
            "h_transformer_1d",
            "HTransformer1D",
            **SMALL,
            max_seq_len=16,
            dim_head=4,
            block_size=4,
            reversible=True,
        ),
        on_tokens,
        "h_transformer_1d.reversible",
    ),
    "linear-attention-transformer": Case(
        "linear_attention_transformer",
        "linear-attention-transformer",
        # nuwa's with layer dropout and mean
        language_model(
            "linear_attention_transformer",
            "LinearAttentionTransformerLM",
            **SMALL,
            max_seq_len=16,
            reversible=True,
            **DROPOUT,
        ),
        on_tokens,
        "linear_attention_transformer.reversible",
    ),
    "routing-transformer": Case(
        "routing_transformer",
        "routing-transformer",
        # f, g; an auxiliary loss from each; tells functions whether they run again
        language_model(
            "routing_transformer",
            "RoutingTransformerLM",
            **SMALL,
            max_seq_len=16,
            window_size=4,
            reversible=True,
            causal=True,
            **DROPOUT,
        ),
        on_tokens,
        "routing_transformer.reversible",
    ),
    "equiformer-pytorch": Case(
        "equiformer_pytorch",
        "equiformer-pytorch",
        # se3's with integer degrees
        language_model(
            "equiformer_pytorch",
            "Equiformer",
            dim=(4, 4),
            dim_in=4,
            num_degrees=2,
            heads=2,
            dim_head=4,
            depth=2,
            num_neighbors=3,
            reversible=True,
        ),
        points,
        "equiformer_pytorch.reversible",
    ),
    "alphafold2-pytorch": Case(
        "alphafold2_pytorch",
        "alphafold2-pytorch",
        # f, g, j, k on two modalities, other keywords
        Alphafold2Trunk,
        alphafold2_step,
        "alphafold2_pytorch.reversible",
    ),
    "transformers": Case(
        "transformers",
        "transformers",
        # Reformer: attention, feed-forward
        reformer_of_transformers,
        reformer_of_transformers_step,
        "transformers.models.reformer.modeling_reformer",
    ),
}
