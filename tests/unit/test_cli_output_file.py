"""What a command that is told to write a file refuses before its work, as a user who is not root."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.core.atomic import write_bytes_atomically
from nvrx_sre.core.errors import StorageError, UserError

NOBODY = 65534


@contextlib.contextmanager
def as_a_user() -> Iterator[None]:
    """Without root's power over every file, where this process has it."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that takes no new file from the user, and that the user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        made = Path(name)
        (made / "open").write_text("old")
        (made / "open").chmod(0o666)
        (made / "closed").write_text("old")
        (made / "closed").chmod(0o444)
        (made / "own").mkdir()
        (made / "own").chmod(0o777)
        (made / "link").symlink_to(made / "own" / "new")
        (made / "private").mkdir(mode=0o000)
        made.chmod(0o555)
        yield made
        made.chmod(0o700)
        (made / "private").chmod(0o700)


@pytest.mark.parametrize("name", ["open", "own/new", "link", "/dev/null", "closed", "new", "private/new"])
def test_what_is_written_in_place_is_refused_only_if_it_cannot_be_written(folder: Path, name: str) -> None:
    """A file of mode 0666 in a folder of somebody else, a device, a link to what is not there yet: as writing goes."""
    path = folder / name
    with as_a_user():
        try:
            check_output_file(path)
            is_accepted = True
        except UserError as error:
            is_accepted = False
            assert str(error).startswith(f"cannot write {path}: ")
        try:
            path.write_text("")
            is_written = True
        except OSError:
            is_written = False
    assert (is_accepted, is_written) == ((True, True) if name not in ("closed", "new", "private/new") else (False,) * 2)


@pytest.mark.parametrize(("name", "is_possible"), [("own/new", True), ("open", False), ("new", False)])
def test_what_is_renamed_needs_its_folder(folder: Path, name: str, is_possible: bool) -> None:
    """The rows of a benchmark are written beside the file: that this one can be written does not help."""
    path = folder / name
    with as_a_user():
        for write in (
            lambda: check_output_file(path, is_renamed=True),
            lambda: write_bytes_atomically(path, b"", durable=False),
        ):
            with contextlib.nullcontext() if is_possible else pytest.raises((UserError, StorageError)):
                write()


def test_the_directory_that_is_made_is_no_file(tmp_path: Path) -> None:
    """Neither it, whether or not it is there yet, nor a folder in it; a file in it is."""
    made = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(UserError, match="it is a folder; name a file"):
            check_output_file(made, made=made)
        check_output_file(made / "told" / "s.json", made=made)
        (made / "logs").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError, match="it is a folder; name a file"):
        check_output_file(made / "logs", made=made)
