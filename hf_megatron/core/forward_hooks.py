"""Declared order of the functions that run before and after the forwards of a parallelized model and its modules."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# (module, args, kwargs) -> new (args, kwargs), or `None` to keep them.
Enter = Callable[[Any, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]] | None]
# (module, args, output) -> a new output, or `None` to keep it.
Exit = Callable[[Any, tuple, Any], Any]


@dataclass(frozen=True)
class _Row:
    name: str
    call: Callable[..., Any]
    always: bool = False


@dataclass(frozen=True)
class HookOrder:
    """Names of hooks in the order in which they run; other names run last.

    Attributes:
        enter: before a forward.
        exit: after a forward.
        outside (`frozenset[str]`): names of `enter` that run before the hooks of other libraries on the same module,
            such as FSDP2's; all others run after these.
    """

    enter: Sequence[str] = ()
    exit: Sequence[str] = ()
    outside: frozenset[str] = frozenset()


class ForwardHooks:
    """One forward pre-hook and one forward hook of a model; each calls a table of functions in a declared order.

    Features add their functions by name while a model is parallelized; the declared order of the names determines the
    execution order, independent of the order of installation. Functions of submodules are separate hooks, which are
    kept in a declared order too. `print` shows the tables.

    Args:
        enter_order (`Sequence[str]`): names in the order in which their functions run before the model's forward; other
            names run last.
        exit_order (`Sequence[str]`): the same for functions after the forward.
        modules (`HookOrder`): the order of the hooks of each submodule.
    """

    def __init__(
        self, enter_order: Sequence[str] = (), exit_order: Sequence[str] = (), modules: HookOrder | None = None
    ):
        self._enter_order, self._exit_order = tuple(enter_order), tuple(exit_order)
        self._module_order = modules or HookOrder()
        self._modules: dict[nn.Module, _ModuleHooks] = {}
        self._enters: list[_Row] = []
        self._exits: list[_Row] = []
        self._model: nn.Module | None = None
        self._handles: tuple[Any, ...] = ()
        self._first_exits: frozenset[str] = frozenset()

    def install(self, model: nn.Module) -> None:
        """Registers the two hooks on a model."""
        self._model = model
        self._handles = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._exit, always_call=True),
        )

    def enclose(self, first_exits: Collection[str]) -> None:
        """Moves the hooks outside the hooks that another library, such as FSDP2, has registered on the model since.

        Functions before the forward then run before that library's hooks, functions after the forward run after them.

        Args:
            first_exits (`Collection[str]`): names whose functions still run before the library's hooks after the
                forward; they get a separate hook.
        """
        assert self._model is not None
        before, after = self._handles
        before.hooks_dict_ref().move_to_end(before.id, last=False)
        after.hooks_dict_ref().move_to_end(after.id)
        self._first_exits = frozenset(first_exits)
        self._model.register_forward_hook(self._exit_first, always_call=True, prepend=True)

    def add(
        self, name: str, enter: Enter | None = None, exit: Exit | None = None, *, always_exit: bool = False
    ) -> None:
        """Adds functions to the table.

        Args:
            name (`str`): a name of the declared orders; functions of one name run in the order of their addition.
            enter (`Callable`, *optional*): called before the forward.
            exit (`Callable`, *optional*): called after the forward.
            always_exit (`bool`, defaults to `False`): whether to call `exit` with the output `None` after a failed
                forward.
        """
        if enter is not None:
            _insert(self._enters, _Row(name, enter), self._enter_order)
        if exit is not None:
            _insert(self._exits, _Row(name, exit, always_exit), self._exit_order)

    def add_to(
        self,
        module: nn.Module,
        name: str,
        enter: Enter | None = None,
        exit: Exit | None = None,
        *,
        always_exit: bool = False,
    ) -> None:
        """Adds functions of a module: to the table for the model itself, as separate hooks for its submodules.

        Arguments as for `add`; names of submodules' functions are those of `HookOrder`.
        """
        if module is self._model:
            self.add(name, enter, exit, always_exit=always_exit)
            return
        hooks = self._modules.setdefault(module, _ModuleHooks())
        if enter is not None:
            handle = module.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.add_enter(_Row(name, enter), handle, self._module_order)
        if exit is not None:
            handle = module.register_forward_hook(exit, always_call=always_exit)
            hooks.add_exit(_Row(name, exit, always_exit), handle, self._module_order)

    def owners(self, module: nn.Module) -> list[Any]:
        """Returns the objects, each once, whose methods are hooks of a submodule."""
        return self._modules[module].owners() if module in self._modules else []

    def remove_from(self, module: nn.Module, owner: Any) -> None:
        """Removes the hooks of a submodule that are methods of an object."""
        self._modules[module].remove(owner)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        for row in self._enters:
            result = row.call(model, args, kwargs)
            if result is not None:
                args, kwargs = result
        return args, kwargs

    def _exit_first(self, model: nn.Module, args: tuple, output: Any) -> Any:
        return self._walk_exits([row for row in self._exits if row.name in self._first_exits], model, args, output)

    def _exit(self, model: nn.Module, args: tuple, output: Any) -> Any:
        rows = [row for row in self._exits if row.name not in self._first_exits] if self._first_exits else self._exits
        return self._walk_exits(rows, model, args, output)

    def _walk_exits(self, rows: Sequence[_Row], model: nn.Module, args: tuple, output: Any) -> Any:
        # torch also calls the hook after an error, with the output None, which no transformers model returns.
        has_failed = output is None
        for index, row in enumerate(rows):
            if has_failed and not row.always:
                continue
            try:
                result = row.call(model, args, output)
            except BaseException:
                # Cleanup functions run even if this one raised; as torch does with several hooks.
                for other in rows[index + 1 :]:
                    if other.always:
                        other.call(model, args, None)
                raise
            if result is not None:
                output = result
        return output

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table: `"before"` or `"after"`, the name, and the function's module and qualified name."""
        return [
            (when, row.name, _name_of(row.call))
            for when, rows in (("before", self._enters), ("after", self._exits))
            for row in rows
        ]

    def module_rows(self) -> dict[str, list[tuple[str, str, str]]]:
        """Returns the hooks of submodules like `rows`, by the name of the module; only modules with several."""
        if self._model is None:
            return {}
        return {
            name: rows
            for name, module in self._model.named_modules()
            if module in self._modules and len(rows := self._modules[module].rows()) > 1
        }

    def __str__(self) -> str:
        lines = [f"{when:<8}{name:<22}{function}" for when, name, function in self.rows()]
        for module, rows in self.module_rows().items():
            lines += [module, *(f"  {when:<8}{name:<22}{function}" for when, name, function in rows)]
        return "\n".join(lines)


