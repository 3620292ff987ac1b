"""The table of forward hooks: order, arguments, failures, copies."""

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


def table(model, enter=("first", "second"), exit=("first", "second")):
    hooks = ForwardHooks(enter, exit)
    hooks.install(model)
    return hooks


def test_names_decide_the_order_and_results_are_passed_on():
    model, seen = Doubled(), []
    hooks = table(model, exit=("second", "first"))
    hooks.add("unknown", lambda module, args, kwargs: seen.append(args))
    hooks.add("second", lambda module, args, kwargs: ((args[0] + 1,), kwargs), lambda module, args, output: output + 1)
    hooks.add("first", lambda module, args, kwargs: ((args[0] * 10,), kwargs), lambda module, args, output: output * 10)
    assert model(2) == (21 * 2 + 1) * 10 and seen == [(21,)]
    assert [(when, name) for when, name, _ in hooks.rows()] == [
        ("before", "first"),
        ("before", "second"),
        ("before", "unknown"),
        ("after", "second"),
        ("after", "first"),
    ]
    assert str(hooks).splitlines()[0].split()[:2] == ["before", "first"]
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_an_exit_that_is_always_called_sees_no_output_of_a_failed_forward():
    model, seen = Doubled(), []
    hooks = table(model)
    hooks.add("first", exit=lambda module, args, output: seen.append(("first", output)))
    hooks.add("second", exit=lambda module, args, output: seen.append(("second", output)), always_exit=True)
    with pytest.raises(ValueError, match="failed"):
        model(1, fails=True)
    assert seen == [("second", None)]
    assert model(1) == 2 and seen[1:] == [("first", 2), ("second", 2)]


def test_an_exit_that_raises_leaves_out_none_that_is_always_called():
    model, seen = Doubled(), []
    hooks = table(model)

    def fail(module, args, output):
        raise RuntimeError("in a hook")

    hooks.add("first", exit=fail)
    hooks.add("second", exit=lambda module, args, output: seen.append("second"), always_exit=True)
    with pytest.raises(RuntimeError, match="in a hook"):
        model(1)
    assert seen == ["second"]


def test_functions_of_a_module_inside_are_hooks_of_its_own():
    model, seen = nn.Sequential(Doubled()), []
    hooks = table(model)
    for module in (model, model[0]):
        hooks.add_to(
            module,
            "first",
            lambda module, args, kwargs: seen.append(type(module).__name__),
            lambda module, args, output: output + 1,
        )
    assert model(1) == 4 and seen == ["Sequential", "Doubled"]
    assert len(hooks.rows()) == 2 and len(model[0]._forward_hooks) == 1


def test_the_table_encloses_hooks_of_another_library():
    model, seen = Doubled(), []
    hooks = table(model)
    hooks.add("first", lambda *_: seen.append("first"), lambda *_: seen.append("first"), always_exit=True)
    hooks.add("second", exit=lambda *_: seen.append("second"), always_exit=True)
    model.register_forward_pre_hook(lambda *_: seen.append("other"), prepend=True)
    model.register_forward_hook(lambda *_: seen.append("other"))
    model(1)
    assert seen == ["other", "first", "first", "second", "other"]
    seen.clear()
    hooks.enclose(["first"])
    model(1)
    assert seen == ["first", "other", "first", "other", "second"]
    seen.clear()
    with pytest.raises(ValueError, match="failed"):
        model(1, fails=True)
    assert seen == ["first", "other", "first", "second"]


def test_a_deep_copy_has_a_table_of_its_own():
    model = Doubled()
    hooks = table(model)
    hooks.add("first", lambda module, args, kwargs: ((args[0] + 1,), kwargs))
    copied = copy.deepcopy(model)
    hooks.add("second", lambda module, args, kwargs: ((args[0] + 100,), kwargs))
    assert (model(1), copied(1)) == (204, 4)


def test_hooks_of_users_come_after_the_table():
    model, seen = Doubled(), []
    hooks = table(model)
    model.register_forward_pre_hook(lambda module, args: seen.append(args))
    hooks.add("first", lambda module, args, kwargs: ((torch.ones(1),), kwargs))
    model(1)
    assert torch.is_tensor(seen[0][0])


def test_hooks_of_a_module_inside_are_in_their_declared_order():
    model, seen = nn.Sequential(Doubled()), []
    order = HookOrder(("outer", "first", "second"), ("second", "first"), frozenset({"outer"}))
    hooks = ForwardHooks(modules=order)
    hooks.install(model)
    model[0].register_forward_pre_hook(lambda *_: seen.append("other"))

    def note(name):
        return lambda *_: seen.append(name)

    class Owner:
        def enter(self, module, args, kwargs):
            seen.append("owner")

    owner = Owner()
    for name in ("second", "first", "outer"):
        hooks.add_to(model[0], name, note(name), note(f"after {name}"))
    hooks.add_to(model[0], "first", owner.enter)
    model(1)
    assert seen == ["outer", "other", "first", "owner", "second", "after second", "after first", "after outer"]
    assert [name for _, name, _ in hooks.module_rows()["0"]][:4] == ["outer", "first", "first", "second"]
    assert "0\n  before  outer" in str(hooks)
    assert hooks.owners(model[0]) == [owner]
    hooks.remove_from(model[0], owner)
    seen.clear()
    model(1)
    assert "owner" not in seen and seen[:2] == ["outer", "other"]
