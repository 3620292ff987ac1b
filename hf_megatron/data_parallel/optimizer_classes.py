"""Optimizer classes by what they need to update a parameter: single entries, or the full parameter."""

# Optimizers that update each entry from that entry only, so that they can step on shards: package -> classes.
ELEMENTWISE = {
    "torch": {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"},
    "apex": {"FusedAdam", "FusedSGD", "FusedAdagrad"},
    "transformer_engine": {"FusedAdam", "FusedSGD"},
    "lion_pytorch": {"Lion"},
    "schedulefree": {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"},
}

# Optimizers that update each parameter from that parameter, its gradient and its own state: package -> classes.
LAYER_WISE = {
    "torch": {"Adafactor", "Muon"},
    "transformers": {"Adafactor"},
    "bitsandbytes": {"Adam", "Adam8bit", "Adam32bit", "AdamW", "AdamW8bit", "AdamW32bit"},
    "torchao": {"Adam8bit", "AdamW8bit"},
}


def is_elementwise(optimizer_class: type) -> bool:
    """Returns whether a class is known to update each entry from that entry only."""
    return _is_listed(optimizer_class, ELEMENTWISE)


def is_layer_wise(optimizer_class: type) -> bool:
    """Returns whether a class is known to need full parameters, one at a time."""
    return _is_listed(optimizer_class, LAYER_WISE)


def steps_on_single_parameters(optimizer_class: type) -> bool:
    """Returns whether a class is known to never combine values of several parameters."""
    if is_elementwise(optimizer_class) or is_layer_wise(optimizer_class):
        return True
    module = f"{optimizer_class.__module__}."
    return module.startswith("torch.optim.")


def known_elementwise() -> list[str]:
    """Returns the names of the known elementwise classes."""
    return sorted({name for names in ELEMENTWISE.values() for name in names})


def _is_listed(optimizer_class: type, table: dict[str, set[str]]) -> bool:
    package = optimizer_class.__module__.partition(".")[0]
    return optimizer_class.__name__ in table.get(package, ())
