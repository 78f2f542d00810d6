"""What notebooks, terminals and logs show of results."""

import itertools
import re

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd import line_labels
from retrograd.sizes import human


def stack_of(depth, **options):
    torch.manual_seed(0)
    pairs = [(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(depth)]
    return rg.ReversibleSequence(pairs, **options), torch.randn(4, 8)


def cells(html):
    """The rows of the first table, as text."""
    rows = html.partition("</table>")[0].split("<tr>")[1:]
    return [re.findall(r">([^<]*)</t[dh]>", row) for row in rows]


def test_a_plan_shows_the_same_in_a_notebook_and_in_a_terminal():
    stack, x = stack_of(4)
    plan = stack.plan(x)
    html = plan._repr_html_()
    head, *rows = cells(html)
    summary, text_head, *lines = str(plan).splitlines()
    assert summary in html and all(word in text_head for word in head)
    assert [" ".join(row[:3]) for row in rows] == [" ".join(line.split()) for line in lines]
    assert len(rows) == 2  # blocks that keep the same are one row


def test_a_plan_escapes_what_is_in_it():
    plan = rg.StepPlan("<b>", (), 0, 0, 0, 0, 1.0)
    assert "&lt;b&gt;" in plan._repr_html_()


def test_a_measurement_shows_functions_that_cost_the_same_together():
    stack, x = stack_of(4, memory=rg.Reverse(keep_last=False))
    measured = rg.measure.step(lambda: stack(x).sum().backward(), stack)
    assert str(measured).splitlines()[0].startswith("activations ")
    head, *rows = cells(measured._repr_html_())
    assert head == ["function", "runs", "kept by forward"]
    assert rows[0][0].startswith("blocks.0.f") and rows[-1][0].endswith("blocks.3.g")
    assert {row[1] for row in rows} == {"2"}
    for row in rows:
        assert all(part in str(measured) for part in row)


def test_a_measurement_without_stacks():
    layer = nn.Linear(4, 4)
    measured = rg.measure.step(lambda: layer(torch.randn(2, 4)).sum().backward(), layer)
    assert "GFLOPs" in str(measured) and "GFLOPs" in measured._repr_html_()


def test_a_report_has_tables():
    stack, x = stack_of(2)
    html = rg.check(stack, x)._repr_html_()
    assert html.count("<table") >= 2 and "ok" in html


def test_calls_that_are_measured_or_inspected_are_logged(caplog):
    caplog.set_level("DEBUG", "retrograd")
    stack, x = stack_of(4, memory=rg.Budget("1 MiB"))
    for _ in range(3):
        stack(x).sum().backward()
    measured = [r for r in caplog.records if "measured a call of 8 updates" in r.getMessage()]
    inspected = [r for r in caplog.records if "is inspected: new shapes" in r.getMessage()]
    assert len(measured) == 1 and measured[0].levelname == "INFO"
    assert len(inspected) == 1 and inspected[0].levelname == "DEBUG"
    caplog.clear()
    stack(x).sum().backward()
    assert not caplog.records


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [(999, "999 B"), (1023, "1023 B"), (1024, "1 KiB"), (1010 * 2**10, "1010 KiB")]
    + [(1.5 * 2**20, "1.5 MiB"), (1500 * 2**30, "1500 GiB")],
)
def test_sizes_are_numbers_that_a_budget_takes(bytes_, text):
    assert human(bytes_) == text
    assert rg.Budget(text).bytes_of(0) == bytes_


def test_names_beside_lines_do_not_overlap():
    figure_module = pytest.importorskip("matplotlib.figure")
    axes = figure_module.Figure().subplots()
    labels = []
    for name, end in (("a", 1.0), ("b", 1.01), ("$c", 1.02), ("far", 9.0)):
        (line,) = axes.plot([0, 1], [0, end])
        labels.append(line_labels.LineLabel(1, end, name, line.get_color()))
    line_labels.label_lines(axes, labels)
    written = {text.get_text(): text for text in axes.texts}
    assert list(written) == ["a", "b", "$c", "far"]  # from below
    heights = [text.get_position()[1] for text in written.values()]
    assert all(b - a >= line_labels.GAP - 1e-9 for a, b in itertools.pairwise(heights))
    assert heights[-1] > 0.9  # where its line ends
    assert [text.get_color() for text in axes.texts] == [label.colour for label in labels]
