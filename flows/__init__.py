"""What runs, and in which order."""

import os

# Sampler and learner take turns on the same cores: threads of the one must not spin while the other computes. It has to
# be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
