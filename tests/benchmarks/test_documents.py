"""The folder of real documents that a start is measured with."""

from pathlib import Path

from benchmarks.documents import BAD, collect


def test_a_folder_has_so_many_documents_and_some_that_cannot_be_read(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    for place in (source, folder):
        place.mkdir()
    for number in range(6):
        (source / f"{number}.md").write_text(f"{number} words " * 100)
    (source / "large.txt").write_text("words " * 1000)
    (source / "code.py").write_text("x = 1\n" * 100)
    collect([source], folder, files=len(BAD) + 4, megabytes=1.0, largest=2000)
    found = {path.name for path in folder.iterdir()}
    assert {*BAD} < found and len(found) == len(BAD) + 4 and not any("large" in name for name in found)
