"""`benchmarks.family`: the table of `rg.compat.install`, row by row, and what writes it."""

import importlib.util

import pytest
import torch

import retrograd as rg
from benchmarks import family
from benchmarks.family_models import CASES, load

SLOW = {"transformers"}  # needs what make test-integrations installs
ALWAYS_WRONG = {"routing-transformer", "transformers"}  # their own engines


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.integration) if n in SLOW else n for n in CASES],
)
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_a_row(name):
    """Right to 1e-12; keys, random state and buffers are those of the plain network."""
    case = CASES[name]
    if importlib.util.find_spec(case.package) is None:
        pytest.skip(f"{case.distribution} is not installed: make .venv/peers")
    row = family.row(name, case)
    assert isinstance(row.ours, float) and row.ours <= 1e-12, row.ours
    assert (isinstance(row.own, float) and row.own <= 1e-12) == (name not in ALWAYS_WRONG)
    assert row.same_keys and row.same_random and row.same_buffers
    plain, _, ours = row.bytes
    assert ours <= plain


def test_the_table_and_the_page(tmp_path, capsys):
    row = family.Row("a, b", "1.0", 1e-16, "OSError: no", (2048, "x", 1024), True, True, False)
    same = row._replace(own=0.5, ours=1e-3, same_buffers=True)
    text = family.table([row, same])
    first, second = text.splitlines()[2:]
    assert first == ("| a 1.0, b | 1e-16 | raised OSError, **differ**: buffers | 2 | – | 1 |")
    assert "**wrong**, 5e-01 | **wrong**, 1e-03 | 2 |" in second
    page = tmp_path / "page.md"
    page.write_text(f"before\n{family.START}\nold\n{family.END}\nafter\n")
    family.write(text, page)
    assert page.read_text() == f"before\n{family.START}\n{text}\n{family.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="has no lines <!-- benchmarks.family: start -->"):
        family.write(text, page)
    with pytest.raises(SystemExit, match="unknown: reformer. Choose among reformer-pytorch"):
        family.main(["reformer"])


def test_the_page_has_every_row():
    page = family.PAGE.read_text()
    text = page[page.index(family.START) : page.index(family.END)]
    for name, case in CASES.items():
        assert f"| {case.distribution} " in text, name
    assert "raised" not in text.partition("own gradients")[0]


def test_the_oracle_is_not_retrograd():
    """Plain autograd of a package does not depend on `install`, and keeps more."""
    case = CASES["linformer"]
    load(case.package)
    with family.plain_autograd(case):
        before = family.step(case, family.made(case))
    rg.compat.install(case.package)
    try:
        ours = family.step(case, family.made(case))
    finally:
        rg.compat.uninstall(case.package)
    assert ours.bytes < before.bytes
    assert family.error(ours, before) > 0 or torch.equal(ours.random, before.random)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
class TestReformerOfTransformers:
    """Hugging Face's Reformer after `install("transformers")`."""

    CASE = CASES["transformers"]

    @pytest.fixture(autouse=True)
    def _uninstalled(self):
        yield
        rg.compat.uninstall("transformers")

    def test_runs_repeat_and_nothing_is_seeded(self):
        rg.compat.install("transformers")
        one, other = (family.step(self.CASE, family.made(self.CASE)) for _ in range(2))
        assert family.error(one, other) == 0
        assert torch.equal(one.random, other.random)

    def test_exact_is_equal_to_the_bit(self):
        steps = []
        for memory in (rg.Reverse(), rg.Keep()):
            rg.compat.install("transformers", memory=memory, exact=True)
            steps.append(family.step(self.CASE, family.made(self.CASE)))
        assert family.error(*steps) == 0

    def test_backward_in_evaluation(self):
        rg.compat.install("transformers")
        ours, plain = family.made(self.CASE).eval(), family.made(self.CASE).eval()
        found = family.step(self.CASE, ours)
        rg.compat.uninstall("transformers")
        with family.plain_autograd(self.CASE), family.without_seeds(self.CASE):
            expected = family.step(self.CASE, plain)
        assert family.error(found, expected) <= 1e-12
        with pytest.raises(AssertionError, match=r"model\.train"):
            family.step(self.CASE, family.made(self.CASE).eval())  # their own

    def test_hidden_states_attentions_and_caches(self):
        """As in the original's evaluation; in training, a cache changes nothing."""
        outputs = []
        for install in (False, True):
            if install:
                rg.compat.install("transformers")
            model = family.made(self.CASE).eval()
            tokens = torch.arange(16)[None] % 11
            torch.manual_seed(0)
            with torch.no_grad():
                outputs.append(
                    model(tokens, output_hidden_states=True, output_attentions=True, use_cache=True)
                )
        theirs, ours = outputs
        assert len(ours.hidden_states) == len(theirs.hidden_states) == 4
        for name in ("hidden_states", "attentions"):
            for one, other in zip(getattr(ours, name), getattr(theirs, name)):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-12, atol=1e-12)
        states = [each.past_buckets_states.states_cache for each in outputs]
        torch.testing.assert_close(*states)

        gradients = []
        for use_cache in (False, True):
            model = family.made(self.CASE)
            torch.manual_seed(1)
            model(tokens, use_cache=use_cache).logits.square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
