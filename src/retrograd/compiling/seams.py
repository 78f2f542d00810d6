"""The seams with the compiler: every private name of torch that `retrograd.compiling` uses.

| name | what for | torch |
| --- | --- | --- |
| `_dynamo_marked_constant` | run `ready` while the compiler traces, not in the graph | all |
| `graph_compile._partition_joint_graph_into_fw_bw` | where the pass is put in | from 2.13 |
| `partitioners._must_be_in_forward`, `partitioner_tag` | what belongs to forward, to backward | |
| `compile_utils.fx_graph_cse` | merge equal nodes before the pass, not after it | |
| `run_and_save_rng_state`, `run_with_rng_state` | random operations that run again | |
| `inductor_config.custom_partitioner_fn` | the pass, after Inductor's own passes | |
| `lowerings`, `V.graph.additional_buffer_deps` | order without a data dependency | |

They are imported while a model is compiled, not when retrograd is. Where a name is missing, a stack
runs outside the compiler, as before: `ready` says why.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.core.torch_version import VERSION

log = logging.getLogger("retrograd")

OLDEST = (2, 13)  # that has all of the names

# Why no stack is a part of a graph, on a torch that is too old.
TOO_OLD = (
    f"torch {VERSION[0]}.{VERSION[1]} has no place for retrograd's pass (2.13 has)"
    if VERSION < OLDEST
    else None
)

INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
BACKWARD_ONLY = "must_be_in_backward"
GRAPH_COMPILE = "torch._functorch._aot_autograd.graph_compile"


# Names nodes of a graph while they are traced. Torch 2.9 does not have it.
annotate: Any = getattr(torch.fx.traceback, "annotate", contextlib.nullcontext)


def run_while_tracing(fn: Any) -> Any:
    """Let the compiler call a function and take what it returns for a constant.

    `torch.compiler.assume_constant_result`, except that it does not import the compiler.
    """
    fn._dynamo_marked_constant = True
    return fn


@run_while_tracing
def say(obstacle: str) -> None:
    """Log once why stacks run outside the compiler."""
    _say_once(obstacle)


@functools.cache
def _say_once(obstacle: str) -> None:
    log.warning("a stack runs outside the compiler, because %s.", obstacle)


@run_while_tracing
def ready() -> str | None:
    """Put the pass in. Returned: why it cannot be, or None."""
    return _install()


@run_while_tracing
def edition() -> str:
    """A name for this version of the pass.

    Compiled graphs are cached on disk by what they contain. So it is an argument of each marker.
    """
    return _hash_of_sources()


@functools.cache
def _hash_of_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def _install() -> str | None:
    return _wrap_partitioning()


def _wrap_partitioning() -> str | None:
    """Wrap the function that splits a joint graph. Graphs without markers pass through it."""
    try:
        module: Any = importlib.import_module(GRAPH_COMPILE)
        split = Partitioning(module._partition_joint_graph_into_fw_bw)
        donate = functools.partial(donated_inputs, module.collect_bw_donated_buffer_idxs)
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has changed ({error})"
    global _region
    _region = torch.compiler.nested_compile_region(_call)
    module._partition_joint_graph_into_fw_bw = split
    module.collect_bw_donated_buffer_idxs = donate
    return None


def donated_inputs(
    inner: Callable[..., Any], forward: Any, backward: fx.GraphModule, meta: Any
) -> list[int]:
    """Which inputs of backward its kernels may overwrite.

    None if it has regions: torch applies these numbers to the inputs of each region, too
    (pytorch#193960).
    """
    has_order = any(
        node.target is torch.ops.retrograd.ordered.default for node in backward.graph.nodes
    )
    has_regions = backward.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH)
    return [] if has_order and has_regions else inner(forward, backward, meta)


class Partitioning:
    """`_partition_joint_graph_into_fw_bw`, with the pass for graphs that have markers."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(
        self, gm: fx.GraphModule, inputs: Any, inner_meta: Any, meta: Any, config: Any, split: Any
    ) -> Any:
        from retrograd.compiling.partition import Partitioner, has_marks

        if not has_marks(gm):
            return self.inner(gm, inputs, inner_meta, meta, config, split)
        if not is_of_inductor(split):
            partitioner = Partitioner(split, reorders=False)
            return self.inner(gm, inputs, inner_meta, meta, config, partitioner)
        inductor: Any = importlib.import_module("torch._inductor.config")
        partitioner = inductor_partitioner(inductor.custom_partitioner_fn)
        with inductor.patch(custom_partitioner_fn=partitioner):
            return self.inner(gm, inputs, inner_meta, meta, config, split)


