"""Errors that arise while a network runs. Wrong arguments are plain `ValueError` or `TypeError`,
raised before any work.

Every message has four parts: where (which update), what (the number beside its limit), why, and the
fix to type. The texts stand here together, so that they read alike; who raises one knows only the
facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import (
    frexp,
    inf,
    isfinite,
)
from typing import Any


class RetrogradError(RuntimeError):
    """Parent of every error that retrograd raises while a network runs."""


class OutputError(RetrogradError, ValueError):
    """A function returned something that cannot enter its target stream."""


class InPlaceError(RetrogradError):
    """A tensor that backward needs was changed in place."""


class RecomputeError(RetrogradError):
    """A function did something else the second time it ran."""


class DriftError(RecomputeError):
    """Rounding errors of the rebuilt streams have grown beyond what their dtype explains."""


class DriftWarning(RuntimeWarning):
    """What `DriftError` says, as a warning. Not a `UserWarning`: there are libraries that switch
    those off for everyone.
    """


class GridError(RetrogradError):
    """A value is too large for the grid of exact reversal."""


class CouplingError(RetrogradError):
    """A coupling's `inverse` does not undo its `forward`."""


class ConversionError(RetrogradError, ValueError):
    """A model whose layers cannot be made reversible. It is left as it was."""


def explain(
    kind: type[RetrogradError], where: str, what: str, why: str, fix: str
) -> RetrogradError:
    """An error with the facts on its first line, then the reason and what to type."""
    return kind(f"{where} {what}\n  Why: {why}\n  Fix: {fix}")


def note(
    error: Exception,
    where: str,
    reads: Sequence[tuple[str, Sequence[Any]]],
) -> None:
    """Add to a user's exception, which stays as it is, in which update it came up."""
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is None or isinstance(error, RetrogradError):
        return
    streams = []
    for name, leaves in reads:
        kinds = [f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in leaves]
        streams.append(f"{name}: {', '.join(kinds)}")
    add_note(f"in {where}, which reads {'; '.join(streams) or 'no stream'}")


def misfit(
    where: str,
    returned: str,
    fix: str,
) -> RetrogradError:
    why = (
        "an output can be taken back out of its target only if it has the target's structure, "
        "shape and dtype."
    )
    return explain(OutputError, where, f"returned {returned}.", why, fix)


def out_of_range(
    where: str, stream: str, value: float, largest: float, limit: float, bits: int, dtype: str
) -> RetrogradError:
    """`value` is the first beyond the limit, `largest` the largest of the whole call."""
    what = f"stream {stream!r} holds {value:.4g}, and its grid ends at {limit:.4g}."
    why = (
        f"beyond that, sums of multiples of 2**-{bits} are rounded, and undoing an update would "
        "not restore every bit."
    )
    fixes = ["look for what made it so large, or normalise the stream"]
    if isfinite(largest):
        coarse = bits - frexp(largest / limit)[1]  # as many bits less as powers of two are missing
        wide = ", dtype=torch.float64" if dtype == "float64" else ""
        fixes = [f"exact=rg.Grid(bits={coarse}{wide})"] if coarse >= 0 else fixes
        if dtype == "float32" and largest < 2**21:
            fixes.append("exact=rg.Grid(dtype=torch.float64), whose range is 2,097,152")
    return explain(GridError, where, what, why, ", or ".join(fixes) + ".")


def coarse_ratio(a: float, fraction: str, off: float, most: int) -> RetrogradError:
    return explain(
        GridError,
        f"{a!r}, which is {fraction},",
        f"is too fine a ratio for this grid: products would be off by up to {off:.2g}.",
        "exact reversal mixes stored digits into a product, as many steps of the grid as the "
        "numerator says.",
        f"choose a ratio with a numerator up to {most}, such as 15/16, or "
        "exact=rg.Grid(dtype=torch.float64).",
    )


def whole_numbers(coupling: str, dtype: str) -> RetrogradError:
    return explain(
        OutputError,
        f"{coupling}",
        f"multiplies a stream of {dtype}.",
        "whole numbers times a ratio are no whole numbers.",
        "pass that part as a keyword argument, or use a rule or coupling that adds only.",
    )


def off_grid(where: str, bits: int) -> RetrogradError:
    return explain(
        CouplingError,
        where,
        f"is a transform whose result is not on the grid: not multiples of 2**-{bits}.",
        "later updates are exact on the grid only, and would rebuild other values.",
        "use a map that moves values and does not change them (a permutation, a reshape), or "
        "exact=False.",
    )


