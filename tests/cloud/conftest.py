from tests.cloud.fixtures import cloud

__all__ = ["cloud"]
