"""C++ is compiled once for each source, compiler and machine; where it cannot be, the reason is told."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixgate.worker.native_library import NativeUnavailableError, load_native


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def load(tmp_path: Path) -> Callable[[Path], ctypes.CDLL]:
    def load(source: Path) -> ctypes.CDLL:
        try:
            return load_native(source, tmp_path / "cache", lambda line: None)
        except NativeUnavailableError as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise

    return load


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").glob("*.so"))


def test_a_source_is_compiled_once(tmp_path: Path, source: Path, load: Callable[[Path], ctypes.CDLL]) -> None:
    assert load(source).answer() == 42
    made = [(path, path.stat().st_mtime_ns) for path in libraries(tmp_path)]
    assert load(source).answer() == 42
    assert [(path, path.stat().st_mtime_ns) for path in libraries(tmp_path)] == made


def test_a_changed_source_is_another_library(tmp_path: Path, source: Path, load: Callable[[Path], ctypes.CDLL]) -> None:
    assert load(source).answer() == 42
    source.write_text(source.read_text().replace("42", "43"))
    assert load(source).answer() == 43
    assert len(libraries(tmp_path)) == 2


def test_those_who_start_together_make_it_once(
    tmp_path: Path, source: Path, load: Callable[[Path], ctypes.CDLL]
) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(load(source).answer())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 3
    assert len(libraries(tmp_path)) == 1
    assert [path for path in (tmp_path / "cache" / "native").iterdir() if path.name.startswith("unfinished")] == []


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(
    source: Path, load: Callable[[Path], ctypes.CDLL]
) -> None:
    source.write_text("this is no C++\n")
    with pytest.raises(NativeUnavailableError, match=r"ended with status 1: .*answer\.cpp:1"):
        load(source)


def test_without_a_compiler_there_is_no_library(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(NativeUnavailableError, match="there is no C\\+\\+ compiler: 'no-such-compiler' is not found"):
        load_native(source, tmp_path / "cache", lambda line: None)


def test_a_library_that_cannot_be_loaded_is_told(
    tmp_path: Path, source: Path, load: Callable[[Path], ctypes.CDLL]
) -> None:
    load(source)
    (library,) = libraries(tmp_path)
    other = tmp_path / "other"
    (other / "native").mkdir(parents=True)
    (other / "native" / library.name).write_bytes(b"no library")
    with pytest.raises(NativeUnavailableError, match="answer-"):
        load_native(source, other, lambda line: None)