def drifted(
    where: str,
    stream: str,
    error: float,
    limit: float,
) -> RetrogradError:
    what = (
        f"rebuilt stream {stream!r} is off by {error:.0e} of its size; healthy networks of this "
        f"dtype stay below {limit:.0e}."
    )
    why = (
        "undoing an update rounds, and the errors add up; or a function did something else in "
        "recompute."
    )
    fix = (
        "rg.check(model, x) tells which. exact=True restores every bit; rg.Additive() and a wider "
        "stream_dtype drift less."
    )
    return explain(DriftError, where, what, why, fix)


def edited_input(
    where: str,
    stream: str,
    kind: str,
) -> RetrogradError:
    what = f"changed its input in place: stream {stream!r}, {kind}."
    why = "backward runs the function again and must find the input that forward found."
    fix = (
        "use the out-of-place operation (x + 1, not x.add_(1); inplace=False), or start the "
        "function with x.clone()."
    )
    return explain(InPlaceError, where, what, why, fix)


def edited_output(where: str, what: str) -> RetrogradError:
    why = "activations are rebuilt from it; from the edited value they would come out wrong."
    fix = "edit a copy: y = y + 1 instead of y += 1, or y.clone() first."
    return explain(
        InPlaceError, where, f"needs {what}, and it was edited in place after forward.", why, fix
    )


def edited_after_save(
    where: str,
    kind: str,
    versions: tuple[int, int],
) -> RetrogradError:
    what = (
        f"edits {kind} in place after autograd saved it (version {versions[0]}, now {versions[1]})."
    )
    why = "its backward would be computed from the edited value."
    return explain(
        InPlaceError,
        where,
        what,
        why,
        "use the out-of-place operation, as plain autograd would also demand.",
    )


def edited_parameter(
    where: str,
    name: str,
    versions: tuple[int, int],
) -> RetrogradError:
    what = (
        f"needs parameter {name!r} as forward saw it (version {versions[0]}), but it is at "
        f"version {versions[1]}."
    )
    why = "the function would be recomputed with other weights than it ran with."
    return explain(
        InPlaceError,
        where,
        what,
        why,
        "call backward() before optimizer.step(), and edit parameters after it.",
    )


def lost_parameter(name: str) -> RetrogradError:
    what = f"needs parameter {name!r} of a module, and the module has no such parameter any more."
    why = (
        "it was pruned, parametrized or otherwise rebuilt after forward, and the function must "
        "run again as it was."
    )
    return explain(
        RecomputeError, "backward", what, why, "call backward() first, and change modules after it."
    )


def scripted(name: str) -> RetrogradError:
    what = f"has buffers ({name!r}) in TorchScript."
    why = (
        "buffers must be what forward saw when it runs again, and those of a script cannot be "
        "swapped."
    )
    return explain(
        RetrogradError,
        "a function",
        what,
        why,
        "use the module itself, torch.compile, or memory=rg.Keep().",
    )


def in_inference_mode() -> RetrogradError:
    what = "was called under torch.inference_mode()."
    why = "functions run again there, and tensors of inference mode have no gradients."
    return explain(
        RetrogradError,
        "backward",
        what,
        why,
        "call backward() outside of it; torch.no_grad() is fine.",
    )


def edited_buffer(
    where: str,
    name: str,
    versions: tuple[int, int],
) -> RetrogradError:
    what = (
        f"needs buffer {name!r} as forward saw it (version {versions[0]}), but it is at version "
        f"{versions[1]}."
    )
    why = "the function would be recomputed with another buffer than it ran with."
    return explain(
        InPlaceError,
        where,
        what,
        why,
        "edit buffers after backward(), or assign a new tensor instead of editing.",
    )


def stale_activation() -> RetrogradError:
    what = "is asked for a tensor that a function stored while it was recomputed."
    why = "recomputed activations live only until backward is past their update."
    fix = "in the function, store it only if not rg.is_recomputing(), or return it with rg.WithAux."
    return explain(RetrogradError, "backward", what, why, fix)


def inverse_in_place(where: str, coupling: str) -> RetrogradError:
    what = f"uses coupling {coupling}, whose inverse edits y in place."
    why = "y may be the caller's tensor."
    return explain(
        CouplingError,
        where,
        what,
        why,
        f"write inverse(y, out) out of place; {coupling}.inverse_(y, out) may edit y.",
    )


