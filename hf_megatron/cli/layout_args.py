"""Layouts of which single sizes, and recomputation by a word, were stated."""

from ..config import CHOICES
from ..errors import ConfigError


def recompute_mode(word: str) -> str | None:
    """Reads `MegatronConfig.recompute`, `none` for nothing; raises `ConfigError` for another word."""
    modes = {"none" if mode is None else str(mode): mode for mode in CHOICES["recompute"]}
    if word not in modes:
        raise ConfigError(f"--recompute {word}: valid are {', '.join(modes)}.")
    return modes[word]


def layout_of_sizes(tp: int, sp: bool, cp: int, pp: int, ep: int) -> str:
    """Spells sizes as a layout, with the data parallel ranks that experts need beyond those of tp and cp."""
    experts = f"+dp{max(ep // (tp * cp), 1)}+ep{ep}" if ep > 1 else ""
    return f"tp{tp}" + ("+sp" if sp else "") + (f"+cp{cp}" if cp > 1 else "") + f"+pp{pp}" + experts
