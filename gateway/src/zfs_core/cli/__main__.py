"""Run `lzc` as `python3 -m zfs_core.cli`."""

import sys

from zfs_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
