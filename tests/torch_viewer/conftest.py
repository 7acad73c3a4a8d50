"""These tests need PyTorch: `tox -e torch` installs it and runs them, and nothing else collects them."""

import os

collect_ignore_glob = [] if "ASYNCMEM_TEST_TORCH" in os.environ else ["test_*.py"]
