"""Deprecation of public names, arguments and settings."""

import warnings


def deprecated(name: str, *, instead: str, removed_in: str, stacklevel: int = 3) -> None:
    """Warns that a public name, argument or setting will be removed.

    Call it where the name is used, with literals: a test reads them and fails once the version has been reached.

    Args:
        name (`str`): what is deprecated, such as `MegatronConfig(tensor_parallel=...)`.
        instead (`str`): what to use, such as `tp_size`.
        removed_in (`str`): the version without it, such as `"0.3.0"`.
        stacklevel (`int`, defaults to 3): frame that the warning names, counted from this function; 3 is the caller of
            the function that calls this one.
    """
    warnings.warn(
        f"{name} is deprecated and will be removed in hf_megatron {removed_in}. Use {instead}.",
        FutureWarning,
        stacklevel=stacklevel,
    )
