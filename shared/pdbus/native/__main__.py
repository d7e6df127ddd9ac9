"""Compiles the libraries of all instruction sets into the installation: for images that have no compiler later on."""

from __future__ import annotations

import sys

from pdbus.native.build import LEVELS, NativeUnavailable, ship

if __name__ == "__main__":
    try:
        for level in LEVELS:
            sys.stdout.write(f"compiled {ship(level).name}\n")
    except NativeUnavailable as error:
        raise SystemExit(f"the native kernels can't be compiled here, so torch will serve: {error}") from None
