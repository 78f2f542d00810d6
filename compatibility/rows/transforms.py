"""torch.func, export, and ways to copy and save a model."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from compatibility import networks
from compatibility.networks import Model
from compatibility.verdict import Rows, Scene

FUNC = Rows("torch.func")
EXPORT = Rows("Export")
COPIES = Rows("Copies")


# --- torch.func


def common(model: Model, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values by parameter, under names that do not depend on the contestant."""
    paths = {id(p): path for path, p in model.named_parameters()}
    return {name: found[paths[id(p)]] for name, p in model.named()}


def value(model: Model, parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(functional_call(model, parameters, (tokens,)), targets)


def detached(model: Model) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def with_grad(scene: Scene) -> Any:
    model = Model(scene.contestant)
    return common(model, grad(functools.partial(value, model))(detached(model), *networks.batch()))


def backward(scene: Scene) -> Any:
    return networks.steps(Model("plain"))["step 1"]


def per_sample(scene: Scene) -> Any:
    """The gradient of each sample of the batch."""
    model = Model(scene.contestant)
    tokens, targets = networks.batch()
    every = vmap(grad(functools.partial(value, model)), (None, 0, 0))(
        detached(model), tokens[:, None], targets[:, None]
    )
    return common(model, every)


def one_by_one(scene: Scene) -> Any:
    model = Model("plain")
    found = []
    for tokens, targets in zip(*networks.batch()):
        nn.functional.mse_loss(model(tokens[None]), targets[None]).backward()
        found.append(networks.gradients(model))
    return {name: torch.stack([sample[name] for sample in found]) for name in found[0]}  # type: ignore[misc]


def forward_mode(scene: Scene) -> Any:
    model = Model(scene.contestant)
    x = networks.stack_input()
    return dict(zip(("output", "tangent"), jvp(model.stack, (x,), (torch.ones_like(x),))))


def by_finite_differences(scene: Scene) -> Any:
    model = Model("plain")
    x = networks.stack_input()
    h = 1e-5
    with torch.no_grad():
        return {
            "output": model.stack(x),
            "tangent": (model.stack(x + h) - model.stack(x - h)) / (2 * h),
        }


def called(scene: Scene) -> Any:
    """A call with other parameters than the model's own, and an ordinary backward."""
    model = Model(scene.contestant)
    parameters = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    value(model, parameters, *networks.batch()).backward()
    return common(model, {name: p.grad for name, p in parameters.items()})  # type: ignore[misc]


def scaled(scene: Scene) -> Any:
    model = Model("plain")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return networks.steps(model)["step 1"]


FUNC.add("`grad`", with_grad, backward)
FUNC.add("`vmap` of `grad`: gradients of each sample", per_sample, one_by_one)
FUNC.add("`jvp`", forward_mode, by_finite_differences, limit=1e-6)
FUNC.add("`functional_call` and backward", called, scaled)


# --- export of the model in eval()


def evaluated(scene: Scene) -> Any:
    model = Model("plain", dropout=0.3).eval()
    with torch.no_grad():
        return {"output": model(networks.batch()[0])}


def exported(scene: Scene) -> Any:
    model = Model(scene.contestant, dropout=0.3).eval()
    program = torch.export.export(model, (networks.batch()[0],))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    return {"output": torch.export.load(stored).module()(networks.batch()[0])}


def with_any_batch(scene: Scene) -> Any:
    model = Model(scene.contestant, dropout=0.3).eval()
    tokens = networks.batch()[0]
    program = torch.export.export(
        model, (tokens[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    return {"output": program.module()(tokens)}


def onnx(scene: Scene) -> Any:
    import onnxruntime  # type: ignore[import-not-found]

    model = Model(scene.contestant, dropout=0.3, dtype=torch.float32).eval()
    tokens, _ = networks.batch()
    path = str(scene.folder / "model.onnx")
    torch.onnx.export(model, (tokens,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: tokens.cpu().numpy()})
    return {"output": torch.from_numpy(output).to(networks.DEVICE)}


EXPORT.add("`torch.export` of the model in `eval()`, saved and loaded", exported, evaluated)
EXPORT.add("`torch.export` with a dynamic batch", with_any_batch, evaluated)
EXPORT.add(
    "ONNX, run by onnxruntime", onnx, evaluated, limit=1e-5, needs=("onnxscript", "onnxruntime")
)


# --- copies of a model that was trained for a step; the copy is trained further


def trained(scene: Scene, **options: Any) -> Model:
    model = Model(scene.contestant, **options)
    networks.loss(model, 0).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
    model.zero_grad()
    return model


def go_on(model: Model) -> Any:
    return networks.steps(model, count=2)


def original(scene: Scene) -> Any:
    return go_on(trained(scene))


def deep_copied(scene: Scene) -> Any:
    return go_on(copy.deepcopy(trained(scene)))


def pickled(scene: Scene) -> Any:
    return go_on(pickle.loads(pickle.dumps(trained(scene))))


def saved_whole(scene: Scene) -> Any:
    stored = io.BytesIO()
    torch.save(trained(scene), stored)
    stored.seek(0)
    return go_on(torch.load(stored, weights_only=False))


def saved_weights(scene: Scene) -> Any:
    stored = io.BytesIO()
    torch.save(trained(scene).state_dict(), stored)
    stored.seek(0)
    model = Model(scene.contestant)
    model.load_state_dict(torch.load(stored, weights_only=True))
    return go_on(model)


def from_meta(scene: Scene) -> Any:
    """Built on the meta device, moved by `to_empty`, then loaded."""
    with torch.device("meta"):
        model = Model(scene.contestant)
    model.to_empty(device=networks.DEVICE)
    model.load_state_dict(trained(scene).state_dict())
    return go_on(model)


def assigned(scene: Scene) -> Any:
    """Built on the meta device; the loaded tensors become its parameters."""
    with torch.device("meta"):
        model = Model(scene.contestant)
    model.load_state_dict(trained(scene).state_dict(), assign=True)
    return go_on(model)


for title, run in {
    "`copy.deepcopy`": deep_copied,
    "`pickle`": pickled,
    "`torch.save` of the model": saved_whole,
    "`torch.save` of its weights, `torch.load(weights_only=True)`": saved_weights,
    "built on the meta device, then `to_empty`": from_meta,
    "built on the meta device, then `load_state_dict(assign=True)`": assigned,
}.items():
    COPIES.add(title, run, original)
