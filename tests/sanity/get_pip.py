"""Replaces the script that ansible-test would download to get pip into its virtual environments.

pip comes with Python; the requested version comes from the registry.
"""

import subprocess
import sys

wanted = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
subprocess.run([sys.executable, "-m", "ensurepip"], check=True)
subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True)
