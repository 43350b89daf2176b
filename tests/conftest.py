"""Set before any test module imports torch or triton."""

import os
from pathlib import Path

# As the server starts its engines: threads that spin starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Triton decides at its first import whether kernels are interpreted, and torch may import it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