class _ModuleHooks:
    """Hooks of one submodule, in their declared order."""

    def __init__(self) -> None:
        self._enters: list[tuple[_Row, Any]] = []
        self._exits: list[tuple[_Row, Any]] = []

    def add_enter(self, row: _Row, handle: Any, order: HookOrder) -> None:
        """Adds a hook that was registered last, and moves all hooks of the module to their places."""
        self._enters.append((row, handle))
        self._enters.sort(key=lambda entry: _place(entry[0].name, order.enter))
        for one, registered in self._enters:
            if one.name not in order.outside:
                registered.hooks_dict_ref().move_to_end(registered.id)
        # Reversed: each is moved in front of the others.
        for one, registered in reversed(self._enters):
            if one.name in order.outside:
                registered.hooks_dict_ref().move_to_end(registered.id, last=False)

    def add_exit(self, row: _Row, handle: Any, order: HookOrder) -> None:
        """Adds a hook that was registered last, and moves all hooks of the module to their places."""
        self._exits.append((row, handle))
        self._exits.sort(key=lambda entry: _place(entry[0].name, order.exit))
        for _, registered in self._exits:
            registered.hooks_dict_ref().move_to_end(registered.id)

    def owners(self) -> list[Any]:
        """Returns the objects whose methods are hooks, each once."""
        bound = (getattr(row.call, "__self__", None) for row, _ in (*self._enters, *self._exits))
        return list({id(owner): owner for owner in bound if owner is not None}.values())

    def remove(self, owner: Any) -> None:
        """Removes the hooks that are methods of an object."""
        for entries in (self._enters, self._exits):
            for entry in [entry for entry in entries if getattr(entry[0].call, "__self__", None) is owner]:
                entry[1].remove()
                entries.remove(entry)

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the hooks as `ForwardHooks.rows` does."""
        return [
            (when, row.name, _name_of(row.call))
            for when, entries in (("before", self._enters), ("after", self._exits))
            for row, _ in entries
        ]


def _name_of(function: Any) -> str:
    inner = getattr(function, "func", function)
    return f"{inner.__module__.removeprefix('hf_megatron.')}.{inner.__qualname__}"


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _insert(rows: list[_Row], row: _Row, order: Sequence[str]) -> None:
    rows.append(row)
    rows.sort(key=lambda one: _place(one.name, order))
