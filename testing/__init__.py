"""Contract suites for those who write a part of holdfast, such as a store. They run in pytest."""

from holdfast.coordination.distribution import install_command

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError(f"holdfast.testing needs pytest: {install_command('testing')}") from error

# An assertion that fails shows its values only in modules that pytest was told of.
pytest.register_assert_rewrite("holdfast.testing.storage_contract")

from .storage_contract import StorageContract  # noqa: E402

__all__ = ["StorageContract"]
