"""One file of the view, open: what it holds was settled when it was opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from castore.filesystem.content import Content, Made
from castore.filesystem.infos import Info
from castore.ranges import Extent
from castore.tree import File

if TYPE_CHECKING:
    from castore.filesystem.view import CastoreFileSystem

Reader = Callable[[Extent, int, int], bytes]


class CastoreFile(AbstractBufferedFile):  # type: ignore[misc]
    """A seekable binary file, read only.

    It goes on with the same content when a newer snapshot, or a new state of a layout, comes; also
    in another process that it was pickled to. Reads go through the file system's cache of blobs,
    so fsspec's own caches add nothing: ``cache_type`` is ``none`` unless another one is asked for.
    """

    def __init__(
        self,
        fs: CastoreFileSystem,
        path: str,
        content: Content,
        info: Info,
        block_size: int | None = None,
        cache_type: str = "none",
        cache_options: dict[str, Any] | None = None,
    ):
        self._content = content
        self._extent = Extent.of(content) if isinstance(content, File) else None
        super().__init__(  # some caches begin to read here
            fs,
            path,
            "rb",
            block_size=block_size or "default",
            cache_type=cache_type,
            cache_options=cache_options,
            size=content.size,
        )
        self.details = info

    def _fetch_range(self, start: int, end: int) -> bytes:
        if isinstance(self._content, Made):
            return self._content.data[start:end]
        assert self._extent is not None
        found: bytes = self.fs.read_extent(self._extent, start, end)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        if self.closed:
            raise ValueError(f"castore://{self.path} was closed: it cannot be pickled")
        state = (self.fs, self.path, self._content, self.details, self.blocksize, self.cache.name)
        return _reopened, (state, self.loc)


def _reopened(state: tuple[Any, ...], at: int) -> CastoreFile:
    file = CastoreFile(*state)
    file.seek(at)
    return file