def replaced_stream(
    where: str,
    stream: str,
    before: str,
    after: str,
) -> RetrogradError:
    what = (
        f"a hook on the block replaced stream {stream!r}: {before} became "
        f"{'another' if before == after else after}."
    )
    why = "what happens to a stream outside its updates cannot be undone in backward."
    fix = (
        "hook f and g instead; under FSDP2 leave out MixedPrecisionPolicy(output_dtype=...), or "
        "fully_shard f and g."
    )
    return explain(RetrogradError, where, what, why, fix)


def wrong_inverse(
    where: str, coupling: str, error: float, limit: float, dtype: str
) -> RetrogradError:
    what = (
        f"uses coupling {coupling}, whose inverse misses the target by {error:.1e} of its size "
        f"(limit {limit:.1e} for {dtype})."
    )
    why = f"{coupling}.inverse(y, out) must give back x, where y = {coupling}.forward(x, out)."
    fix = "solve forward for x in inverse, and keep factors away from zero (see rg.Affine)."
    return explain(CouplingError, where, what, why, fix)


def wrong_transform(where: str, what: str) -> RetrogradError:
    return explain(
        CouplingError,
        where,
        f"is a transform whose inverse {what}.",
        "inverse(fn(x)) must give back x: backward rebuilds the stream with it.",
        "correct the inverse, or use rg.Update with the target among its reads, which keeps the "
        "target; with exact=True the inverse must be exact to the bit (a permutation is).",
    )


def output_was_dropped() -> RetrogradError:
    return explain(
        RecomputeError,
        "backward",
        "goes through a stack whose output is gone.",
        "the output holds what is needed to run the functions again; the loss uses only a tensor "
        "that a function stored on the way.",
        "keep the output of the stack until backward, or return the tensor as rg.WithAux(output, "
        "tensor).",
    )


def already_passed(where: str) -> RetrogradError:
    why = "an earlier backward freed the streams it was rebuilt from, or was interrupted."
    fix = "run forward again; for a second backward, call the first with retain_graph=True."
    return explain(
        RetrogradError, where, "is asked for after backward has already passed it.", why, fix
    )


def not_exact(
    where: str,
    stream: str,
    error: float,
) -> RetrogradError:
    what = (
        f"rebuilt stream {stream!r} is off by {error:.1e}, and with exact=True nothing may be off."
    )
    why = (
        "a function gave another output in recompute: it has state outside its modules, or its "
        "kernels are not deterministic."
    )
    fix = (
        "rg.check(model, x) names it; rg.is_recomputing(); "
        "torch.use_deterministic_algorithms(True) shows kernels that are not."
    )
    return explain(RecomputeError, f"the walk back to {where}:", what, why, fix)


def wrong_arrival(
    where: str, stream: str, error: float, scale: float, limit: float
) -> RetrogradError:
    size = error / scale if scale else inf
    what = (
        f"did not arrive where forward was: stream {stream!r} is off by {size:.1e} of its size "
        f"(limit {limit:.0e})."
    )
    why = (
        "a function gave another output in recompute (state outside its modules), or rounding "
        "grew on the way (momentum, affine)."
    )
    fix = (
        "rg.check(model, x) tells which; leave such state alone with rg.is_recomputing(); prefer "
        "exact=True or wider streams."
    )
    return explain(RecomputeError, f"the walk back to {where}", what, why, fix)


def infinite_stream(where: str, stream: str) -> RetrogradError:
    return explain(
        RecomputeError,
        f"the walk back to {where}:",
        f"stream {stream!r} was finite in forward and is not when it is rebuilt.",
        "a later update added an infinite value (a mask of -inf, an overflow), and undoing gives "
        "inf - inf.",
        "mask inside the functions, or with a large finite number such as -1e9; "
        "memory=rg.Keep() if the stream has to become infinite.",
    )


def not_repeated(
    where: str,
    what: str,
    kind: str,
    off: float,
    limit: float,
) -> RetrogradError:
    return explain(
        RecomputeError,
        where,
        f"did something else when it ran again in backward: {what}, {kind}, is off by {off:.1e} "
        f"(limit {limit:.0e}).",
        "it uses state that cannot be replayed (a counter, Python's or NumPy's random, a file), or "
        "routing that depends on rounding.",
        "rg.check(model, x) names the cause; rg.is_recomputing() lets the function leave such "
        "state alone; exact=True removes rounding.",
    )


