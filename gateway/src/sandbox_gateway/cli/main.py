"""The entry point of `sandboxctl`.

Queries do not load the command-line library, because importing it would take most of their run time. At import time,
the modules that a query uses (`quick`, `queries`, `settings`, `client`, `render`, `formats`, `failure`) load only
modules that `http.client` and `json` load anyway. They import everything else where they use it, and do not use
`typing`.
"""

from __future__ import annotations

import sys

from sandbox_gateway.cli import quick
from sandbox_gateway.cli.failure import ExitCode, Failure

_INTERRUPTED_EXIT_CODE = 130


def main() -> None:
    """Run the command line. Prints a Failure to standard error, and exits with its code."""
    try:
        query = quick.parse(sys.argv[1:])
        if query is not None:
            query()
            sys.exit(ExitCode.OK)
        from sandbox_gateway.cli.app import app

        app()
    except Failure as failure:
        from sandbox_gateway.cli import render

        render.print_note(f"sandboxctl: {failure.message}")
        if failure.hint:
            render.print_note(f"  {failure.hint}")
        sys.exit(failure.code)
    except BrokenPipeError:
        # The reader of the output has closed it: prevent the interpreter from flushing to it at exit.
        sys.stdout = None
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
