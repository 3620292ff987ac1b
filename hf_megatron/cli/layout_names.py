"""The name of a layout of which single sizes were stated."""


def layout_of_sizes(tp: int, sp: bool, cp: int, pp: int, ep: int) -> str:
    """Spells sizes as a layout, with the data parallel ranks that experts need beyond those of tp and cp."""
    experts = f"+dp{max(ep // (tp * cp), 1)}+ep{ep}" if ep > 1 else ""
    return f"tp{tp}" + ("+sp" if sp else "") + (f"+cp{cp}" if cp > 1 else "") + f"+pp{pp}" + experts
