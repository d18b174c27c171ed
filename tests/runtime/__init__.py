"""What a compiled body is while it is used: its outputs, weights, failures, threads, reports, and what PyTorch expects
of a module.  Every test checks both that the numbers are right and that a graph was, or was not, replayed."""

import pytest

# A failing check says what it compared, as it would in a test file.
pytest.register_assert_rewrite("tests.runtime.bodies")
