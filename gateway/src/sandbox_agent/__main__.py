import sys
from os.path import abspath, dirname

# A file written while the root file system is frozen would block its writer: leave byte code to the installer.
sys.dont_write_bytecode = True

if not __package__:
    # Run as a folder: the modules are found through its parent, and nothing in either shadows the standard library.
    here = dirname(abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and abspath(entry) != here]
    sys.path.append(dirname(here))

from sandbox_agent.agent import main  # noqa: E402

sys.exit(main())
