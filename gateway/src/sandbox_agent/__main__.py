import sys
from os.path import abspath, dirname

# Writing a file blocks while the root file system is frozen, so the installer writes the byte code.
sys.dont_write_bytecode = True

if not __package__:
    # Run as a folder: import through its parent, so that no file in the folder shadows the standard library.
    here = dirname(abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and abspath(entry) != here]
    sys.path.append(dirname(here))

from sandbox_agent.agent import main  # noqa: E402

sys.exit(main())
