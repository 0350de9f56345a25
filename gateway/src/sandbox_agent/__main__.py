import sys
from os.path import abspath, dirname

# The installer compiles the byte code, because writing a file blocks while the root file system is frozen.
sys.dont_write_bytecode = True

if not __package__:
    # Run as a folder: import the package from the parent, so that files in the folder do not shadow standard modules.
    folder = dirname(abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and abspath(entry) != folder]
    sys.path.append(dirname(folder))

from sandbox_agent.agent import main  # noqa: E402

sys.exit(main())
