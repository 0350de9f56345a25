import pytest

# Before anything imports it: what its checks compared is said where they fail.
pytest.register_assert_rewrite("tests.support")
