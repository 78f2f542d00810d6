"""`Saved`: the one way in which the engine keeps a tensor."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import retrograd as rg
from retrograd.core.private import surrounding_hooks
from retrograd.core.saved import KeywordArguments, load_state, save, save_state


def test_a_tensor_and_its_version():
    tensor = torch.zeros(3)
    saved = save(tensor)
    assert saved.get("here", "a tensor") is tensor
    assert not saved.is_edited
    tensor.add_(1)
    assert saved.is_edited
    with pytest.raises(rg.InPlaceError, match="here needs a tensor, and it was edited in place"):
        saved.get("here", "a tensor")


def test_hooks_around_us_pack_it():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    with saved_tensors_hooks(pack, packed.__getitem__):
        saved = save(torch.ones(2), surrounding_hooks())
    assert saved.content == 0
    assert torch.equal(saved.get("here", "it"), torch.ones(2))
    with save_on_cpu():
        saved = save(torch.ones(2), surrounding_hooks())
    assert torch.equal(saved.get("here", "it"), torch.ones(2))


def test_a_state_is_saved_outside_the_graph():
    leaf = torch.ones(2, requires_grad=True) * 2
    state = load_state(save_state({"a": (leaf,)}), "here", "a stream")
    assert not state["a"][0].requires_grad
    assert state["a"][0].data_ptr() == leaf.data_ptr()


def test_keyword_arguments_come_back_in_fresh_containers_and_one_tensor_stays_one():
    mask = torch.ones(2)
    context = torch.ones(2, requires_grad=True)
    cache = [mask]
    arguments = KeywordArguments({"cache": cache, "mask": mask, "context": context, "n": 3})
    again = arguments.get()
    assert again["cache"] is not cache
    assert again["cache"][0] is again["mask"]
    assert again["context"].requires_grad and not again["context"].is_leaf
    assert again["n"] == 3
    mask.add_(1)
    arguments.release()
    with pytest.raises(rg.InPlaceError, match="a tensor in a keyword argument"):
        arguments.get()
