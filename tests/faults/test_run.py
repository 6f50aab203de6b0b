"""The runner of faults, on a tree of two files; and the list of faults, on the library as it stands."""

import pytest

from tests.faults.run import GONE, LIST, ROOT, main, place_of, read_faults, selection

_CODE = "def half(number):\n    return number // 2\n\n\nlimit = 3\n"
_TESTS = "from dspark_store.code import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
_FORGOTTEN = 5  # faults whose lines may be gone before somebody tends the list


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A library of one module with one test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take most of the time
    for path, text in (("dspark_store/code.py", _CODE), ("tests/test_code.py", _TESTS)):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def try_out(tree, *faults):
    """Run faults, each its line and what it becomes, on the tree; return the exit code."""
    entries = [
        f'[[fault]]\nname = "fault {number}"\nfind = {find!r}\nreplace = {replace!r}\ntests = ["test_half"]\n'
        for number, (find, replace) in enumerate(faults)
    ]
    (tree / "faults.toml").write_text("".join(entries), encoding="utf-8")
    return main(["--jobs", "2"], tree, tree / "faults.toml")


def test_a_fault_that_a_test_sees_is_killed_and_one_without_a_place_is_none(tree, capsys):
    assert try_out(tree, ("number // 2", "number // 3"), ("number // 4", "0")) == 0
    told = capsys.readouterr().out
    assert "killed: fault 0\n    test_half\n" in told
    assert f"{GONE}: fault 1" in told
    assert (tree / "dspark_store/code.py").read_text(encoding="utf-8") == _CODE


def test_a_fault_that_no_test_sees_survives(tree, capsys):
    assert try_out(tree, ("limit = 3", "limit = 4")) == 1
    assert "SURVIVED: fault 0" in capsys.readouterr().out


def test_tests_that_cannot_run_have_killed_nothing(tree, capsys):
    assert try_out(tree, ("def half", "def third")) == 1
    assert "TESTS DO NOT RUN: fault 0" in capsys.readouterr().out


def test_a_tree_that_fails_unbroken_is_told_and_nothing_is_broken(tree, capsys):
    (tree / "dspark_store/code.py").write_text(_CODE.replace("// 2", "// 3"), encoding="utf-8")
    assert try_out(tree, ("limit = 3", "limit = 4")) == 2
    assert "fault 0" not in capsys.readouterr().out


def test_a_fault_of_two_places_is_an_error(tree):
    with pytest.raises(ValueError, match=r"fault 0: 'number' stands in dspark_store/code\.py"):
        try_out(tree, ("number", "other"))


def test_nearly_every_fault_has_one_place_and_tests_that_are_there():
    placed = [fault for fault in read_faults(LIST) if place_of(fault, ROOT) is not None]
    assert len(read_faults(LIST)) - len(placed) <= _FORGOTTEN
    assert all(selection(fault.tests, ROOT) for fault in placed)
