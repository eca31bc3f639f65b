import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.project.tree import PACKAGES, ROOT, modules, project_settings, tracked_files

MAX_LINES = 400
LONG_MODULE = "# Over 400 lines because "


def test_the_architecture_page_has_one_line_for_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = Counter(re.findall(rf"^- `((?:{'|'.join(PACKAGES)})/(?:\w+/)?\w+\.py)`: \S", page, re.MULTILINE))
    there = {str(path.relative_to(ROOT)) for path in modules()}
    assert sorted(there - set(listed)) == [], "modules that the page does not name"
    assert sorted(set(listed) - there) == [], "modules that are not there"
    assert [name for name, count in listed.items() if count > 1] == []


def test_the_architecture_page_says_what_each_dependency_is_for() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    project = project_settings()["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    names = [re.split(r"[<>=]", line)[0] for line in lines]
    assert [name for name in names if not re.search(rf"^\|[^|]*\b{re.escape(name)}\b[^|]*\|", page, re.MULTILINE)] == []


def test_long_modules_say_why() -> None:
    long = [path for path in modules() if len(path.read_text().splitlines()) > MAX_LINES]
    assert [path.name for path in long if LONG_MODULE not in path.read_text()] == []


def test_every_module_says_what_it_is() -> None:
    assert [path.name for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def calls_of(name: str, path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node.lineno


def test_nothing_of_the_cache_rests_on_the_interpreters_own_hash() -> None:
    # It differs from process to process, and its 64 bits are no name for anything.
    assert [
        (path.name, line) for path in modules() if path.parent.name == "cache" for line in calls_of("hash", path)
    ] == []


def test_the_check_sees_a_call_of_the_interpreters_own_hash(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x.hash(1)\ny = [hash((1, 2))]\n")
    assert list(calls_of("hash", path)) == [2]


def imported(path: Path) -> set[str]:
    """What a module imports, at its top or further in, by the first names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


def test_of_the_cache_only_the_storages_know_torch_and_only_the_kernels_modules_know_cuda() -> None:
    cache = {path.name: imported(path) for path in modules() if path.parent.name == "cache"}
    assert {name for name, found in cache.items() if "torch" in found} == {"kv_storage.py", "cuda_storage.py"}
    assert {name for name, found in cache.items() if "cuda" in found} == {"copy_kernel.py", "kernel_compiler.py"}


def test_nothing_is_left_open_in_the_tree() -> None:
    # Put together here, so that this file is not found itself.
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    texts = [path for path in tracked_files() if path.suffix in {".py", ".pyi", ".proto", ".md", ".toml", ".cu"}]
    assert len(texts) > 20
    assert [str(path.relative_to(ROOT)) for path in texts if words.search(path.read_text())] == []
