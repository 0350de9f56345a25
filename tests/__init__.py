import pytest

# Must run before the first import of tests.support, so that its failed assertions show the compared values.
pytest.register_assert_rewrite("tests.support")
