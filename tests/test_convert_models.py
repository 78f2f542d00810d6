"""`rg.convert` on real models: those of Hugging Face, of `torch.nn`, a nanoGPT and a ResNet.

The oracles: the original model where the rule is `Euler`, and the same conversion in plain autograd
(`memory=rg.Keep()`) where it is another one. All to the bit.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from benchmarks.converted_memory import CHECKPOINTED, DATA, DEPTHS, ELEMENTS, measure, table
from benchmarks.page import DOCS
from retrograd.measure import LiveBytes

VOCABULARY, LENGTH, WIDTH, DEPTH = 40, 7, 16, 4
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4]])).long()  # padding on the right
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
HIDDEN = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).double()


# --- models that need torch only


class CausalSelfAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = heads
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """As its author writes it: one loop, tied weights, logits and loss."""

    def __init__(self, depth: int = DEPTH, dropout: float = 0.1) -> None:
        super().__init__()
        parts = {
            "wte": nn.Embedding(VOCABULARY, WIDTH),
            "wpe": nn.Embedding(32, WIDTH),
            "drop": nn.Dropout(dropout),
            "h": nn.ModuleList([Block(WIDTH, 2, dropout) for _ in range(depth)]),
            "ln_f": nn.LayerNorm(WIDTH),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.2 / math.sqrt(2 * depth))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PreActBlock(nn.Module):
    """Batch norm and ReLU before each convolution; edits its activations in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.bn2(out)))
        return out + shortcut


class PreActResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...] = (3, 4, 3)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.stage1 = self.stage(4, 4, blocks[0], 1)
        self.stage2 = self.stage(4, 8, blocks[1], 2)
        self.stage3 = self.stage(8, 16, blocks[2], 2)
        self.bn = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16, 10)

    def stage(self, inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = PreActBlock(inputs, outputs, stride)
        return nn.Sequential(first, *[PreActBlock(outputs, outputs, 1) for _ in range(blocks - 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.conv(x))))
        return self.linear(torch.relu(self.bn(x)).mean((2, 3)))


def encoder(norm_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerDecoder(layer, DEPTH, nn.LayerNorm(WIDTH))


def run_decoder(model: Any) -> Tensor:
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return model(HIDDEN, HIDDEN.flip(0)[:, :3], tgt_mask=causal, tgt_is_causal=True)


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 2, DEPTH, DEPTH, 32, batch_first=True)


# --- models of Hugging Face


def decoder_only(kind: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=DEPTH,
            num_attention_heads=2,
            max_position_embeddings=32,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            attn_implementation="eager",
            **options,
        )
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=2,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return transformers.BertForMaskedLM(config)


def vit() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attn_implementation="eager",
    )
    return transformers.ViTForImageClassification(config)


def t5(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=DEPTH,
            num_heads=2,
            decoder_start_token_id=2,
            attn_implementation="eager",
        )
        return getattr(transformers, kind)(config)

    return build


def run_tokens(model: Any, **options: Any) -> Any:
    return model(input_ids=IDS, attention_mask=MASK, **options)


def run_pixels(model: Any, **options: Any) -> Any:
    dtype = next(model.parameters()).dtype
    return model(pixel_values=IMAGES.to(dtype), **options)


def run_both(model: Any, **options: Any) -> Any:
    return model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS.flip(0), **options)


# --- all of them


class Case(NamedTuple):
    build: Callable[[], Any]
    run: Callable[..., Any]
    layers: Any = None  # of `rg.convert`
    package: str | None = None


