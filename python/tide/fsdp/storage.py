"""The landing allocator: lets FSDP2 resize an unsharded storage into memory chosen by TIDE.

The C++ side is ``bindings/torch_storage.cc``. It is compiled once for each installed torch, at
build time (``python -m tide.fsdp.storage --build``) or at the first ``tide.enable``, and loaded
with ctypes. Compiling is safe when all ranks of a host do it at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tide.file_lock import locked
from tide.fsdp import settings

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARY = "libtide_torch_storage.so"
# Compiling takes seconds; what takes longer than this hangs.
_COMPILE_S = 600.0


def _checkout() -> Path | None:
    """Returns the root of the source tree that this package lies in, or None if installed."""
    root = _PACKAGE.parent.parent
    return root if (root / "bindings" / "torch_storage.cc").is_file() else None


def source_path() -> Path:
    """Returns the C++ source, from the checkout or from the wheel.

    Raises:
        FileNotFoundError: neither place has it.
    """
    root = _checkout()
    wheel = _PACKAGE / "_src" / "torch_storage.cc"
    path = root / "bindings" / "torch_storage.cc" if root else wheel
    if not path.is_file():
        raise FileNotFoundError(f"expected TIDE's torch_storage.cc at {path}; reinstall tide")
    return path


def _cxx11_abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


def _candidates(source: Path) -> list[Path]:
    """Returns the folders that may hold the library, in order of preference."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    key = f"{torch.__version__}-{_cxx11_abi()}-{digest}"
    root = _checkout()
    folders = [root / "build" / "torch_storage" / key] if root else []
    return [*folders, settings.cache_folder() / key]


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return named.split()
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise FileNotFoundError(
        "no C++ compiler found to build TIDE's landing allocator; install g++ or set CXX"
    )


def _compile(source: Path, output: Path) -> None:
    torch_root = Path(torch.__file__).resolve().parent
    command = [
        *_compiler(),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=default"),
        f"-D_GLIBCXX_USE_CXX11_ABI={_cxx11_abi()}",
        f"-I{torch_root / 'include'}",
        str(source),
        *("-o", str(output), f"-L{torch_root / 'lib'}", "-lc10"),
        f"-Wl,-rpath,{torch_root / 'lib'}",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            "compiling TIDE's landing allocator did not come to its end within "
            f"{_COMPILE_S:g} s\ncommand: {' '.join(command)}"
        ) from error
    if done.returncode != 0:
        raise RuntimeError(
            f"could not compile TIDE's landing allocator for torch {torch.__version__}\n"
            f"command: {' '.join(command)}\n{done.stderr[-4000:]}"
        )


