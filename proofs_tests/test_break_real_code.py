"""The edits of ``make breaks`` still fit the code: the run itself takes too long for every day."""

from __future__ import annotations

from pathlib import Path

import pytest

from proofs_tests.break_real_code import EDITS, ROOT, Edit


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.bug}, {edit.file}")
def test_an_edit_applies_and_leaves_python_behind(edit: Edit, tmp_path: Path) -> None:
    copy = tmp_path / edit.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / edit.file).read_text())
    edit.apply(tmp_path)
    assert copy.read_text() != (ROOT / edit.file).read_text()
    compile(copy.read_text(), edit.file, "exec")
