"""Files are whole or absent; fingerprints change with content only."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.storage import atomic_file, fingerprint, read_json, replace_folder, write_atomic, write_json


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match=r"x\.json"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(RuntimeError, match="power cut"):
        _interrupted_write(path)
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def _interrupted_write(path: Path) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("power cut")


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x.json", b'{\n"a": }')
    with pytest.raises(ValueError, match=r"x\.json, line 2"):
        read_json(tmp_path / "x.json")


def test_fingerprints() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint("a", "b") != fingerprint("ab")


def test_a_folder_is_swapped_whole(tmp_path: Path) -> None:
    for name in ("new", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").touch()
    replace_folder(tmp_path / "new", tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "new.txt").exists()
