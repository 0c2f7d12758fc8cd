"""Blocks of documentation pages that a command writes, between two comments that name it."""

from __future__ import annotations

from pathlib import Path

from nearkv.errors import NearkvError


def replace_block(text: str, name: str, command: str, content: str, *, where: Path) -> str:
    """A page with the content of one block replaced.

    Parameters
    ----------
    text : of the page.
    name, command : of the block and of what writes it; both stand in the comment before it.
    content : what is to stand there.
    where : the page's place, for the error.

    Raises
    ------
    NearkvError : the page has no place for the block.

    Examples
    --------
    >>> page = "a\\n<!-- sizes: make sizes -->\\nold\\n<!-- end of sizes -->\\nb"
    >>> replace_block(page, "sizes", "make sizes", "new", where=Path("page.md"))
    'a\\n<!-- sizes: make sizes -->\\n\\nnew\\n\\n<!-- end of sizes -->\\nb'
    """
    begin, end = f"<!-- {name}: {command} -->", f"<!-- end of {name} -->"
    head, began, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not began or not ended:
        raise NearkvError(f"{where} lacks the line {begin}, or {end} after it")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"
