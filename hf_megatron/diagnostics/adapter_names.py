"""What a parameter or module is called in the model that was loaded, whatever is around that one."""


def strip_adapter_prefix(name: str) -> str:
    """Returns a name in a `PeftModel` as it is inside of the model that was loaded, by which claims know it."""
    return name.removeprefix("base_model.model.")
