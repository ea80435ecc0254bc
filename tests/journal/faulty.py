"""A disk whose next calls fail on demand."""

from __future__ import annotations

from .simdisk import SimDisk


class FaultyDisk(SimDisk):
    """`plan[(call, start of a name)] = errno`: such calls fail, and do nothing, until the entry is taken out."""

    def __init__(self, image: dict[str, bytes] | None = None) -> None:
        super().__init__(image)
        self.plan: dict[tuple[str, str], int] = {}
        self.failed: list[str] = []

    def _planned(self, call: str, name: str) -> None:
        for (wanted, start), code in self.plan.items():
            if wanted == call and name.startswith(start):
                self.failed.append(f"{call} {name}")
                raise OSError(code, "planned")

    def create(self, name: str) -> None:
        self._planned("create", name)
        super().create(name)

    def write(self, name: str, offset: int, data: bytes) -> None:
        self._planned("write", name)
        super().write(name, offset, data)

    def truncate(self, name: str, size: int) -> None:
        self._planned("truncate", name)
        super().truncate(name, size)

    def sync(self, name: str) -> None:
        self._planned("sync", name)
        super().sync(name)

    def rename(self, old: str, new: str) -> None:
        self._planned("rename", new)
        super().rename(old, new)

    def syncdir(self, folder: str) -> None:
        self._planned("syncdir", folder)
        super().syncdir(folder)

    def unlink(self, name: str) -> None:
        self._planned("unlink", name)
        super().unlink(name)

    def mkdir(self, name: str) -> None:
        self._planned("mkdir", name)
        super().mkdir(name)

    def rmdir(self, name: str) -> None:
        self._planned("rmdir", name)
        super().rmdir(name)

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        self._planned("read_at", name)
        return super().read_at(name, offset, size)
