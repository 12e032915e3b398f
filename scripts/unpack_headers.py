"""Unpacks one folder of a wheel: unpack_headers.py WHEEL FOLDER_IN_WHEEL TARGET."""

import sys
import zipfile
from pathlib import Path


def main(wheel: str, folder: str, target: str) -> None:
    """Writes every file of the folder below the target."""
    prefix = folder.rstrip("/") + "/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith(prefix) or name.endswith("/"):
                continue
            path = Path(target, name.removeprefix(prefix))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