def backend() -> str:
    """The name of the backend that the compiler traces for; "" if it has none."""
    symbolic: Any = importlib.import_module("torch._dynamo.symbolic_convert")
    compiler = symbolic.InstructionTranslator.current_tx().output.compiler_fn
    return getattr(compiler, "_compiler_name", None) or ""


def is_dynamic() -> bool:
    """Whether everything is a variable from the first call on: `dynamic=True`."""
    config: Any = importlib.import_module("torch._dynamo.config")
    return not config.assume_static_by_default


# Runs a function as a region, if it is traced: `in_region(fn, *args, **kwargs)`.
_region: Any = None


def in_region(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return _region(TracedEachTime, fn, *args, **kwargs)


def _call(marker: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


class TracedEachTime:
    """An argument that lets torch trace a region for each call, and then merge equal graphs.

    Torch 2.13 would take the graph of another call, if the guards of that one hold here. They miss
    hooks and methods of one object: silently wrong results. Torch does so only if it knows the
    types of all arguments.
    """


def is_of_inductor(split: Any) -> bool:
    """Whether a partition function is Inductor's, which runs passes of its own first."""
    compile_fx: Any = sys.modules.get("torch._inductor.compile_fx")
    return compile_fx is not None and getattr(split, "func", split) is compile_fx.partition_fn


def inductor_partitioner(chosen: Any) -> Any:
    """A partitioner for Inductor's setting: the pass, then the one that the user chose."""
    from retrograd.compiling.partition import Partitioner

    register_lowerings()
    passes: Any = importlib.import_module("torch._inductor.custom_graph_pass")
    partitioner = Partitioner(chosen or min_cut(), reorders=True)

    class InductorPartitioner(passes.CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            return partitioner(gm, inputs, **kwargs)

        def uuid(self) -> Any:
            return "retrograd"

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    return InductorPartitioner()


def min_cut() -> Any:
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    return partitioners.min_cut_rematerialization_partition


def without_merging() -> Any:
    """A context in which partitioners do not merge equal nodes: copies would be originals again."""
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(cse=False)


def merge_equal_nodes(gm: fx.GraphModule) -> None:
    config: Any = importlib.import_module("torch._functorch.config")
    if config.cse:
        tools: Any = importlib.import_module("torch._functorch.compile_utils")
        gm.graph = tools.fx_graph_cse(gm.graph)


def is_effect_of_forward(node: fx.Node) -> bool:
    """Whether forward must run a node for what it does: it writes a buffer."""
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    return partitioners._must_be_in_forward(node)


def run_and_save_rng_state() -> Any:
    rng: Any = importlib.import_module("torch._prims.rng_prims")
    return rng.run_and_save_rng_state


def run_with_rng_state() -> Any:
    rng: Any = importlib.import_module("torch._prims.rng_prims")
    return rng.run_with_rng_state


def must_save() -> Any:
    return CheckpointPolicy.MUST_SAVE


@functools.cache
def register_lowerings() -> None:
    """How Inductor computes `ordered`: as a kernel of its own, after the kernels it waits for.

    Inductor inlines sums into their readers. `x + out1 + out2 + ...` would never be made, and every
    `out` would stay alive.
    """
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")

    @lowering.register_lowering(
        torch.ops.retrograd.ordered.default,
        type_promotion_kind=None,
    )
    def lower_ordered(value: Any, after: Any, update: int) -> Any:
        graph = virtualized.V.graph
        for other in after:
            other.realize()
        value.realize()
        if after:
            buffer = graph.name_to_buffer.get(value.get_name())
            if buffer is not None:
                dependencies = graph.additional_buffer_deps[buffer.get_operation_name()]
                dependencies.update(other.get_name() for other in after)
        return value