GENERATORS = {
    "gpt2": Case(gpt2, run_tokens, None, "transformers"),
    "llama": Case(decoder_only("Llama", attention_dropout=0.1), run_tokens, None, "transformers"),
    "qwen3": Case(
        decoder_only("Qwen3", head_dim=8, num_key_value_heads=1), run_tokens, None, "transformers"
    ),
    "mistral": Case(
        decoder_only("Mistral", num_key_value_heads=1, sliding_window=5),
        run_tokens,
        None,
        "transformers",
    ),
    "gemma": Case(
        decoder_only("Gemma", head_dim=8, num_key_value_heads=1), run_tokens, None, "transformers"
    ),
}
HUGGING_FACE = {
    **GENERATORS,
    "bert": Case(bert, run_tokens, None, "transformers"),
    "vit": Case(vit, run_pixels, None, "transformers"),
    "t5-encoder": Case(t5("T5EncoderModel"), run_tokens, None, "transformers"),
    "t5": Case(t5("T5ForConditionalGeneration"), run_both, None, "transformers"),
}
STAGES = ["stage1", "stage2", "stage3"]
TORCH = {
    "encoder": Case(encoder, lambda model: model(HIDDEN)),
    "encoder-post-norm": Case(lambda: encoder(False), lambda model: model(HIDDEN)),
    "encoder-padded": Case(
        encoder, lambda model: model(HIDDEN, src_key_padding_mask=MASK.logical_not())
    ),
    "decoder": Case(decoder, run_decoder),
    "transformer": Case(
        transformer,
        lambda model: model(HIDDEN, HIDDEN.flip(0)),
        ["encoder.layers", "decoder.layers"],
    ),
    "nanogpt": Case(GPT, lambda model: model(IDS)),
    "resnet": Case(PreActResNet, lambda model: model(IMAGES), STAGES),
    "resnet-channels-last": Case(
        lambda: PreActResNet().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda model: model(IMAGES.contiguous(memory_format=torch.channels_last)),
        STAGES,
    ),
}
ALL = {**TORCH, **HUGGING_FACE}
RULES = {
    "euler": (rg.Euler(), False),
    "midpoint": (rg.Midpoint(), True),
    "blend": (rg.Blend(1 / 4), True),
    "bdia": (rg.Bdia(0.5), True),
}


def cases(chosen: dict[str, Case]) -> Any:
    marks = {name: [pytest.mark.integration] if case.package else [] for name, case in ALL.items()}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n]) for n in chosen])


def build(name: str) -> Any:
    case = ALL[name]
    if case.package is not None:
        pytest.importorskip(case.package)
    torch.manual_seed(0)
    return case.build().double().train()


def converted(name: str, rule: str, memory: Any = rg.Reverse()) -> Any:
    chosen, exact = RULES[rule]
    return rg.convert(build(name), chosen, memory, exact, layers=ALL[name].layers)


def stacks(model: nn.Module) -> list[Any]:
    conversions = [vars(module).get("retrograd") for module in model.modules()]
    return [stack for one in conversions if one is not None for stack in one.stacks]


def set_memory(model: nn.Module, memory: Any) -> None:
    for stack in stacks(model):
        stack.memory = memory


def set_exact(model: nn.Module, exact: Any) -> None:
    for stack in stacks(model):
        stack.exact = exact


def output(returned: Any) -> Tensor:
    """The tensor that a model returned, perhaps with others."""
    if isinstance(returned, Tensor):
        return returned
    if hasattr(returned, "keys"):
        return returned[next(name for name in ("logits", "last_hidden_state") if name in returned)]
    return returned[0]


def step(name: str, model: Any) -> dict[str, Any]:
    """The output, gradients and buffers of a training step."""
    torch.manual_seed(1)
    model.zero_grad()
    y = output(ALL[name].run(model))
    y.square().sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    found = {"output": y.detach(), **gradients, **dict(model.named_buffers())}
    return {n: None if value is None else value.clone() for n, value in found.items()}


def steps(name: str, model: Any) -> list[dict[str, Any]]:
    """The first one inspects the layers and chooses the grid."""
    return [step(name, model) for _ in range(2)]


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        wrong = [name for name, value in one.items() if not same(value, other[name])]
        assert not wrong


def same(value: Tensor | None, other: Tensor | None) -> bool:
    if value is None or other is None:
        return value is other
    return torch.equal(value, other)


