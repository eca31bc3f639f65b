"""SHA-256 digests of large files, remembered as long as a file's path, size and time of change stay the same."""

import hashlib
import os
from pathlib import Path


class FileDigests:
    """Digests files, keeping each result as a small file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sha256(self, path: Path) -> str:
        """Return the digest of a file's bytes, hexadecimal."""
        status = path.stat()
        identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ino}"
        memory = self._folder / hashlib.sha256(identity.encode()).hexdigest()
        if memory.is_file():
            return memory.read_text().strip()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed, so that another process never reads half a digest.
        unfinished = memory.with_suffix(f".{os.getpid()}")
        unfinished.write_text(digest)
        unfinished.replace(memory)
        return digest
