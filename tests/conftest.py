"""Set before any test module imports torch or triton."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# As the server starts its engines: threads that spin starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Triton decides at its first import whether kernels are interpreted, and torch may import it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile(
    "any machine",
    parent=settings(),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")
