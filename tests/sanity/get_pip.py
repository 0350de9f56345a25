"""Install pip into a virtual environment, in place of the script that ansible-test would download.

The pip that is bundled with Python installs the requested version from the package index.
"""

import subprocess
import sys

requirements = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
subprocess.run([sys.executable, "-m", "ensurepip"], check=True)
subprocess.run([sys.executable, "-m", "pip", "install", *requirements], check=True)