def evaluate(name: str, model: Any, **options: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return ALL[name].run(model, **options)


# --- every model


@cases(ALL)
def test_euler_is_the_original(name):
    expected = steps(name, build(name))
    assert_equal(steps(name, converted(name, "euler")), expected)


@cases(ALL)
@pytest.mark.parametrize("rule", ["midpoint", "blend", "bdia"])
def test_rebuilt_gradients_are_those_of_plain_autograd(name, rule):
    expected = steps(name, converted(name, rule, rg.Keep()))
    assert_equal(steps(name, converted(name, rule)), expected)


class ByHand:
    """The `forward` of layers that follow a rule, written down: no streams, no grid.

    p[k+1] = previous * p[k-1] + current * p[k] + scale * (layer(p[k]) - p[k])
    """

    def __init__(self, layers: list[nn.Module], rule: Any) -> None:
        self.before: Tensor | None = None
        for layer, coefficients in zip(layers, rule.steps(len(layers), True)):
            forward = functools.partial(self.step, layer.forward, coefficients)
            layer.forward = forward  # type: ignore[method-assign]

    def step(self, layer: Any, rule: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        returned = layer(x, *args, **kwargs)
        output, *rest = returned if isinstance(returned, tuple) else (returned,)
        result = rule.current * x + rule.scale * (output - x)
        if rule.previous:
            result = result + rule.previous * self.before
        self.before = x
        return (result, *rest) if isinstance(returned, tuple) else result


@cases(ALL)
@pytest.mark.parametrize("rule", ["midpoint", "blend"])
def test_the_formula_of_the_rule(name, rule):
    """Rounding to the grid of float64 changes 1e-10."""
    model = converted(name, rule)
    set_exact(model, rg.Grid(bits=45, dtype=torch.float64))
    step(name, model)  # a layer that changes the shape turns out now
    plain = build(name)
    modules = dict(plain.named_modules())
    for stack in stacks(model):
        ByHand([modules[body.name] for body in stack.bodies], RULES[rule][0])
    expected = step(name, plain)
    fresh = converted(name, rule)
    set_exact(fresh, rg.Grid(bits=45, dtype=torch.float64))
    for key, value in step(name, fresh).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9, msg=key)


@cases(ALL)
def test_all_layers_follow_the_rule(name):
    model = converted(name, "midpoint")
    step(name, model)
    two, stages = 2 * DEPTH, 3 + 3 + 2
    counts = {"t5": two, "transformer": two, "resnet": stages, "resnet-channels-last": stages}
    count = counts.get(name, DEPTH)
    assert sum(map(len, stacks(model))) == count


@cases(ALL)
@pytest.mark.parametrize("rule", ["euler", "blend"])
def test_names_stay_and_revert_gives_the_original_back(name, rule):
    model = build(name)
    keys = list(model.state_dict())
    names = [(path, type(module)) for path, module in model.named_modules()]
    model = rg.convert(model, *RULES[rule][:1], exact=RULES[rule][1], layers=ALL[name].layers)
    assert list(model.state_dict()) == keys
    state = copy.deepcopy(model.state_dict())
    steps(name, model)
    assert list(model.state_dict()) == keys
    assert [(path, type(module)) for path, module in model.named_modules()] == names
    model.load_state_dict(state)
    rg.revert(model)
    assert list(model.state_dict()) == keys
    assert not any("forward" in vars(module) for module in model.modules())
    assert_equal(steps(name, model), steps(name, build(name)))


@cases(ALL)
@pytest.mark.parametrize("rule", RULES)
def test_evaluation(name, rule):
    model = converted(name, rule)
    y = output(evaluate(name, model))
    assert torch.equal(y, output(evaluate(name, model)))
    is_ordinary = rule in ("euler", "bdia")
    assert torch.equal(y, output(evaluate(name, build(name)))) == is_ordinary
    with_gradients = output(ALL[name].run(model))
    torch.testing.assert_close(with_gradients, y)


@cases(ALL)
def test_hooks_run_once_a_step(name):
    """Hooks on layers, forward and backward, see what they see in plain autograd."""

    def seen(memory: Any) -> list[Any]:
        model = converted(name, "midpoint", memory)
        steps(name, model)
        layer = stacks(model)[0].bodies[1].layer
        calls: list[Any] = []
        layer.register_forward_pre_hook(lambda _, args: calls.append("before"))
        layer.register_forward_hook(lambda _, args, out: calls.append(first(out).detach()))
        layer.register_full_backward_hook(lambda _, given, got: calls.append(got[0]))
        step(name, model)
        return calls

    def first(out: Any) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    found, expected = seen(rg.Reverse()), seen(rg.Keep())
    assert found[0] == expected[0] == "before"
    assert len(found) == len(expected) == 3
    for one, other in zip(found[1:], expected[1:]):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_loss_and_generation_of_nanogpt(rule):
    """With the loss inside of the model, and its own way to generate."""
    model = converted("nanogpt", rule)
    model(IDS, IDS)[1].backward()
    model.eval()
    tokens = IDS
    with torch.no_grad():
        for _ in range(3):
            following = model(tokens)[0][:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
    assert tokens.shape == (2, LENGTH + 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("rule", RULES)
def test_the_fast_path_of_transformer_encoders(rule):
    """In evaluation, torch's encoder runs fused kernels on nested tensors. Rules cannot."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=True).eval()
    mask = MASK.logical_not()
    hidden = HIDDEN.float()
    chosen, exact = RULES[rule]
    with torch.no_grad():
        original = model(hidden, src_key_padding_mask=mask)
        rg.convert(model, chosen, exact=rg.Grid(dtype=torch.float64) if exact else False)
        y = model(hidden, src_key_padding_mask=mask)
    if rule in ("euler", "bdia"):
        assert torch.equal(y, original)
        return
    assert y.shape == HIDDEN.shape
    with_gradients = model(hidden, src_key_padding_mask=mask)
    tokens = MASK.bool()
    torch.testing.assert_close(y[tokens], with_gradients[tokens])
    assert model.use_nested_tensor


# --- models of Hugging Face


@cases(HUGGING_FACE)
@pytest.mark.parametrize("rule", RULES)
def test_hidden_states_and_attentions(name, rule):
    model = converted(name, rule)
    step(name, model)
    options = {"output_hidden_states": True, "output_attentions": True}
    original = evaluate(name, build(name), **options)
    found = evaluate(name, model, **options)
    assert found.keys() == original.keys()
    for key in found:
        if "hidden_states" in key or "attentions" in key:
            assert len(found[key]) == len(original[key])
            if rule in ("euler", "bdia"):
                assert all(map(torch.equal, found[key], original[key]))
    key = next(key for key in found if key.endswith("hidden_states"))
    assert len(found[key]) == DEPTH + 1
    assert not torch.equal(found[key][1], found[key][2])
    assert any(len(found[key]) == DEPTH for key in found if key.endswith("attentions"))


@cases(HUGGING_FACE)
@pytest.mark.parametrize("rule", ["midpoint", "blend"])
def test_gradients_of_hidden_states(name, rule):
    def gradients(model: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        model.zero_grad()
        returned = ALL[name].run(model, output_hidden_states=True, output_attentions=True)
        key = next(key for key in returned if key.endswith("hidden_states"))
        attentions = next(key for key in returned if key.endswith("attentions"))
        middle = returned[key][2].square().sum() + returned[attentions][1].square().sum()
        (output(returned).sum() + middle).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = converted(name, rule)
    step(name, model)
    reversed_ = gradients(model)
    set_memory(model, rg.Keep())
    assert_equal([reversed_], [gradients(model)])


def prompt(side: str) -> dict[str, Tensor]:
    mask = {"none": torch.ones_like(MASK), "left": MASK.flip(1)}[side]
    return {"input_ids": IDS, "attention_mask": mask}


@cases({**GENERATORS, "t5": HUGGING_FACE["t5"]})
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(name, rule, side, beams):
    """In float32: in float64 the original itself has NaN where all of a row is padding."""
    model = converted(name, rule)
    step(name, model)  # trained before
    model.float().eval()
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "min_new_tokens": 6}
    tokens = model.generate(**prompt(side), use_cache=True, **options)
    assert tokens.shape == (2, (1 if name == "t5" else LENGTH) + 6)
    assert torch.equal(tokens, model.generate(**prompt(side), use_cache=False, **options))
    if rule in ("euler", "bdia"):
        original = build(name).float().eval()
        assert torch.equal(tokens, original.generate(**prompt(side), **options))


@pytest.mark.integration
@pytest.mark.parametrize("rule", RULES)
def test_other_ways_to_generate(rule):
    """A cache of fixed size, sampling, and tokens that are looked up in the prompt."""
    model = converted("llama", rule).float().eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    start = prompt("none")
    greedy = model.generate(**start, do_sample=False, **options)
    static = model.generate(**start, do_sample=False, cache_implementation="static", **options)
    assert torch.equal(static, greedy)
    one = {key: value[:1] for key, value in start.items()}
    looked_up = model.generate(**one, do_sample=False, prompt_lookup_num_tokens=2, **options)
    assert torch.equal(looked_up, greedy[:1])
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        samples.append(model.generate(**start, do_sample=True, use_cache=use_cache, **options))
    assert torch.equal(*samples)


@cases(GENERATORS)
@pytest.mark.parametrize("rule", RULES)
def test_caches_with_gradients(name, rule):
    """In evaluation, but not under `no_grad`: the second call needs the cache of the first."""
    model = converted(name, rule)
    model.eval()
    whole = model(input_ids=IDS).logits[:, 4:]
    start = model(input_ids=IDS[:, :4], use_cache=True)
    rest = model(input_ids=IDS[:, 4:], past_key_values=start.past_key_values)
    torch.testing.assert_close(rest.logits, whole)
    rest.logits.sum().backward()
    model.train()
    start = model(input_ids=IDS[:, :4], use_cache=True)
    with pytest.raises(rg.ConversionError, match="cache that an earlier call left empty"):
        model(input_ids=IDS[:, 4:], past_key_values=start.past_key_values)


@cases(HUGGING_FACE)
def test_save_and_load(name, tmp_path):
    model = converted(name, "blend")
    step(name, model)
    expected = step(name, model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").double().train()
    # The memory that safetensors maps is aligned otherwise, and kernels may round otherwise.
    loaded = copy.deepcopy(loaded)
    assert "retrograd" not in {key for module in loaded.modules() for key in vars(module)}
    assert_equal([loaded.state_dict()], [model.state_dict()])
    rg.convert(loaded, exact=stacks(model)[0].exact)
    assert_equal([step(name, loaded)], [expected])


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # it has a new name
def test_gradient_checkpointing_raises():
    model = converted("llama", "midpoint")
    model.gradient_checkpointing_enable()
    with pytest.raises(rg.ConversionError, match="gradient_checkpointing_disable"):
        step("llama", model)
    model.gradient_checkpointing_disable()
    assert_equal(steps("llama", model), steps("llama", build("llama")))  # it was reverted


@cases(GENERATORS)
@pytest.mark.parametrize("rule", ["midpoint", "blend"])
def test_memory_is_flat_in_depth(name, rule):
    """But for the digits of `Blend`: 2 bits for each element and layer."""

    def peak(depth: int) -> int:
        model = build(name)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        layers.extend([copy.deepcopy(layers[1]) for _ in range(depth - len(layers))])
        model.config.layer_types = ["full_attention"] * depth
        model.config.num_hidden_layers = depth
        rg.convert(model, RULES[rule][0])
        steps(name, model)  # gradients exist from here on
        with LiveBytes() as live:
            output(ALL[name].run(model, use_cache=False)).sum().backward()
        return live.peak

    stream = 2 * LENGTH * WIDTH
    digits = 2 / 8 if rule == "blend" else 0
    assert peak(20) - peak(8) <= 12 * digits * stream + 1024


@pytest.mark.integration
@pytest.mark.parametrize("name", ["`Midpoint()`", "`Blend(1/4)`"])
def test_llama_against_gradient_checkpointing(name):
    """Fewer bytes, and at most 12 % more FLOPs."""
    pytest.importorskip("transformers")
    checkpointed = measure(CHECKPOINTED, 12)
    found = measure(name, 12)
    assert found["bytes"] < checkpointed["bytes"]
    assert found["flops"] <= 1.12 * checkpointed["flops"]


def test_the_page_has_the_figures_of_llama():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert table(rows) in (DOCS / "convert.md").read_text()


def test_the_figures_of_llama_hold_what_the_page_says():
    """Digits are in words: bytes with 4 digits of 2 bits, 4 bytes with 10 digits of 3 bits."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    found = {(row["name"], row["depth"]): row for row in rows}
    few, many = DEPTHS
    words = {"`Midpoint()`": (1, 0), "`Blend(1/4)`": (4, 1), "`Blend(1/8)`": (10, 4)}
    for rule, (digits, size) in words.items():
        growth = found[rule, many]["bytes"] - found[rule, few]["bytes"]
        assert growth <= math.ceil((many - few) / digits) * size * ELEMENTS
        for depth in DEPTHS:
            checkpointed = found[CHECKPOINTED, depth]
            assert found[rule, depth]["bytes"] < checkpointed["bytes"]
            assert found[rule, depth]["flops"] <= 1.12 * checkpointed["flops"]
