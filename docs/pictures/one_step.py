"""Draws docs/pictures/one_step.svg: `python docs/pictures/one_step.py`."""

from pathlib import Path

WIDTH, HEIGHT = 760, 370
BOX = 'fill="#f6f8fa" stroke="#57606a" rx="8"'
STYLE = "<style>text{font:13px sans-serif;fill:#24292f}.b{font-weight:600}.s{fill:#57606a;font-size:12px}</style>"
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#0969da"/></marker></defs>'
)


def text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def rank(x: int, y: int, name: str, lines: tuple[str, ...]) -> str:
    rows = "".join(text(x + 14, y + 48 + 19 * i, line, "s") for i, line in enumerate(lines))
    return f'<rect x="{x}" y="{y}" width="210" height="104" {BOX}/>' + text(x + 14, y + 25, name, "b") + rows


def arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool) -> str:
    start = ' marker-start="url(#a)"' if both else ""
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#0969da" stroke-width="1.5"{start} marker-end="url(#a)"/>'


def picture() -> str:
    """Returns four ranks of tp_size=2, pp_size=2 and what they exchange."""
    half = ("half of the attention heads", "and of the MLP width")
    parts = [
        text(40, 28, "stage 0: embedding, layers 0-17", "b"),
        text(510, 28, "stage 1: layers 18-35, norm, head", "b"),
        rank(40, 44, "rank 0", (*half, "half of the embedding")),
        rank(40, 206, "rank 1", ("the other halves",)),
        rank(510, 44, "rank 2", (*half, "half of the head's vocabulary")),
        rank(510, 206, "rank 3", ("the other halves",)),
        arrow(145, 152, 145, 202, both=True),
        text(158, 172, "tp: all-reduce after", "s"),
        text(158, 190, "attention and MLP", "s"),
        arrow(615, 152, 615, 202, both=True),
        text(628, 181, "all-reduce", "s"),
        arrow(254, 80, 506, 80, both=False),
        text(262, 72, "forward: hidden states of a microbatch", "s"),
        arrow(506, 108, 254, 108, both=False),
        text(290, 126, "backward: their gradients", "s"),
        arrow(254, 242, 506, 242, both=False),
        text(300, 234, "the same tensors as above", "s"),
        arrow(506, 270, 254, 270, both=False),
        text(
            40,
            336,
            "Hidden states are [batch of the microbatch, sequence, hidden]. After the last microbatch, each rank",
            "s",
        ),
        text(
            40,
            354,
            "steps on its own weights. With 8 ranks: two such replicas on different batches, gradients averaged.",
            "s",
        ),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, STYLE, ARROW, background, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
