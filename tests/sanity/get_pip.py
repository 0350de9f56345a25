"""Install pip into a virtual environment. Replaces the script that ansible-test would download.

The version of pip that Python includes installs the requested version from the registry.
"""

import subprocess
import sys

requirements = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
subprocess.run([sys.executable, "-m", "ensurepip"], check=True)
subprocess.run([sys.executable, "-m", "pip", "install", *requirements], check=True)
