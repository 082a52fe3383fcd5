"""The committed chaos matrix holds every cell, each with an outcome: nothing was left out, nothing failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvrx_sre.faults.plan import FaultKind
from tests.chaos.cells import COLUMNS, EXPECTED, LEGEND, Row, Victim, matrix_rows, second_rows
from tests.chaos.render import PAGE, WORDS, page

ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<cells>.*) \|$", re.MULTILINE)


def shown() -> dict[str, list[str]]:
    """Name of each row of the page -> its cells."""
    return {match["name"]: match["cells"].split(" | ") for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("row", [*matrix_rows(), *second_rows()], ids=lambda row: row.name)
def test_every_cell_has_its_outcome(row: Row) -> None:
    """A cell that makes no sense shows its reason, every other how it was cured."""
    cells = dict(zip(COLUMNS[row.table], shown()[row.name], strict=True))
    assert {column: cell for column, cell in cells.items() if cell in LEGEND} == row.blanks
    struck = {strike.column for strike in row.strikes}
    assert struck | set(row.blanks) == set(cells), "every column is struck or has a reason not to be"
    assert {cells[column] for column in struck} <= set(WORDS.values())


def test_the_page_is_what_the_cells_make_of_it(tmp_path: Path) -> None:
    """But for the outcomes, the page is the one that is generated: headings, legend, rows and columns."""
    committed = PAGE.read_text(encoding="utf-8")
    generated = page(tmp_path)
    assert ROW.sub("", committed) == ROW.sub("", generated)
    assert list(shown()) == list(dict.fromkeys(match["name"] for match in ROW.finditer(generated)))


@pytest.mark.parametrize("kind", EXPECTED)
def test_c48_rank_0_is_struck_like_any_other(kind: FaultKind) -> None:
    """The store is the launcher's: in no phase does a fault of rank 0 cost more than one of the last rank."""
    assert shown()[f"{kind}, {Victim.FIRST}"] == shown()[f"{kind}, {Victim.LAST}"]
