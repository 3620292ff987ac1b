"""Tests of forward hooks: order, arguments, failures and copies."""

import copy

import pytest
import torch
from torch import nn

from hf_megatron.core.forward_hooks import ForwardHooks, HookOrder


class Doubled(nn.Module):
    def forward(self, number, fails=False):
        if fails:
            raise ValueError("failed")
        return number * 2


def install_hooks(model, enter=("first", "second"), exit=("first", "second")):
    hooks = ForwardHooks(enter, exit)
    hooks.install(model)
    return hooks


def test_hook_names_set_order_and_results_propagate():
    model, calls = Doubled(), []
    hooks = install_hooks(model, exit=("second", "first"))
    hooks.add("unknown", lambda module, args, kwargs: calls.append(args))
    hooks.add("second", lambda module, args, kwargs: ((args[0] + 1,), kwargs), lambda module, args, output: output + 1)
    hooks.add("first", lambda module, args, kwargs: ((args[0] * 10,), kwargs), lambda module, args, output: output * 10)
    assert model(2) == (21 * 2 + 1) * 10 and calls == [(21,)]
    assert [(when, name) for when, name, _ in hooks.rows()] == [
        ("before", "first"),
        ("before", "second"),
        ("before", "unknown"),
        ("after", "second"),
        ("after", "first"),
    ]
    assert str(hooks).splitlines()[0].split()[:2] == ["before", "first"]
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_always_exit_hook_gets_none_after_failed_forward():
    model, calls = Doubled(), []
    hooks = install_hooks(model)
    hooks.add("first", exit=lambda module, args, output: calls.append(("first", output)))
    hooks.add("second", exit=lambda module, args, output: calls.append(("second", output)), always_exit=True)
    with pytest.raises(ValueError, match="failed"):
        model(1, fails=True)
    assert calls == [("second", None)]
    assert model(1) == 2 and calls[1:] == [("first", 2), ("second", 2)]


def test_always_exit_hooks_run_after_a_raising_hook():
    model, calls = Doubled(), []
    hooks = install_hooks(model)

    def fail(module, args, output):
        raise RuntimeError("in a hook")

    hooks.add("first", exit=fail)
    hooks.add("second", exit=lambda module, args, output: calls.append("second"), always_exit=True)
    with pytest.raises(RuntimeError, match="in a hook"):
        model(1)
    assert calls == ["second"]


def test_submodule_hooks_are_installed_on_the_submodule():
    model, calls = nn.Sequential(Doubled()), []
    hooks = install_hooks(model)
    for module in (model, model[0]):
        hooks.add_to(
            module,
            "first",
            lambda module, args, kwargs: calls.append(type(module).__name__),
            lambda module, args, output: output + 1,
        )
    assert model(1) == 4 and calls == ["Sequential", "Doubled"]
    assert len(hooks.rows()) == 2 and len(model[0]._forward_hooks) == 1


def test_enclosing_hooks_wrap_third_party_hooks():
    model, calls = Doubled(), []
    hooks = install_hooks(model)
    hooks.add("first", lambda *_: calls.append("first"), lambda *_: calls.append("first"), always_exit=True)
    hooks.add("second", exit=lambda *_: calls.append("second"), always_exit=True)
    model.register_forward_pre_hook(lambda *_: calls.append("other"), prepend=True)
    model.register_forward_hook(lambda *_: calls.append("other"))
    model(1)
    assert calls == ["other", "first", "first", "second", "other"]
    calls.clear()
    hooks.enclose(["first"])
    model(1)
    assert calls == ["first", "other", "first", "other", "second"]
    calls.clear()
    with pytest.raises(ValueError, match="failed"):
        model(1, fails=True)
    assert calls == ["first", "other", "first", "second"]


def test_deepcopy_has_independent_hooks():
    model = Doubled()
    hooks = install_hooks(model)
    hooks.add("first", lambda module, args, kwargs: ((args[0] + 1,), kwargs))
    copied = copy.deepcopy(model)
    hooks.add("second", lambda module, args, kwargs: ((args[0] + 100,), kwargs))
    assert (model(1), copied(1)) == (204, 4)


def test_user_hooks_run_after_registered_hooks():
    model, calls = Doubled(), []
    hooks = install_hooks(model)
    model.register_forward_pre_hook(lambda module, args: calls.append(args))
    hooks.add("first", lambda module, args, kwargs: ((torch.ones(1),), kwargs))
    model(1)
    assert torch.is_tensor(calls[0][0])


def test_submodule_hooks_run_in_declared_order():
    model, calls = nn.Sequential(Doubled()), []
    order = HookOrder(("outer", "first", "second"), ("second", "first"), frozenset({"outer"}))
    hooks = ForwardHooks(modules=order)
    hooks.install(model)
    model[0].register_forward_pre_hook(lambda *_: calls.append("other"))

    def record(name):
        return lambda *_: calls.append(name)

    class Owner:
        def enter(self, module, args, kwargs):
            calls.append("owner")

    owner = Owner()
    for name in ("second", "first", "outer"):
        hooks.add_to(model[0], name, record(name), record(f"after {name}"))
    hooks.add_to(model[0], "first", owner.enter)
    model(1)
    assert calls == ["outer", "other", "first", "owner", "second", "after second", "after first", "after outer"]
    assert [name for _, name, _ in hooks.module_rows()["0"]][:4] == ["outer", "first", "first", "second"]
    assert "0\n  before  outer" in str(hooks)
    assert hooks.owners(model[0]) == [owner]
    hooks.remove_from(model[0], owner)
    calls.clear()
    model(1)
    assert "owner" not in calls and calls[:2] == ["outer", "other"]