def drawn_elsewhere(where: str, threads: int) -> RetrogradError:
    others = "another thread runs" if threads == 1 else f"{threads} other threads run"
    return explain(
        RecomputeError,
        where,
        f"drew other random numbers in backward than in forward, while {others}.",
        "all threads share torch's default generator. If another one draws while a function runs, "
        "the numbers that the function gets cannot be had again.",
        "give the other threads generators of their own (torch.rand(n, generator=own)); or let "
        "every thread hold one threading.Lock while it draws, and from forward to the end of "
        "backward; or draw in another process.",
    )


def unreadable_generator(where: str, device: Any) -> RetrogradError:
    kind = device.type
    return explain(
        RetrogradError,
        where,
        f"draws random numbers on {device}.",
        f"torch.{kind} has no get_rng_state and set_rng_state, so a recompute could not draw the "
        "same numbers.",
        "draw on the CPU and move the result, pass a torch.Generator of the device, or use "
        "memory=rg.Keep().",
    )


def capture_looks(setting: str) -> RetrogradError:
    return explain(
        RetrogradError,
        "a stack inside a graph capture",
        f"would look at values on the device: {setting}.",
        "nothing runs while a graph is captured, so there are no values yet.",
        'before capturing, set stack.drift = "ignore" and stack.verify = "never", and run two '
        "steps.",
    )


def no_host_tier(budget: str, kinds: list[str]) -> ValueError:
    where = " and ".join(kinds) or "no device"
    why = (
        "the memory of a CPU is that of the host"
        if kinds == ["cpu"]
        else "copies beside the work need an accelerator with streams"
    )
    return ValueError(
        f"{budget}: the streams are on {where}, so nothing can wait on the host: {why}.\n"
        "  Fix: leave out host=, or move the model and its input to an accelerator."
    )


def capture_copies() -> RetrogradError:
    return explain(
        RetrogradError,
        "a stack inside a graph capture",
        "would keep values on the host.",
        "its buffers there are used again by later calls, which a graph does not know.",
        'use a budget without a host tier: stack.memory = rg.Budget("2 GiB").',
    )


def capture_draws() -> RetrogradError:
    return explain(
        RetrogradError,
        "a stack inside a graph capture",
        "has functions that draw random numbers.",
        "the state of a generator cannot be read while a graph is captured, so a recompute could "
        "not draw the same numbers.",
        "capture without dropout (p=0, or eval()), or use memory=rg.Keep().",
    )


def changed_argument(where: str, kind: str) -> RetrogradError:
    return explain(
        RecomputeError,
        where,
        f"changed an object in its keyword arguments, a {kind}, when it ran again in backward.",
        "forward had changed it already. So it would end up in another state than with plain "
        "autograd, and every later function would see that.",
        "leave it alone if rg.is_recomputing(); pass no cache in training (use_cache=False).",
    )


def recompute_raised(where: str, error: Exception) -> RetrogradError:
    name = type(error).__name__
    return explain(
        RecomputeError,
        where,
        f"raised {name} when it ran again in backward; forward had passed there: {error}",
        "the function found something else than in forward: a cache that grew, a file, a counter.",
        "rg.is_recomputing() lets the function leave such state alone; rg.check(model, x) helps.",
    )


def other_recompute(
    where: str,
    then: list[Any],
    now: list[Any],
) -> RetrogradError:
    """`then` and `now` hold the shape and dtype of each tensor that was saved."""
    pairs = zip([*then, *[None] * len(now)], [*now, *[None] * len(then)])
    first = next((a, b) for a, b in pairs if a != b)
    a, b = (f"{str(m[1]).removeprefix('torch.')}{list(m[0])}" if m else "nothing" for m in first)
    return RecomputeError(
        f"{where} saved {len(then)} tensors in forward and {len(now)} in recompute.\n"
        f"  First difference: forward saved {a}, recompute {b}.\n"
        "  Usual causes: a cache that grows on each call, Python's or NumPy's random, routing "
        "that depends on rounding;\n"
        "  an attribute (an adapter, a flag) or a backend (sdpa_kernel) that was another one when "
        "forward ran.\n"
        "  Fix: rg.check(model, x) names it; rg.is_recomputing() lets the function leave such "
        "state alone."
    )


def other_pins(
    where: str,
    then: int,
    now: int,
) -> RetrogradError:
    """A function pinned another number of values in recompute."""
    more = "at least " if now > then else ""
    return RecomputeError(
        f"{where} called rg.pin {then} times in forward and {more}{now} times in recompute.\n"
        "  Pinned values are told apart by their order, so these cannot be told apart.\n"
        "  Fix: call rg.pin outside of branches that depend on tensors, or pin what the branch "
        "depends on first."
    )
