import sys
from os.path import abspath, dirname

# The installer compiles the byte code, because writing a file blocks while the root file system is frozen.
sys.dont_write_bytecode = True

if not __package__:
    # Run as a directory: import the package from the parent directory, so that the files in this directory do not
    # shadow standard modules.
    package_directory = dirname(abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and abspath(entry) != package_directory]
    sys.path.append(dirname(package_directory))

from sandbox_agent.agent import main  # noqa: E402

sys.exit(main())
