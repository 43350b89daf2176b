"""Set before any test module imports torch."""

import os

# As the server starts its engines: threads that spin starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