def _build_in(folder: Path, source: Path) -> Path:
    """Compiles into ``folder`` under a lock, so that the ranks of a host compile once."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _LIBRARY
    with locked(folder / "lock", _COMPILE_S, f"remove {folder}"):
        if library.is_file():
            return library
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(source, Path(name))
            os.replace(name, library)
        except BaseException:
            os.unlink(name)
            raise
    return library


def build() -> Path:
    """Returns the library for the installed torch, compiling it if there is none.

    Raises:
        RuntimeError: the compiler failed, or took more than 600 s. TimeoutError: another process
        has held the lock for as long. FileNotFoundError: no compiler or no source. OSError: no
        folder is writable.
    """
    source = source_path()
    folders = _candidates(source)
    for folder in folders:
        if (folder / _LIBRARY).is_file():
            return folder / _LIBRARY
    failure: OSError | None = None
    for folder in folders:
        try:
            return _build_in(folder, source)
        except TimeoutError:
            raise
        except OSError as error:
            failure = error
    raise failure or OSError(f"no writable folder among {folders}")


@functools.cache
def library() -> ctypes.PyDLL:
    """Loads the library, with the types of its functions set and its view of a storage checked.

    The GIL stays held during calls: they are shorter than releasing it.
    """
    loaded = ctypes.PyDLL(str(build()))
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("tide_slot_open", pointer, [pointer, pointer]),
        ("tide_slot_close", None, [pointer]),
        ("tide_slot_live", ctypes.c_int64, [pointer]),
        ("tide_segment_take", pointer, [pointer, u64, u64]),
        ("tide_segment_release", None, [pointer]),
        ("tide_segment_count", ctypes.c_int64, []),
        ("tide_storage_bytes", u64, [pointer]),
        ("tide_landing_attach", pointer, [pointer]),
        ("tide_landing_detach", ctypes.c_int, [pointer, pointer]),
        ("tide_landing_bind", None, [pointer, pointer, pointer, u64, pointer, pointer]),
        ("tide_landing_unbind", None, [pointer, u64]),
        ("tide_landing_count", ctypes.c_int64, []),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    storage = torch.empty(37, dtype=torch.uint8).untyped_storage()
    if loaded.tide_storage_bytes(storage._cdata) != storage.nbytes():
        raise RuntimeError(
            "TIDE's landing allocator was compiled against headers that do not fit the loaded "
            f"torch {torch.__version__}; remove {build().parent} and try again"
        )
    return loaded


class SlotHold:
    """Counts the storages that lie in one slot, and keeps the slot's segment mapped for them."""

    handle: int | None = None

    def __init__(self, lease: tuple[int, int]) -> None:
        """Takes ownership of ``lease``: (context address, address of the release function)."""
        self._library = library()
        self.handle = self._library.tide_slot_open(*lease)

    def __del__(self) -> None:
        """Closes: nobody gives back the slots that are live when their communicator ends."""
        self.close()

    @property
    def live(self) -> int:
        """Number of storages whose memory lies in the slot."""
        return self._library.tide_slot_live(self.handle) if self.handle is not None else 0

    def close(self) -> None:
        """Gives up the owner's share; storages in the slot stay valid."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._library.tide_slot_close(handle)


class LandingSet:
    """The landing allocators of one group's parameters, bound together to one slot."""

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Attaches an allocator to the storage of each tensor.

        Args:
            tensors: one 1-D tensor with zero offset for each parameter.
            offsets: byte offset of each one's landing inside a slot.

        Raises:
            ValueError: a storage cannot be resized.
        """
        self._library = library()
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._count = len(self._storages)
        landings: list[int] = []
        self._handles = (ctypes.c_void_p * self._count)()
        for i, storage in enumerate(self._storages):
            landing = self._library.tide_landing_attach(storage._cdata)
            if landing is None:
                for earlier, attached in zip(self._storages, landings, strict=False):
                    self._library.tide_landing_detach(attached, earlier._cdata)
                self._count = 0
                raise ValueError("expected a resizable storage for the unsharded parameter")
            landings.append(landing)
            self._handles[i] = landing
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        self._offsets = (ctypes.c_uint64 * self._count)(*offsets)
        self._bytes = (ctypes.c_uint64 * self._count)(*sizes)

    def bind(self, address: int, hold: SlotHold) -> None:
        """Lets the next resize of each storage to its full size take its place at ``address``."""
        self._library.tide_landing_bind(
            self._handles, self._offsets, self._bytes, self._count, address, hold.handle
        )

    def unbind(self) -> None:
        """Forgets bindings that no resize has used."""
        self._library.tide_landing_unbind(self._handles, self._count)

    def free(self) -> None:
        """Resizes the storages to zero."""
        for storage in self._storages:
            if storage.size() != 0:
                storage.resize_(0)

    def detach(self) -> None:
        """Gives the storages back their earlier allocators; what has landed stays valid."""
        for storage, landing in zip(self._storages, self._handles, strict=False):
            if self._count:
                self._library.tide_landing_detach(landing, storage._cdata)
        self._storages, self._count = [], 0


def take_segment(memory: torch.UntypedStorage, pool_id: tuple[int, int]) -> tuple[int, int]:
    """Takes the memory out of a storage, which is empty then.

    Returns (context, address of the release function): a call of the function with the context, by
    any thread, gives the memory back, and frees the pool that it came from.
    """
    loaded = library()
    segment = loaded.tide_segment_take(memory._cdata, *pool_id)
    return segment, ctypes.cast(loaded.tide_segment_release, ctypes.c_void_p).value


def segment_count() -> int:
    """Returns the number of segments that torch's allocator gave and has not got back."""
    return library().tide_segment_count()


def landing_count() -> int:
    """Returns the number of landing allocators attached in this process."""
    return library().tide_landing_count()


if __name__ == "__main__":
    if sys.argv[1:] != ["--build"]:
        sys.exit("usage: python -m tide.fsdp.storage --build")
    print(build())
