"""The picture of docs/cache.md: the pool after each step of its example.

python -m tests.project.cache_picture    # writes the picture, prints the page's table
"""

import sys

from benchmarks.svg import SERIES, Picture
from tests.project.cache_example import ORIGINS, POOL, Example, Snapshot, rows
from tests.project.tree import ROOT

PICTURE = ROOT / "docs" / "images" / "cache-example.svg"
CELL, GAP, LEFT, TOP, ROW = 9, 22, 60, 64, 78


def draw(snapshots: list[Snapshot]) -> str:
    """The page's picture: the pool after each step, each slot in the colour of its text."""
    picture = Picture(LEFT + POOL * (4 * CELL + GAP) + 250, TOP + ROW * len(snapshots) + 8)
    at = LEFT
    for origin, name in enumerate(ORIGINS):
        picture.rectangle(at, 12, 10, 10, fill=SERIES[origin])
        picture.text(at + 14, 21, name, kind="small")
        at += 30 + 6 * len(name)
    for block in range(POOL):
        picture.text(
            LEFT + block * (4 * CELL + GAP) + 2 * CELL, TOP - 14, f"block {block}", kind="small", anchor="middle"
        )
    picture.text(LEFT + POOL * (4 * CELL + GAP), TOP - 14, "tables", kind="small")
    picture.text(LEFT + POOL * (4 * CELL + GAP) + 120, TOP - 14, "tree", kind="small")
    for number, snapshot in enumerate(snapshots, 1):
        _draw_step(picture, number, snapshot, TOP + ROW * (number - 1))
    return picture.render()


def _draw_step(picture: Picture, number: int, snapshot: Snapshot, top: float) -> None:
    picture.text(14, top + 24, f"{number}", kind="strong")
    sources = {copy.src: copy for copy in snapshot.copies}
    for block, refs in enumerate(snapshot.refs):
        left = LEFT + block * (4 * CELL + GAP)
        picture.rectangle(left - 2, top - 2, 4 * CELL + 4, 4 * CELL + 4, dash="3 3" if refs == "-" else "")
        for slot, token in enumerate(snapshot.slots[block]):
            if refs != "-" and token is not None:
                x, y = left + slot % 4 * CELL, top + slot // 4 * CELL
                opacity = 0.35 if refs == "0" else 1
                picture.rectangle(x, y, CELL - 1, CELL - 1, fill=SERIES[token // 100], opacity=opacity)
        under = {"-": "free", "0": "cached"}.get(refs, f"ref {refs}")
        picture.text(left + 2 * CELL, top + 4 * CELL + 15, under, kind="small", anchor="middle")
        if block in sources:
            copy = sources[block]
            picture.text(left + 2 * CELL, top + 4 * CELL + 26, f"copy to {copy.dst}", kind="small", anchor="middle")
    at = LEFT + POOL * (4 * CELL + GAP)
    for line, (name, blocks) in enumerate(snapshot.tables.items()):
        picture.text(at, top + 8 + 13 * line, f"{name}: {' '.join(map(str, blocks))}", kind="small")
    picture.text(at + 120, top + 8, snapshot.tree, kind="small")


def main() -> None:
    steps = list(Example().steps())
    PICTURE.write_text(draw(steps), encoding="utf-8")
    sys.stdout.write(rows(steps) + "\n")


if __name__ == "__main__":
    main()
